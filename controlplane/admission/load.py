"""May a workflow begin on a pool now: by the price of the pool's time, and before that is known by promises.

The one place where load refuses. It is asked for first steps only; what has begun is carried to its
end. Once enough has asked and ended, the prices that clear the demand (`bids.py`) decide. Before, it
is promises: what is begun needs seats until its deadline, and more than there are is not promised.
Knows no clock and no engine, only how many seats there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, log2, sqrt
from statistics import NormalDist
from typing import Final

from controlplane.admission.appointments import WAIT_MS_MAX, WAIT_MS_MIN, Appointments
from controlplane.admission.bids import Bids
from controlplane.admission.commitments import (
    IDLE_GAPS,
    IDLE_MS,
    Commitment,
    Commitments,
    Gaps,
    SeatTime,
)
from controlplane.admission.levels import (
    SHARES,
    WORTH_STEPS_PER_DOUBLING,
    WORTHS,
    Levels,
    level_micro_usd_per_s,
    rank,
    share_of,
    worth_level,
)
from controlplane.admission.sizes import Size, Sizes
from controlplane.admission.tabs import Tab, Tabs
from controlplane.domain.decision import Hurdle, Quantity, Reason, Refuse
from controlplane.domain.money import usd
from controlplane.domain.request import Request
from controlplane.reliability.deadlines import HANG_UP_MS

# Seats kept free of the work of lower priorities: this many standard deviations of what higher ones
# hold, which is Poisson when they come independently (the square-root rule of staffing).
HEADROOM_DEVIATIONS: Final = 1.5
HEADROOM_RATIO_MAX: Final = 0.5
# Promises may fill this share of the seats, to begin with: service times vary, a queue needs slack.
COMMITTED_RATIO_FIRST: Final = 0.95
COMMITTED_RATIO_MIN: Final = 0.8
COMMITTED_RATIO_MAX: Final = 1.5
# Moved up while seats stand empty although somebody is refused, down while promises are broken.
BUSY_RATIO_WANTED: Final = 0.95
COMMITTED_UP: Final = 0.02
COMMITTED_DOWN: Final = 0.04
WINDOW_MS: Final = 1_000
# How fast work of each priority is begun is measured over about this time.
BEGUN_MS: Final = 10_000
# Who has less than its part of a contended pool may push the promises above what they should be by this.
PART_RATIO: Final = 0.25
# Each priority may have this share of the seats, together with those below it, whatever the others want.
LEAST_RATIO: Final = 0.05
# Who has lower priorities below may be promised more than all seats: those give way, and it has slack.
YIELDED_RATIO: Final = 1.25
# Who comes at its appointed time may push the promises above that by this share.
APPOINTED_RATIO: Final = 0.50
# Waits are told as if at least this share of the seats served those who wait.
SEATS_RATIO_LEAST: Final = 0.05
MISSED_RATIO_HIGH: Final = 0.02
# How far calls may stretch each other: further while seats are full, somebody is refused and promises are
# kept, less while promises are broken.
STRETCH_DOWN_RATIO: Final = 0.93
STRETCH_UP_RATIO: Final = 1.005
# After a broken promise nothing is loosened for this long: those that it was made to are still there.
CAUTION_MS: Final = 10_000

# How far calls may stretch each other, as the prices weigh it.
STRETCHES: Final = (1.1, 1.2, 1.35, 1.5, 1.65, 1.8, 2.0, 2.25, 2.5, 3.0, 4.0)
STRETCH_STEP_RATIO: Final = 1.1
# Before they can tell.
STRETCH_FIRST: Final = 1.5
# How many times longer than alone calls take before any has ended.
SLOWED_FIRST: Final = 1.5
SLOWED_PRIOR: Final = 0.2
SLOWED_GAIN: Final = 0.05
# Calls slow each other down by so many times what their stretch says at most: who ends late at that has a
# deadline that nothing could keep, and is no reason to empty engines.
SLOWED_EXCESS_MAX: Final = 2.5
# What workflows tolerate is known only as well as their sizes: deviation of its logarithm.
TOLERANCE_SIGMA: Final = 0.25
TOLERANCE_LEAST: Final = 0.1
CALL_GAIN: Final = 0.02
# What engines usually take is a mean over so many calls. They take something else when the latest calls tell so by
# this factor, and until it is less than the other: crowds alone made it differ by up to 1.3 (simulated).
PACE_CALLS_FIRST: Final = 50
PACE_CALLS_MAX: Final = 500
PACE_STEP_RATIO: Final = 1.4
PACE_BACK_RATIO: Final = 1.2
# A workflow that can not spare the time of this many calls does not wait until one ends.
URGENT_CALLS: Final = 1.5
# Prices follow demand over minutes. When more than so many times the seats is promised already, what is asked
# for must be worth more by so many levels for each doubling.
PROMISED_RATIO: Final = 4.0
SURGE_LEVELS: Final = 6.0
# Who holds less than its part of a pool does not pay for a flood: when so many times more is asked for than
# there is room for, its worth is doubled, and once more for each time that this doubles.
FLOOD_RATIO: Final = 2.5
FLOOD_DOUBLINGS_MAX: Final = 6.0
# The price follows what the pool turns out to do: less is let in while workflows end late that waited
# for this share of their time, more while seats stand empty although somebody is refused.
WAITED_RATIO: Final = 0.2
LATE_RATIO_HIGH: Final = 0.05
LATE_GAIN: Final = 0.02
YIELD_DOWN: Final = 0.98
YIELD_UP: Final = 1.02
YIELD_MIN: Final = 0.9
YIELD_MAX: Final = 1.15
# So many times in a window of demand.
YIELD_MOVES: Final = 20

_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True)
class Room:
    """What a pool offers: seats that this replica may fill, and a call's time there before any ended."""

    seats: float
    call_ms: float
    busy_ratio: float


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was worked out of one arrival; `seats_free` is what its priority may come to hold in all."""

    rank: int
    commitment: Commitment
    seats_needed: float
    seats_free: float
    is_due: bool
    is_below_part: bool
    may_begin: bool


class _Begun:
    """Seats that are filled anew: milliseconds of work begun in each millisecond, with the latest BEGUN_MS
    counting most. What was before a pause says nothing of what comes after it.
    """

    __slots__ = ("_at_ms", "_since_ms", "_work_ms")

    def __init__(self) -> None:
        self._work_ms = 0.0
        self._at_ms = 0
        self._since_ms = 0

    def add(self, work_ms: float, now_ms: int) -> None:
        passed_ms = now_ms - self._at_ms
        if passed_ms > BEGUN_MS or not self._work_ms:
            self._work_ms, self._since_ms = 0.0, now_ms
        self._work_ms = self._work_ms * exp(-passed_ms / BEGUN_MS) + work_ms
        self._at_ms = now_ms

    def seats(self, now_ms: int) -> float:
        # Over the time that it was looked at, which is short after a pause.
        seen_ms = max(WINDOW_MS, now_ms - self._since_ms)
        weight_ms = BEGUN_MS * (1.0 - exp(-seen_ms / BEGUN_MS))
        return self._work_ms * exp((self._at_ms - now_ms) / BEGUN_MS) / weight_ms


def stretch_first(stretch_ratio_min: float, stretch_ratio_max: float) -> float:
    """How far calls may stretch each other before prices can tell."""
    return min(stretch_ratio_max, max(STRETCH_FIRST, stretch_ratio_min))


class PoolLoad:
    """One pool's load as this replica causes it. Owned by one task."""

    __slots__ = (
        "_alone_ms", "_begun", "_call_ms", "_careful_until_ms", "_full_refusals", "_idle_refusals", "_late",
        "_on_time", "_published_ms", "_seat_ms", "_slowed_log", "_usual_calls", "_usual_ratio", "_waited_late",
        "_window_ms", "_yield_ms",
        "appointments", "bids", "commitments", "committed_ratio", "gaps", "levels", "pace_ratio", "seat_time",
        "sizes",
        "stretch_ratio", "tabs", "yield_ratio",
    )  # fmt: skip

    def __init__(self, stretch_ratio: float) -> None:
        self.levels = Levels()
        self.commitments = Commitments()
        self.appointments = Appointments()
        self.seat_time = SeatTime()
        self.gaps = Gaps()
        self.stretch_ratio = stretch_ratio
        self.committed_ratio = COMMITTED_RATIO_FIRST
        self._begun: dict[int, _Begun] = {}
        self._idle_refusals = 0
        self._full_refusals = 0
        self._window_ms = 0
        self._careful_until_ms = 0
        self._late = 0
        self._on_time = 0
        self.sizes = Sizes()
        self.bids = Bids()
        self.tabs = Tabs()
        # Work that the pool does, over what its seats should.
        self.yield_ratio = 1.0
        self._yield_ms = 0
        self._waited_late = 0.0
        # A call's time on its engine; and of all calls that, what it would be on an empty engine as engines
        # are now, and what it would be by their published rates.
        self._call_ms = 0.0
        self._seat_ms = SLOWED_FIRST
        self._alone_ms = 1.0
        self._published_ms = 1.0
        # How much longer than by their published rates engines usually take, and over how many calls that is.
        self._usual_ratio = 1.0
        self._usual_calls = 0
        # How much longer than usually they take now. Work is counted as if they took what they usually take, so
        # that what is known of workflows stands when all engines slow down, and when they are well again.
        self.pace_ratio = 1.0
        # How much longer than alone workflows take at the present stretch: its logarithm.
        self._slowed_log = log(stretch_ratio)

    @property
    def load_ratio(self) -> float:
        """Work that is asked for over what the pool can do in that time; 0 before that is known."""
        clearing = self.bids.clearing
        return 0.0 if clearing is None else clearing.load_ratio

    @property
    def price_micro_usd_per_s(self) -> float:
        """What a second of work must be worth to begin. Before that is known, the most that somebody offers
        who was told to come back; 0 while there is room for all.
        """
        if self.bids.clearing is not None:
            return self.bids.price_micro_usd_per_s
        tier = self.appointments.tier_highest
        if tier < 0:
            return 0.0
        return level_micro_usd_per_s(tier % WORTHS)

    # ------------------------------------------------------------ first steps

    def may_begin(self, request: Request, room: Room, now_ms: int) -> Refuse | None:
        """None when the workflow may begin, and then it is committed to. Asked once per arrival."""
        size = self._size(request, now_ms)
        if size is not None and not self.appointments.is_known(_key(request)):
            self._bid(request, size, now_ms)
        if size is not None and self._is_priced(request):
            return self._cleared(request, size, room, now_ms)
        asked = self._ask(request, room, now_ms)
        is_in_rank = self.levels.admits(asked.rank)
        if asked.may_begin and (is_in_rank or asked.is_due):
            self._let_in(request, asked.commitment, size, now_ms)
            self._begun.setdefault(request.priority, _Begun()).add(asked.commitment.work_ms, now_ms)
            return None
        self._count_refusal(room)
        return self._refuse(request, asked, room, now_ms)

    def would_begin(self, request: Request, room: Room, now_ms: int) -> bool:
        """What `may_begin` would say, without committing to anything."""
        size = self._size(request, now_ms)
        if size is not None and self._is_priced(request):
            return self._is_worth(request, size, room)
        asked = self._ask(request, room, now_ms)
        return asked.may_begin and (asked.rank >= self.levels.cursor or asked.is_due)

    def _let_in(
        self, request: Request, commitment: Commitment, size: Size | None, now_ms: int
    ) -> None:
        self.appointments.keep(_key(request))
        self.commitments.put(_held_as(request), commitment, now_ms)
        self._open(request, size, now_ms)

    def _count_refusal(self, room: Room) -> None:
        if room.busy_ratio < BUSY_RATIO_WANTED:
            self._idle_refusals += 1
        else:
            self._full_refusals += 1

    def _ask(self, request: Request, room: Room, now_ms: int) -> "_Asked":
        work_ms = self._work_ms(request, room)
        arrival_rank = rank(request, work_ms)
        tier = arrival_rank // SHARES
        commitment = self._commitment(request, work_ms, now_ms)
        needed = commitment.seats(now_ms)
        seats_of_higher = self.commitments.seats(request.priority + 1)
        headroom = min(HEADROOM_DEVIATIONS * sqrt(seats_of_higher), HEADROOM_RATIO_MAX * room.seats)
        ratio = self.committed_ratio
        if self.commitments.seats() > self.commitments.seats(request.priority):
            # There is work that yields to this: if promises break, it is not these.
            ratio = max(ratio, YIELDED_RATIO)
        limit = ratio * room.seats - headroom
        # Work of lower priorities waits when it must: what is promised to it is not in the way.
        free = limit - self.commitments.seats(request.priority)
        is_due = self.appointments.is_due(_key(request), now_ms)
        shares = self.commitments.shares
        shares.asked(request.tenant, request.weight, now_ms)
        part = shares.part(request.tenant)
        # Parts are among equals: what higher priorities hold is not shared with lower ones.
        is_below_part = (
            part < 1.0
            and seats_of_higher <= 0.0
            and shares.seats(request.tenant) + needed <= part * limit
        )
        if is_due:
            may_begin = needed <= free + APPOINTED_RATIO * room.seats
        elif is_below_part:
            # Others have more than their part: this one does not wait until they end.
            may_begin = needed <= free + PART_RATIO * room.seats
        else:
            may_begin = needed + self.appointments.seats(tier) <= free
        least = max(1.0, LEAST_RATIO * room.seats)
        may_begin = may_begin or self.commitments.seats_up_to(request.priority) + needed <= least
        return _Asked(
            rank=arrival_rank,
            commitment=commitment,
            seats_needed=needed,
            seats_free=limit - seats_of_higher,
            is_due=is_due,
            is_below_part=is_below_part,
            # A pool without anybody takes one always: no workflow is too large to be ever begun.
            may_begin=may_begin or not len(self.commitments),
        )

    # ------------------------------------------------------------ by price

    def _is_priced(self, request: Request) -> bool:
        """Whether the price decides. A lone call has no deadline to lose while it is away: promises decide, and
        it is told when there is room.
        """
        return self.bids.clearing is not None and request.workflow is not None

    def size(self, request: Request, now_ms: float) -> Size | None:
        """What to expect of the workflow, or lone call, on engines as they are now, by the time that it is given;
        None while too few ended.
        """
        size = self._size(request, now_ms)
        return None if size is None else self._now(size)

    def _now(self, size: Size) -> Size:
        pace = self.pace_ratio
        return Size(size.work_ms * pace, size.tolerance / pace)

    def _size(self, request: Request, now_ms: float) -> Size | None:
        """The same on engines as they usually are."""
        return self.sizes.of(
            request.tenant,
            request.scope,
            request.priority,
            given_ms=request.workflow_deadline_ms - now_ms,
            tokens=_tokens(request),
        )

    def _bid(self, request: Request, size: Size, now_ms: int) -> None:
        self.bids.asked(
            priority=request.priority,
            value_micro_usd=request.value_micro_usd,
            work_ms=size.work_ms,
            tolerance=size.tolerance,
            given_ms=request.workflow_deadline_ms - now_ms,
            now_ms=now_ms,
        )

    def _is_worth(self, request: Request, size: Size, room: Room) -> bool:
        """Whether the workflow is worth the pool's time at its price."""
        clearing = self.bids.clearing
        level = float(worth_level(request.value_micro_usd, size.work_ms))
        shares, total = self.commitments.shares, self.commitments.seats()
        is_below_part = shares.seats(request.tenant) < shares.part(request.tenant) * total
        if clearing is not None and clearing.load_ratio > FLOOD_RATIO and is_below_part:
            doublings = 1.0 + log2(clearing.load_ratio / FLOOD_RATIO)
            level += WORTH_STEPS_PER_DOUBLING * min(FLOOD_DOUBLINGS_MAX, doublings)
        crowd = total / max(1.0, PROMISED_RATIO * room.seats)
        if crowd > 1.0:
            level -= SURGE_LEVELS * log2(crowd)
        rank_here = int(level * SHARES) + share_of(request)
        return self.bids.admits(request.priority, rank_here)

    def _cleared(self, request: Request, size: Size, room: Room, now_ms: int) -> Refuse | None:
        """What the price says. A pool without anybody takes one always."""
        self.commitments.shares.asked(request.tenant, request.weight, now_ms)
        if self._is_worth(request, size, room) or not len(self.commitments):
            commitment = self._commitment(request, self._work_ms(request, room), now_ms)
            self._let_in(request, commitment, size, now_ms)
            return None
        self._count_refusal(room)
        price = usd(self.bids.price_micro_usd_per_s)
        detail = (
            f"`{request.model}` is overloaded: a second of it is worth {price:.4f} USD to others, and this"
            f" workflow needs about {self._now(size).work_ms / 1000:.1f} s"
        )
        work_s = max(1.0, size.work_ms) / 1000.0
        return Refuse(
            Reason.SHED_OVERLOAD,
            f"{detail}; send it later with a new deadline",
            is_final=True,
            hurdles=(
                Hurdle(
                    Quantity.WORTH_MICRO_USD_PER_S,
                    there=request.value_micro_usd / work_s,
                    needed=self.bids.price_micro_usd_per_s,
                ),
            ),
        )

    def _open(self, request: Request, size: Size | None, now_ms: int) -> None:
        """Keep a tab of what the workflow takes; who can not wait for a seat is known from the beginning."""
        slack_ms = -1.0 if size is None else self._now(size).slack_ms
        is_urgent = 0.0 <= slack_ms < URGENT_CALLS * self._call_ms
        self.tabs.open(
            _held_as(request),
            Tab(
                tenant=request.tenant,
                scope=request.scope,
                priority=request.priority,
                begun_ms=now_ms,
                deadline_ms=request.workflow_deadline_ms,
                tokens=_tokens(request),
                is_urgent=is_urgent,
                tolerance=None if size is None else size.tolerance,
            ),
        )

    def is_urgent(self, request: Request) -> bool:
        """Whether a call's workflow can not spare the time until a seat is free."""
        tab = self.tabs.get(_held_as(request))
        return tab is not None and tab.is_urgent

    def waited(self, request: Request, wait_ms: float) -> None:
        """A call left the queue for an engine."""
        tab = self.tabs.get(_held_as(request))
        if tab is not None:
            tab.waited_ms += wait_ms

    def served(
        self, request: Request, *, seat_ms: float, alone_ms: float, published_ms: float
    ) -> None:
        """A call held its seat for `seat_ms`; alone it would have for `alone_ms`, by published rates for
        `published_ms`.
        """
        self.seat_time.learn(request, seat_ms)
        gain = CALL_GAIN if self._call_ms else 1.0
        self._call_ms += gain * (seat_ms - self._call_ms)
        tab = self.tabs.get(_held_as(request))
        if tab is not None:
            tab.busy_ms += seat_ms
            tab.work_ms += alone_ms / self.pace_ratio
        if alone_ms <= 0.0 or published_ms <= 0.0:
            return
        self._seat_ms += seat_ms - CALL_GAIN * self._seat_ms
        self._alone_ms += alone_ms - CALL_GAIN * self._alone_ms
        self._published_ms += published_ms - CALL_GAIN * self._published_ms
        self._follow_pace()

    def _follow_pace(self) -> None:
        """Find out whether engines take as long as usually. Rates are corrected by what was measured, so what calls
        do to each other is told as a pace in part: less than a step is nothing.
        """
        latest = self._alone_ms / self._published_ms
        off = latest / self._usual_ratio
        limit = PACE_STEP_RATIO if self.pace_ratio == 1.0 else PACE_BACK_RATIO
        if self._usual_calls >= PACE_CALLS_FIRST and not 1.0 / limit < off < limit:
            self.pace_ratio = off
            return
        self.pace_ratio = 1.0
        self._usual_calls = min(PACE_CALLS_MAX, self._usual_calls + 1)
        self._usual_ratio += (latest - self._usual_ratio) / self._usual_calls

    def _close(self, key: str, now_ms: int, *, is_whole: bool) -> None:
        """A workflow has ended: what it took is learned when that is all that it wanted, or more than thought."""
        tab = self.tabs.close(key)
        if tab is None:
            return
        given_ms = float(tab.deadline_ms - tab.begun_ms)
        is_late = now_ms >= tab.deadline_ms - HANG_UP_MS
        if is_whole or is_late:
            waited_too_long = is_late and tab.waited_ms > WAITED_RATIO * given_ms
            self._waited_late += LATE_GAIN * (waited_too_long - self._waited_late)
            if tab.tolerance is not None:
                self._learn_slowed(tab.tolerance / self.pace_ratio, is_kept=not is_late)
        if tab.work_ms <= 0.0:
            return
        if not is_whole:
            known = self.sizes.of(
                tab.tenant, tab.scope, tab.priority, given_ms=given_ms, tokens=tab.tokens
            )
            if known is None or tab.work_ms <= known.work_ms:
                return
        pauses_ms = max(0.0, now_ms - tab.begun_ms - tab.busy_ms - tab.waited_ms)
        self.sizes.learn(
            tab.tenant,
            tab.scope,
            tab.priority,
            given_ms=given_ms,
            tokens=tab.tokens,
            work_ms=tab.work_ms,
            tolerance=(given_ms - pauses_ms) / tab.work_ms,
        )

    def _slowed(self, ratio: float, stretch_ratio: float) -> float:
        """What takes `ratio` times longer than alone at the present stretch, at another: what calls do to
        each other goes with how many there are. Near 1 that says little, and it is taken to be as published.
        """
        told = self.stretch_ratio - 1.0
        each = (max(0.0, ratio - 1.0) + SLOWED_PRIOR) / (told + SLOWED_PRIOR)
        return 1.0 + each * (stretch_ratio - 1.0)

    def _in_time_ratios(self, stretch_ratio: float, tolerances: Sequence[float]) -> list[float]:
        """The probabilities that calls which may take so many times longer than alone do not take more."""
        slowed = self._slowed(exp(self._slowed_log), stretch_ratio) * self.pace_ratio
        return [_NORMAL.cdf(log(each / slowed) / TOLERANCE_SIGMA) for each in tolerances]

    def _learn_slowed(self, tolerance: float, *, is_kept: bool) -> None:
        """A workflow that tolerated so much ended in time, or did not: by how much were calls slowed down?

        Stochastic approximation of a probit model's place. Those that did not end have no times to measure,
        so it is learned from outcomes. Who tolerates far more or far less says nothing of it.
        """
        off = (log(max(tolerance, TOLERANCE_LEAST)) - self._slowed_log) / TOLERANCE_SIGMA
        step = exp(-0.5 * off * off) * (_NORMAL.cdf(off) - is_kept)
        most = log(1.0 + SLOWED_EXCESS_MAX * (self.stretch_ratio - 1.0))
        self._slowed_log = min(most, max(0.0, self._slowed_log + SLOWED_GAIN * step))

    def _work_per_ms(self, seats: float, stretch_ratio: float) -> float:
        """Work that is done in a millisecond on so many seats, which slow each other down."""
        slowed = self._slowed(self._seat_ms / self._alone_ms, stretch_ratio) * self.pace_ratio
        return self.yield_ratio * seats / slowed

    # ------------------------------------------------------------ by promises

    def _seats_begun(self, priority: int, now_ms: int) -> float:
        """The rate at which work of this priority and below is begun, measured while it is short."""
        return sum(begun.seats(now_ms) for other, begun in self._begun.items() if other <= priority)

    def _refuse(self, request: Request, asked: "_Asked", room: Room, now_ms: int) -> Refuse:
        work_ms = asked.commitment.work_ms
        seats_free = min(asked.seats_free, self._seats_begun(request.priority, now_ms))
        promised = f"{self.commitments.seats():.1f} of {room.seats:.0f} seats are promised"
        wait_ms_max = self._wait_ms_max(request, work_ms, now_ms)
        free = max(0.0, asked.seats_free - self.commitments.seats(request.priority))
        hurdles = (Hurdle(Quantity.SEATS, there=free, needed=asked.seats_needed),)
        if asked.is_below_part and wait_ms_max > WAIT_MS_MIN:
            # Whatever ends next is this tenant's: others that have more do not begin before it.
            return Refuse(
                Reason.SHED_OVERLOAD,
                f"`{request.model}` is overloaded ({promised}); this tenant is next",
                WAIT_MS_MIN,
                hurdles=hurdles,
            )
        seats_free = max(seats_free, SEATS_RATIO_LEAST * room.seats)
        wait_ms = self.appointments.book(
            _key(request),
            work_ms=work_ms,
            seats=asked.seats_needed,
            tier=asked.rank // SHARES,
            seats_free=seats_free,
            now_ms=now_ms,
            wait_ms_max=wait_ms_max,
        )
        if wait_ms is None and wait_ms_max > WAIT_MS_MAX:
            return Refuse(
                Reason.SHED_OVERLOAD,
                f"`{request.model}` is overloaded ({promised}) and more workflows wait for room than it"
                " can begin within a minute; come back then",
                WAIT_MS_MAX,
                hurdles=hurdles,
            )
        if wait_ms is None:
            return Refuse(
                Reason.SHED_OVERLOAD,
                f"`{request.model}` is overloaded ({promised}) and will not have room for this"
                " workflow in time; send it later with a new deadline",
                is_final=True,
                hurdles=(
                    *hurdles,
                    Hurdle(
                        Quantity.TIME_MS,
                        there=max(0.0, float(wait_ms_max)),
                        needed=self.appointments.wait_ms(work_ms, asked.rank // SHARES, seats_free),
                    ),
                ),
            )
        return Refuse(
            Reason.SHED_OVERLOAD,
            f"`{request.model}` is overloaded ({promised}); room is kept for this workflow in"
            f" {wait_ms / 1000:.1f} s",
            wait_ms,
            hurdles=hurdles,
        )

    def _wait_ms_max(self, request: Request, work_ms: float, now_ms: int) -> int:
        """How long a workflow can wait outside and still end in time. A lone call's time begins anew."""
        if request.workflow is None:
            return 2**31
        pauses_ms = self.gaps.pauses_ms(request, now_ms)
        return int(request.workflow_deadline_ms - now_ms - work_ms - pauses_ms)

    # ------------------------------------------------------------ what has begun

    def continues(self, request: Request, room: Room, now_ms: int) -> None:
        """A later step of a workflow has come: what it still needs is known better."""
        known = self.commitments.get(_held_as(request))
        if known is not None and request.calls_in_flight == 0:
            self.gaps.learn(request.scope, now_ms - known.last_ms)
        commitment = self._commitment(request, self._work_ms(request, room), now_ms)
        self.commitments.put(_held_as(request), commitment, now_ms)

    def step_ended(self, request: Request, room: Room, now_ms: int) -> None:
        """A call of a workflow has ended; the steps after it are still promised."""
        steps_left = request.steps_expected - request.step - 1
        if request.workflow is None:
            self._close(_held_as(request), now_ms, is_whole=True)
        if request.workflow is None or steps_left <= 0:
            self.commitments.end(_held_as(request), now_ms)
            return
        work_ms = steps_left * self.seat_time.call_ms(request, room.call_ms)
        self.commitments.put(_held_as(request), self._commitment(request, work_ms, now_ms), now_ms)

    def dropped(self, request: Request, now_ms: int) -> None:
        """A workflow that could not begin, or ended."""
        self._close(_held_as(request), now_ms, is_whole=False)
        self.commitments.end(_held_as(request), now_ms)

    def workflow_ended(self, key: str, now_ms: int) -> None:
        """A workflow has ended, by its tenant's word."""
        tab = self.tabs.get(key)
        self._close(key, now_ms, is_whole=tab is not None and now_ms <= tab.deadline_ms)
        self.commitments.end(key, now_ms)

    def ended(self, *, is_in_time: bool) -> None:
        """A call that was let in has ended, in time or not."""
        self._late += not is_in_time
        self._on_time += is_in_time

    # ------------------------------------------------------------ time

    def tick(
        self,
        now_ms: int,
        stretch_ratio_min: float,
        stretch_ratio_max: float,
        seats_at: Callable[[float], float] | None = None,
    ) -> None:
        """Several times a second. `seats_at` tells the seats that there are at a stretch."""
        self.levels.tick(now_ms)
        self.commitments.tick(now_ms)
        self.appointments.tick(now_ms)
        if now_ms >= self._window_ms:
            self._window_ms = now_ms + WINDOW_MS
            self.tabs.tick(now_ms)
            if seats_at is not None:
                self._clear(now_ms, stretch_ratio_min, stretch_ratio_max, seats_at)
            if self.bids.clearing is not None:
                self._follow(now_ms, stretch_ratio_min, stretch_ratio_max)
            else:
                least = stretch_first(stretch_ratio_min, stretch_ratio_max)
                self._move(now_ms, least, stretch_ratio_max)

    def _move(self, now_ms: int, stretch_ratio_min: float, stretch_ratio_max: float) -> None:
        """What may be promised, and how many calls run at once, by what the last second showed."""
        stretch = self.stretch_ratio
        if self._late > MISSED_RATIO_HIGH * (self._late + self._on_time):
            self.committed_ratio = max(COMMITTED_RATIO_MIN, self.committed_ratio - COMMITTED_DOWN)
            stretch *= STRETCH_DOWN_RATIO
            self._careful_until_ms = now_ms + CAUTION_MS
        elif now_ms < self._careful_until_ms:
            pass
        elif self._idle_refusals:
            self.committed_ratio = min(COMMITTED_RATIO_MAX, self.committed_ratio + COMMITTED_UP)
        elif self._full_refusals or not len(self.commitments):
            stretch *= STRETCH_UP_RATIO
        self.stretch_ratio = min(stretch_ratio_max, max(stretch_ratio_min, stretch))
        self._idle_refusals = self._full_refusals = self._late = self._on_time = 0

    def _clear(
        self,
        now_ms: int,
        stretch_ratio_min: float,
        stretch_ratio_max: float,
        seats_at: Callable[[float], float],
    ) -> None:
        stretches = [each for each in STRETCHES if stretch_ratio_min <= each <= stretch_ratio_max]
        self.bids.clear(
            now_ms,
            stretches or [stretch_ratio_min],
            lambda stretch: self._work_per_ms(seats_at(stretch), stretch),
            self._in_time_ratios,
        )

    def _follow(self, now_ms: int, stretch_ratio_min: float, stretch_ratio_max: float) -> None:
        """Go towards the wanted stretch, and learn what the pool really does."""
        clearing = self.bids.clearing
        assert clearing is not None
        wanted = min(stretch_ratio_max, max(stretch_ratio_min, clearing.stretch_ratio))
        most = self.stretch_ratio * STRETCH_STEP_RATIO
        least = max(stretch_ratio_min, self.stretch_ratio / STRETCH_STEP_RATIO)
        stretch = min(most, max(least, wanted))
        if stretch != self.stretch_ratio:
            self._slowed_log = log(self._slowed(exp(self._slowed_log), stretch))
            self.stretch_ratio = stretch
        if now_ms < self._yield_ms:
            return
        self._yield_ms = now_ms + int(self.bids.window_ms / YIELD_MOVES)
        if self._waited_late > LATE_RATIO_HIGH:
            self.yield_ratio = max(YIELD_MIN, self.yield_ratio * YIELD_DOWN)
        elif self._idle_refusals > self._full_refusals:
            self.yield_ratio = min(YIELD_MAX, self.yield_ratio * YIELD_UP)
        self._late = self._on_time = 0
        self._idle_refusals = self._full_refusals = 0

    # ------------------------------------------------------------ inside

    def _work_ms(self, request: Request, room: Room) -> float:
        steps_left = max(1, request.steps_expected - request.step)
        return steps_left * self.seat_time.call_ms(request, room.call_ms)

    def _commitment(self, request: Request, work_ms: float, now_ms: int) -> Commitment:
        deadline_ms = request.workflow_deadline_ms
        if request.workflow is None:
            # A lone call is due when its first token is, and holds a seat for its own time.
            deadline_ms = min(deadline_ms, now_ms + request.ttft_ms_max + int(work_ms))
        return Commitment(
            work_ms=work_ms,
            pauses_ms=self.gaps.pauses_ms(request, now_ms),
            deadline_ms=deadline_ms,
            lanes=max(1, request.calls_in_flight + 1),
            priority=request.priority,
            tenant=request.tenant,
            idle_ms_max=max(IDLE_MS, IDLE_GAPS * request.step_gap_ms),
            last_ms=now_ms,
        )


def _key(request: Request) -> str:
    """Who comes back: the workflow, or for a lone call its tenant and prompt."""
    if request.workflow is not None:
        return request.workflow
    return f"{request.tenant}/{request.prefix[-1] if request.prefix else request.prompt_tokens}"


def _tokens(request: Request) -> float:
    """What a lone call is expected to take, in tokens; 1 for a workflow, whose steps are not known."""
    return SeatTime.tokens(request) if request.workflow is None else 1.0


def _held_as(request: Request) -> str:
    return request.workflow or request.id
