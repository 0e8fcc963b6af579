"""How much of a pool is promised to the workflows that were let in: the seats they need to end in time.

A workflow with `work_ms` of seat time left and `T` until its deadline, less the pauses between its
steps, needs work / T seats on average, never more than its calls in parallel. While the sum of
these densities is below the seats there are, the
earliest deadline first meets every deadline (the density test of real-time scheduling); so what
would push the sum above is not begun. Knows no clock.
"""

# What runs for every workflow at every tick compares instead of calling max() and min().
# ruff: noqa: PLR1730

from dataclasses import dataclass
from typing import Final

from controlplane.admission.shares import Shares
from controlplane.domain.catalog import Scope
from controlplane.domain.request import Request

# A workflow that has been silent for this long, and for this many of its gaps, holds nothing more.
IDLE_MS: Final = 30_000
IDLE_GAPS: Final = 5
# Promises are kept in this multiple of the time that a workflow would take alone, also when its deadline
# is later: far deadlines would let in so much at once that nothing urgent finds room for long.
PATIENCE_RATIO_MAX: Final = 2.0
COMMITMENTS_MAX: Final = 100_000
GAP_GAIN: Final = 0.1
PAUSES_RATIO_MAX: Final = 0.5
SEAT_TIME_GAIN: Final = 0.05
# A prompt token is computed at this share of the seat time of a completion token, before anything is
# learned: prefill is bound by compute and batched, decode by memory and sequential.
PROMPT_TOKEN_RATIO: Final = 0.02


class SeatTime:
    """How long a call keeps its seat, learned from calls that ended: milliseconds per token of work."""

    __slots__ = ("_ms_per_token",)

    def __init__(self) -> None:
        self._ms_per_token: float | None = None

    @staticmethod
    def tokens(request: Request) -> float:
        """What one call is expected to take, in completion tokens."""
        return request.completion_tokens_expected + PROMPT_TOKEN_RATIO * request.prompt_tokens

    def learn(self, request: Request, seat_ms: float) -> None:
        observed = seat_ms / max(1.0, self.tokens(request))
        known = self._ms_per_token
        self._ms_per_token = (
            observed if known is None else known + SEAT_TIME_GAIN * (observed - known)
        )

    def call_ms(self, request: Request, otherwise_ms: float) -> float:
        """Expected seat time of one call; `otherwise_ms` before any call has ended."""
        if self._ms_per_token is None:
            return otherwise_ms
        return max(1.0, self._ms_per_token * self.tokens(request))


class Gaps:
    """How long workflows of a scope pause between a step's end and the next one, learned."""

    __slots__ = ("_ms",)

    def __init__(self) -> None:
        self._ms: dict[Scope, float] = {}

    def learn(self, scope: Scope, gap_ms: float) -> None:
        known = self._ms.get(scope)
        self._ms[scope] = gap_ms if known is None else known + GAP_GAIN * (gap_ms - known)

    def pauses_ms(self, request: Request, now_ms: int) -> int:
        """Pauses that are still to come. Who names a deadline means to keep it: however long the gaps of
        the scope are said to be, the pauses take no more than a part of the time that is left.
        """
        steps_left = request.steps_expected - request.step - 1
        if steps_left <= 0:
            return 0
        gap_ms = self._ms.get(request.scope, float(request.step_gap_ms))
        left_ms = max(0, request.workflow_deadline_ms - now_ms)
        return int(min(steps_left * gap_ms, PAUSES_RATIO_MAX * left_ms))


@dataclass(slots=True)
class Commitment:
    """`pauses_ms` pass between its calls, `lanes` of which run at once at most; `last_ms` is when it was
    last heard of.
    """

    work_ms: float
    pauses_ms: int
    deadline_ms: int
    lanes: int
    priority: int
    tenant: str
    idle_ms_max: int
    last_ms: int

    def seats(self, now_ms: int) -> float:
        """Seats needed on average from now on: work over the time for it, between none and `lanes`."""
        time_ms: float = self.deadline_ms - now_ms
        if time_ms <= 0 or now_ms - self.last_ms > self.idle_ms_max:
            return 0.0
        lanes, work_ms, pauses_ms = self.lanes, self.work_ms, self.pauses_ms
        patience_ms = PATIENCE_RATIO_MAX * (work_ms / lanes + pauses_ms)
        if patience_ms < time_ms:
            time_ms = patience_ms
        time_ms -= pauses_ms
        if time_ms < 1.0:
            time_ms = 1.0
        seats = work_ms / time_ms
        return seats if seats < lanes else float(lanes)


class Commitments:
    """One pool's workflows in progress, and the seats they need by priority."""

    __slots__ = ("_by_key", "_seats", "shares")

    def __init__(self) -> None:
        self._by_key: dict[str, Commitment] = {}
        self._seats: dict[int, float] = {}
        self.shares = Shares()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def seats(self, priority_min: int = 0) -> float:
        """Seats promised to workflows of at least this priority."""
        return sum(seats for priority, seats in self._seats.items() if priority >= priority_min)

    def get(self, key: str) -> Commitment | None:
        return self._by_key.get(key)

    def seats_up_to(self, priority: int) -> float:
        """Seats promised to workflows of at most this priority."""
        return sum(seats for other, seats in self._seats.items() if other <= priority)

    def put(self, key: str, commitment: Commitment, now_ms: int) -> None:
        """Take a workflow in, or bring what is known of it up to date."""
        known = self._by_key.get(key)
        if known is not None:
            self._add(known, -known.seats(now_ms))
        elif len(self._by_key) >= COMMITMENTS_MAX:
            return
        self._by_key[key] = commitment
        self._add(commitment, commitment.seats(now_ms))

    def end(self, key: str, now_ms: int) -> None:
        known = self._by_key.pop(key, None)
        if known is not None:
            self._add(known, -known.seats(now_ms))

    def tick(self, now_ms: int) -> None:
        """Sum up anew: time has passed, deadlines have come. Bounded by the number of workflows."""
        by_priority: dict[int, float] = {}
        by_tenant: dict[str, float] = {}
        ended: list[str] = []
        for key, commitment in self._by_key.items():
            seats = commitment.seats(now_ms)
            if seats <= 0.0:
                ended.append(key)
                continue
            priority, tenant = commitment.priority, commitment.tenant
            by_priority[priority] = by_priority.get(priority, 0.0) + seats
            by_tenant[tenant] = by_tenant.get(tenant, 0.0) + seats
        for key in ended:
            del self._by_key[key]
        self._seats = by_priority
        self.shares.use_seats(by_tenant)
        self.shares.tick(now_ms)

    def _add(self, commitment: Commitment, seats: float) -> None:
        # Sums drift with what they were made of; they are made again at every tick.
        priority = commitment.priority
        self._seats[priority] = max(0.0, self._seats.get(priority, 0.0) + seats)
        self.shares.add(commitment.tenant, seats)
