"""Tokens of one request: as engines report them, else estimated from what was relayed."""

from controlplane.domain.outcome import Usage
from controlplane.wire.openai import UsageWire

NOTHING_USED = Usage(0, 0, 0, is_estimated=False)


def reported(wire: UsageWire, cached_by_prefill: int | None = None) -> Usage:
    """What an engine counted. `cached_by_prefill`: cached tokens that the prefill leg reported.

    With two legs the prompt is counted once, by the decode engine; what came over from the prefill
    engine looks cached there and is not, so the prefill engine's own cache hits are what counts.
    """
    prompt = max(0, wire.prompt_tokens)
    details = wire.prompt_tokens_details
    cached = cached_by_prefill
    if cached is None:
        cached = 0 if details is None else details.cached_tokens or 0
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=min(max(0, cached), prompt),
        completion_tokens=max(0, wire.completion_tokens or 0),
        is_estimated=False,
    )


def estimated(prompt_tokens: int, completion_tokens: int) -> Usage:
    """What was seen go by: the call's estimate of its prompt, the counted pieces of the answer."""
    return Usage(
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
        completion_tokens=completion_tokens,
        is_estimated=True,
    )


def counted(prompt_tokens: int, completion_tokens: int) -> Usage:
    """What the ids of tokens say of an answer whose engines did not come to report its usage."""
    return Usage(prompt_tokens, 0, completion_tokens, is_estimated=False)
