"""By when a workflow is wanted: three models of what a deadline says about the work behind it.

The gain of ordering by deadline depends on how much of a workflow's size its deadline gives away, so
every result is shown under all three.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from random import Random
from typing import Final

# Slack over the isolated time by priority, highest first (tight, middle, loose).
SLACKS: Final = (1.5, 3.0, 10.0)
# Deviation of the logarithm by which a blurred deadline is off, in both directions.
BLUR_SIGMA: Final = 0.8


class Deadlines(StrEnum):
    """`own`: slack x the workflow's own isolated time. `blurred`: that x a lognormal factor of median 1.
    `class`: slack x the mean isolated time of its class, whatever the workflow's size.
    """

    OWN = "own"
    BLURRED = "blurred"
    CLASS = "class"


def deadline_s(
    deadlines: Deadlines, *, isolated_s: float, class_mean_s: float, slack: float, random: Random
) -> float:
    """Seconds from arrival. One draw is taken from `random` whatever the model is, so that the worlds
    of the three models are alike in everything else.
    """
    blur = math.exp(BLUR_SIGMA * random.gauss(0.0, 1.0))
    match deadlines:
        case Deadlines.OWN:
            return slack * isolated_s
        case Deadlines.BLURRED:
            return slack * isolated_s * blur
        case Deadlines.CLASS:
            return slack * class_mean_s


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
