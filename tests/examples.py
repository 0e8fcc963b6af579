"""How many sequences a state machine is tried with: many before a change lands, fewer at one's desk.

The profile `ci`, which `.ci/run` chooses, is the derandomised one: the same sequences on every run.
"""

from typing import Final

from hypothesis import settings

MACHINE_EXAMPLES_MIN: Final = 2_000
# For the slowest machine on a busy computer: 100 s of CPU time.
MACHINE_S_MAX: Final = 600


def machine_examples(at_desk: int) -> int:
    """MACHINE_EXAMPLES_MIN under the profile `ci`, else `at_desk`."""
    is_ci = settings.default is not None and settings.default.derandomize
    return MACHINE_EXAMPLES_MIN if is_ci else at_desk
