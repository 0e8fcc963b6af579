"""May a workflow begin on a pool now: promises kept to those that began, worth, and what is booked.

The one place where load refuses. It is asked for first steps only; what has begun is carried to its
end. Knows no clock and no engine, only how many seats there are.
"""

from dataclasses import dataclass
from math import exp, sqrt
from typing import Final

from controlplane.admission.appointments import WAIT_MS_MAX, WAIT_MS_MIN, Appointments
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
    WORTH_LEAST,
    WORTH_STEPS_PER_DOUBLING,
    WORTHS,
    Levels,
    rank,
)
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.request import Request

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
    """Seat milliseconds of work begun in each millisecond, with the latest BEGUN_MS counting most."""

    __slots__ = ("_at_ms", "_work_ms")

    def __init__(self) -> None:
        self._work_ms = 0.0
        self._at_ms = 0

    def add(self, work_ms: float, now_ms: int) -> None:
        self._work_ms = self._work_ms * exp((self._at_ms - now_ms) / BEGUN_MS) + work_ms
        self._at_ms = now_ms

    def seats(self, now_ms: int) -> float:
        return self._work_ms * exp((self._at_ms - now_ms) / BEGUN_MS) / BEGUN_MS


class PoolLoad:
    """One pool's load as this replica causes it. Owned by one task."""

    __slots__ = (
        "_begun", "_careful_until_ms", "_full_refusals", "_idle_refusals", "_late", "_on_time", "_window_ms",
        "appointments", "commitments", "committed_ratio", "gaps", "levels", "seat_time", "stretch_ratio",
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

    @property
    def price_micro_usd_per_s(self) -> float:
        """What a second of a seat is worth now: the most that somebody offers who has to wait.

        0 while nobody does. This is the measured price of saturation.
        """
        tier = self.appointments.tier_highest
        if tier < 0:
            return 0.0
        return float(WORTH_LEAST * 2.0 ** (tier % WORTHS / WORTH_STEPS_PER_DOUBLING))

    # ------------------------------------------------------------ first steps

    def may_begin(self, request: Request, room: Room, now_ms: int) -> Refuse | None:
        """None when the workflow may begin, and then it is committed to. Asked once per arrival."""
        asked = self._ask(request, room, now_ms)
        is_in_rank = self.levels.admits(asked.rank)
        if asked.may_begin and (is_in_rank or asked.is_due):
            self.appointments.keep(_key(request))
            self.commitments.put(_held_as(request), asked.commitment, now_ms)
            self._begun.setdefault(request.priority, _Begun()).add(asked.commitment.work_ms, now_ms)
            return None
        if room.busy_ratio < BUSY_RATIO_WANTED:
            self._idle_refusals += 1
        else:
            self._full_refusals += 1
        return self._refuse(request, asked, room, now_ms)

    def would_begin(self, request: Request, room: Room, now_ms: int) -> bool:
        """What `may_begin` would say, without committing to anything."""
        asked = self._ask(request, room, now_ms)
        return asked.may_begin and (asked.rank >= self.levels.cursor or asked.is_due)

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

    def _seats_begun(self, priority: int, now_ms: int) -> float:
        """The rate at which work of this priority and below is begun, measured while it is short."""
        return sum(begun.seats(now_ms) for other, begun in self._begun.items() if other <= priority)

    def _refuse(self, request: Request, asked: "_Asked", room: Room, now_ms: int) -> Refuse:
        work_ms = asked.commitment.work_ms
        seats_free = min(asked.seats_free, self._seats_begun(request.priority, now_ms))
        promised = f"{self.commitments.seats():.1f} of {room.seats:.0f} seats are promised"
        wait_ms_max = self._wait_ms_max(request, work_ms, now_ms)
        if asked.is_below_part and wait_ms_max > WAIT_MS_MIN:
            # Whatever ends next is this tenant's: others that have more do not begin before it.
            return Refuse(
                Reason.SHED_OVERLOAD,
                f"`{request.model}` is overloaded ({promised}); this tenant is next",
                WAIT_MS_MIN,
            )
        wait_ms = self.appointments.book(
            _key(request),
            work_ms=work_ms,
            seats=asked.seats_needed,
            tier=asked.rank // SHARES,
            seats_free=max(seats_free, SEATS_RATIO_LEAST * room.seats),
            now_ms=now_ms,
            wait_ms_max=wait_ms_max,
        )
        if wait_ms is None and wait_ms_max > WAIT_MS_MAX:
            return Refuse(
                Reason.SHED_OVERLOAD,
                f"`{request.model}` is overloaded ({promised}) and more workflows wait for room than it"
                " can begin within a minute; come back then",
                WAIT_MS_MAX,
            )
        if wait_ms is None:
            return Refuse(
                Reason.SHED_OVERLOAD,
                f"`{request.model}` is overloaded ({promised}) and will not have room for this"
                " workflow in time; send it later with a new deadline",
                is_final=True,
            )
        return Refuse(
            Reason.SHED_OVERLOAD,
            f"`{request.model}` is overloaded ({promised}); room is kept for this workflow in"
            f" {wait_ms / 1000:.1f} s",
            wait_ms,
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
        if request.workflow is None or steps_left <= 0:
            self.commitments.end(_held_as(request), now_ms)
            return
        work_ms = steps_left * self.seat_time.call_ms(request, room.call_ms)
        self.commitments.put(_held_as(request), self._commitment(request, work_ms, now_ms), now_ms)

    def dropped(self, request: Request, now_ms: int) -> None:
        """A workflow that could not begin, or ended."""
        self.commitments.end(_held_as(request), now_ms)

    def ended(self, *, is_in_time: bool) -> None:
        """A call that was let in has ended, in time or not."""
        self._late += not is_in_time
        self._on_time += is_in_time

    # ------------------------------------------------------------ time

    def tick(self, now_ms: int, stretch_ratio_min: float, stretch_ratio_max: float) -> None:
        """Several times a second."""
        self.levels.tick(now_ms)
        self.commitments.tick(now_ms)
        self.appointments.tick(now_ms)
        if now_ms >= self._window_ms:
            self._window_ms = now_ms + WINDOW_MS
            self._move(now_ms, stretch_ratio_min, stretch_ratio_max)

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


def _held_as(request: Request) -> str:
    return request.workflow or request.id
