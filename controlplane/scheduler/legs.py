"""The three shapes in which a call meets one engine."""

from typing import Final

# Plain integers, not an enum: the compiled core inlines them.
WHOLE: Final = 0  # prefill and decode on this engine
PREFILL: Final = 1  # the prompt is computed here and its KV handed over
DECODE: Final = 2  # the prompt's KV arrives from a prefill engine of the same `pair_key`
