"""What a second of engine time is worth in a pool, and how full engines should be: prices that clear the demand.

Everything that asks to begin is counted by priority, by worth (dollars for each second of work) and by
tolerance (how much longer than on an empty engine it may take), the latest counting most. When all of
it is more than the pool can do in that time, what is worth least is refused: the continuous knapsack,
whose optimum takes by worth. Of what is worth the same, higher priorities are let in first, and of
those a share by hash.

The fuller engines are, the more they do and the longer each call takes: of a grid of stretches, the one
under which most value ends in time is wanted. Priorities that could be let in whole count for much more
there, so that their pace is not sold for others. No clock.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log2
from typing import Final, NamedTuple

from controlplane.admission.levels import SHARES, level_micro_usd_per_s, worth_level

# Demand is measured over so many times the time that workflows are given, and for as long as so many take to
# come, within these bounds.
GIVEN_TIMES: Final = 2.0
ASKED_WANTED: Final = 80.0
WINDOW_MS_MIN: Final = 10_000.0
WINDOW_MS_MAX: Final = 600_000.0
GIVEN_GAIN: Final = 0.05
# Arrivals, and share of a window, after which demand is known.
ASKED_MIN: Final = 48.0
SPAN_RATIO_MIN: Final = 0.3
# A priority, with those above it, could be let in whole when it asks for no more than this share of a pool.
WHOLE_RATIO: Final = 0.65
# What it is worth above the others when it is asked how full engines may be.
WHOLE_FACTOR: Final = 25.0
TOLERANCES: Final = 40
TOLERANCE_STEPS_PER_DOUBLING: Final = 4
# Another stretch must be better by this share of the value to be taken.
STRETCH_GAIN_MIN: Final = 0.02
# Sums are made smaller when the unit of the latest is larger than this; bins below the least are dropped.
UNIT_MAX: Final = 1e3
WEIGHT_MIN: Final = 1e-3

Bin = tuple[int, int, int]


@dataclass(slots=True)
class _Asked:
    """Sums of one bin, in the unit of the latest: workflows, milliseconds of work, micro-dollars."""

    count: float = 0.0
    work_ms: float = 0.0
    value: float = 0.0


class Clearing(NamedTuple):
    """What the demand comes to at one stretch. `rank_min` by priority: worth level x SHARES + share.
    `level` is the worth level of the price, -1 when there is room for all; `load_ratio` how much more is
    asked for than there is room for.
    """

    stretch_ratio: float
    rank_min: dict[int, int]
    value: float
    level: int
    load_ratio: float


def tolerance_level(tolerance: float) -> int:
    """0..TOLERANCES - 1, a quarter of a doubling each, from 1."""
    level = int(log2(max(tolerance, 1.0)) * TOLERANCE_STEPS_PER_DOUBLING)
    return min(TOLERANCES - 1, level)


class Bids:
    """One pool's demand and what follows from it. Owned by one task."""

    __slots__ = (
        "_asked", "_asked_ms", "_at_ms", "_bins", "_gap_ms", "_given_ms", "_span_ms", "_unit", "clearing",
        "window_ms",
    )  # fmt: skip

    def __init__(self) -> None:
        self._bins: dict[Bin, _Asked] = {}
        self._asked = 0.0
        self._span_ms = 0.0
        self._at_ms: int | None = None
        # Instead of all that was counted fading, what is counted next weighs more.
        self._unit = 1.0
        self._given_ms = 0.0
        self._gap_ms = 0.0
        self._asked_ms = 0
        self.window_ms = WINDOW_MS_MIN
        self.clearing: Clearing | None = None

    @property
    def price_micro_usd_per_s(self) -> float:
        """What a second of work must be worth to be let in by worth; 0 while there is room for all."""
        clearing = self.clearing
        if clearing is None or clearing.level < 0:
            return 0.0
        return level_micro_usd_per_s(clearing.level)

    @property
    def is_known(self) -> bool:
        """Whether enough has asked for long enough."""
        return self._asked >= ASKED_MIN and self._span_ms >= SPAN_RATIO_MIN * self.window_ms

    def asked(
        self,
        *,
        priority: int,
        value_micro_usd: float,
        work_ms: float,
        tolerance: float,
        given_ms: float,
        now_ms: int,
    ) -> None:
        """A workflow wants to begin. Counted once for each."""
        if self._at_ms is not None:
            gap_ms = float(max(0, now_ms - self._asked_ms))
            self._gap_ms += (GIVEN_GAIN if self._gap_ms else 1.0) * (gap_ms - self._gap_ms)
        self._pass(now_ms)
        self._asked_ms = now_ms
        self._given_ms += (GIVEN_GAIN if self._given_ms else 1.0) * (given_ms - self._given_ms)
        wanted = max(GIVEN_TIMES * self._given_ms, ASKED_WANTED * self._gap_ms)
        self.window_ms = min(WINDOW_MS_MAX, max(WINDOW_MS_MIN, wanted))
        key = (priority, worth_level(value_micro_usd, work_ms), tolerance_level(tolerance))
        known = self._bins.setdefault(key, _Asked())
        known.count += self._unit
        known.work_ms += self._unit * work_ms
        known.value += self._unit * value_micro_usd
        self._asked += 1.0

    def clear(
        self,
        now_ms: int,
        stretches: Sequence[float],
        work_per_ms: Callable[[float], float],
        in_time_ratios: Callable[[float, Sequence[float]], Sequence[float]],
    ) -> None:
        """Find the prices, and the stretch among `stretches` under which most value ends in time.

        `work_per_ms` is the work that the pool does in a millisecond at a stretch, `in_time_ratios` the
        probabilities that who tolerates so much ends in time at a stretch.
        """
        self._pass(now_ms)
        if not self.is_known:
            self.clearing = None
            return
        demand = _Demand(self._bins)
        best: Clearing | None = None
        known = self.clearing
        # Who could be let in whole counts for more under every stretch, lest it be bought with their pace.
        rooms_ms = {each: work_per_ms(each) * self._span_ms * self._unit for each in stretches}
        weighty = demand.whole(max(rooms_ms.values()))
        for stretch in stretches:
            ratios = in_time_ratios(stretch, _TOLERANCES)
            found = demand.cleared(stretch, rooms_ms[stretch], ratios, weighty)
            gain = 1.0 + STRETCH_GAIN_MIN
            if known is not None and stretch == known.stretch_ratio:
                # What is used already needs no gain.
                gain = 1.0
            if best is None or found.value > best.value * gain:
                best = found
        self.clearing = best

    def admits(self, priority: int, rank: int) -> bool:
        """Whether worth level x SHARES + share suffices."""
        clearing = self.clearing
        return clearing is None or rank >= clearing.rank_min.get(priority, 0)

    def _pass(self, now_ms: int) -> None:
        """Let what was asked count less as time passes."""
        before_ms = self._at_ms
        self._at_ms = now_ms
        if before_ms is None or now_ms <= before_ms:
            return
        passed_ms = now_ms - before_ms
        kept = exp(-passed_ms / self.window_ms)
        # The integral of the weights over the time that passed.
        self._span_ms = self._span_ms * kept + self.window_ms * (1.0 - kept)
        self._asked *= kept
        self._unit /= kept
        if self._unit > UNIT_MAX:
            self._rescale()

    def _rescale(self) -> None:
        """Count in the unit of now, and forget what has faded."""
        unit, self._unit = self._unit, 1.0
        for key, asked in list(self._bins.items()):
            asked.count /= unit
            asked.work_ms /= unit
            asked.value /= unit
            if asked.count < WEIGHT_MIN:
                del self._bins[key]


# The middle of each level.
_TOLERANCES: Final = tuple(
    2.0 ** ((level + 0.5) / TOLERANCE_STEPS_PER_DOUBLING) for level in range(TOLERANCES)
)


def _by_worth(entry: tuple[Bin, _Asked]) -> tuple[int, int, int]:
    priority, level, tolerance = entry[0]
    return -level, -priority, -tolerance


class _Demand:
    """The bins as they stand, dearest first, and their work in milliseconds: of each level by priority, and of
    each priority in all.
    """

    __slots__ = ("_by_level", "_by_priority", "_levels", "_ordered")

    def __init__(self, bins: Mapping[Bin, _Asked]) -> None:
        self._ordered = sorted(bins.items(), key=_by_worth)
        self._by_level: dict[int, dict[int, float]] = {}
        self._by_priority: dict[int, float] = {}
        for (priority, level, _), asked in self._ordered:
            there = self._by_level.setdefault(level, {})
            there[priority] = there.get(priority, 0.0) + asked.work_ms
            self._by_priority[priority] = self._by_priority.get(priority, 0.0) + asked.work_ms
        # Dearest first, as they came.
        self._levels = [(level, sum(there.values())) for level, there in self._by_level.items()]

    def whole(self, room_ms: float) -> frozenset[int]:
        """The priorities that could be let in whole, from the highest down."""
        left_ms = WHOLE_RATIO * room_ms
        found = set()
        for priority in sorted(self._by_priority, reverse=True):
            if self._by_priority[priority] > left_ms:
                break
            found.add(priority)
            left_ms -= self._by_priority[priority]
        return frozenset(found)

    def cleared(
        self,
        stretch: float,
        room_ms: float,
        in_time_ratios: Sequence[float],
        weighty: frozenset[int],
    ) -> Clearing:
        """Who is let in when `room_ms` of work can be done; what of it ends in time is the value."""
        level_min, left_ms = -1, room_ms
        for level, work_ms in self._levels:
            if work_ms > left_ms:
                level_min = level
                break
            left_ms -= work_ms
        # At the level of the price by priority, and of the one that does not fit a part.
        taken_there: dict[int, float] = {}
        for priority in sorted(self._by_priority, reverse=True) if level_min >= 0 else ():
            work_ms = self._by_level[level_min].get(priority, 0.0)
            taken_there[priority] = min(1.0, left_ms / work_ms) if work_ms > 0.0 else 1.0
            left_ms = max(0.0, left_ms - work_ms)
        value = 0.0
        for (priority, level, tolerance), asked in self._ordered:
            if level < level_min:
                break
            weight = WHOLE_FACTOR if priority in weighty else 1.0
            taken = taken_there[priority] if level == level_min else 1.0
            value += weight * taken * asked.value * in_time_ratios[tolerance]
        rank_min = {
            priority: level_min * SHARES + int((1.0 - taken) * SHARES)
            for priority, taken in taken_there.items()
        }
        load_ratio = sum(self._by_priority.values()) / max(room_ms, 1.0)
        return Clearing(stretch, rank_min, value, level_min, load_ratio)
