"""What the demo's fleet costs, and therefore what a successful task costs.

A simulated engine with a speed-up of s does in one second what its hardware does in s seconds, so a
load period of T seconds of the wall clock stands for s x T seconds of every GPU in the catalogue:

    cost per successful task = sum(GPUs of a node x $/hour of their type) x s x T / 3600 / successes

Idle time is paid for, as it is in a real fleet.
"""

from collections.abc import Iterable

SECONDS_PER_HOUR = 3_600


def fleet_usd_per_hour(nodes: Iterable[tuple[int, float]]) -> float:
    """Price of all nodes, each given as its number of GPUs and the dollars per hour of one of
    them.
    """
    return sum(gpus * usd_per_hour for gpus, usd_per_hour in nodes)


def cost_per_success_usd(
    usd_per_hour: float, wall_s: float, speedup: float, successes: int
) -> float | None:
    """Dollars per successful task, None when there was none."""
    if successes == 0:
        return None
    return usd_per_hour * wall_s * speedup / SECONDS_PER_HOUR / successes
