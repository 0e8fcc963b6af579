"""Which arrivals are refused while calls wait too long: a cursor over ranks, moved by the queue's delay.

After DAGOR (Zhou et al., SoCC 2018): the cursor falls back by a share of what was admitted when a
window was overloaded, and lets a little more in when it was not, found in a histogram of the ranks
that arrived. All steps of a workflow have one fate, since only its first is ever compared. No clock.
"""

from collections import Counter
from math import log2
from typing import Final
from zlib import crc32

from controlplane.domain.request import Request

WINDOW_MS: Final = 1_000
# Shares of what is admitted: taken away after an overloaded window, given back after another one.
CUT_RATIO: Final = 0.05
GIVE_RATIO: Final = 0.01
# A pool is overloaded while even its luckiest call waits this share of its time to first token, and
# until none has waited longer than the second share for CALM_MS.
OVERLOADED_FROM_RATIO: Final = 0.25
CALM_BELOW_RATIO: Final = 0.10
CALM_MS: Final = 5_000

PRIORITIES: Final = 10
WORTHS: Final = 64
SHARES: Final = 64
RANKS: Final = PRIORITIES * WORTHS * SHARES
# Worths are told apart by half a doubling, from this many micro-dollars per seat-second.
WORTH_STEPS_PER_DOUBLING: Final = 2
WORTH_LEAST: Final = 1.0


def worth_level(value_micro_usd: float, work_ms: float) -> int:
    """What a second of a seat earns when the workflow is carried to its end, its value over its work.

    0..WORTHS - 1, half a doubling each, from WORTH_LEAST micro-dollars on.
    """
    worth = value_micro_usd / max(work_ms, 1.0) * 1_000.0
    level = int(log2(max(worth, WORTH_LEAST) / WORTH_LEAST) * WORTH_STEPS_PER_DOUBLING)
    return min(WORTHS - 1, level)


def level_micro_usd_per_s(level: int) -> float:
    """The least worth of a level."""
    return float(WORTH_LEAST * 2.0 ** (level / WORTH_STEPS_PER_DOUBLING))


def rank(request: Request, work_ms: float) -> int:
    """Where a workflow stands among those that want in: priority, then worth, then a hash of its id.

    In 0..RANKS - 1, higher is let in sooner.
    """
    level = worth_level(request.weight * request.value_micro_usd, work_ms)
    priority = max(0, min(PRIORITIES - 1, request.priority))
    return (priority * WORTHS + level) * SHARES + share_of(request)


def share_of(request: Request) -> int:
    """0..SHARES - 1, the same for all calls of a workflow: who of those that are worth the same is let in."""
    return crc32((request.workflow or request.id).encode()) % SHARES


class Levels:
    """One pool's cursor. Ranks below it are refused; 0 refuses nobody."""

    __slots__ = (
        "_admitted", "_arrived", "_calm_since_ms", "_least_wait_ratio", "_most_wait_ratio", "_window_ends_ms",
        "cursor", "is_overloaded",
    )  # fmt: skip

    def __init__(self) -> None:
        self.cursor = 0
        self.is_overloaded = False
        self._arrived: Counter[int] = Counter()
        self._admitted = 0
        self._least_wait_ratio: float | None = None
        self._most_wait_ratio = 0.0
        self._window_ends_ms = 0
        self._calm_since_ms: int | None = None

    def admits(self, arrival_rank: int) -> bool:
        """Count an arrival and say whether its rank is let in."""
        self._arrived[arrival_rank] += 1
        is_admitted = arrival_rank >= self.cursor
        self._admitted += is_admitted
        return is_admitted

    def waited(self, wait_ms: float, ttft_ms_max: int) -> None:
        """A call left the queue, or stands first in it, after `wait_ms`."""
        ratio = wait_ms / max(1, ttft_ms_max)
        least = self._least_wait_ratio
        self._least_wait_ratio = ratio if least is None or ratio < least else least
        self._most_wait_ratio = max(self._most_wait_ratio, ratio)

    def tick(self, now_ms: int) -> None:
        """Close the window when its time has come. Calling more often changes nothing."""
        if now_ms < self._window_ends_ms:
            return
        is_first = self._window_ends_ms == 0
        self._window_ends_ms = now_ms + WINDOW_MS
        if is_first:
            return
        self._judge(now_ms)
        self._move()
        self._arrived.clear()
        self._admitted = 0
        self._least_wait_ratio = None
        self._most_wait_ratio = 0.0

    def _judge(self, now_ms: int) -> None:
        least = self._least_wait_ratio or 0.0
        if least > OVERLOADED_FROM_RATIO:
            self.is_overloaded = True
            self._calm_since_ms = None
            return
        if self._most_wait_ratio >= CALM_BELOW_RATIO:
            self._calm_since_ms = None
            return
        if self._calm_since_ms is None:
            self._calm_since_ms = now_ms
        if now_ms - self._calm_since_ms >= CALM_MS:
            self.is_overloaded = False

    def _move(self) -> None:
        least = self._least_wait_ratio or 0.0
        total = self._arrived.total()
        if least > OVERLOADED_FROM_RATIO:
            wanted = self._admitted * (1.0 - CUT_RATIO) if self._admitted else 0.0
            # With fewer arrivals than a cut is worth, one is still taken away.
            wanted = min(wanted, self._admitted - 1.0)
        elif self.cursor == 0:
            return
        else:
            wanted = self._admitted + max(1.0, total * GIVE_RATIO)
            if wanted >= total:
                self.cursor = max(0, self.cursor - RANKS // 100)
                return
        self.cursor = self._cursor_for(wanted)

    def _cursor_for(self, wanted: float) -> int:
        """The lowest rank such that no more than `wanted` of the window's arrivals were at or above it."""
        counted = 0
        lowest = max(self._arrived, default=self.cursor) + 1
        for arrival_rank in sorted(self._arrived, reverse=True):
            counted += self._arrived[arrival_rank]
            if counted > wanted:
                break
            lowest = arrival_rank
        return min(lowest, RANKS - SHARES)
