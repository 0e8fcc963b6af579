"""Several waiting calls and several free seats at once: the assignment that costs least in all.

One call after the other takes what is cheapest for itself, and may take the only good seat of the next.
Here all of them are weighed together by a minimum-cost flow, and what comes out is taken only where
it is better than one after the other. Pure: the solver's effort is bounded by the size of the problem, never
by a clock. OR-Tools and NumPy are imported at the first use; `warm_up` does that beforehand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from controlplane.domain.catalog import Role
from controlplane.domain.decision import Placement
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import TenantId
from controlplane.domain.request import Request
from controlplane.scheduler.flow import duty_ratio, step_ms_added, urgency_micro_usd_per_s
from controlplane.scheduler.legs import WHOLE
from controlplane.scheduler.perf_model import INFEASIBLE, Forecast
from controlplane.scheduler.place import Objection, object_to, place, price, prices

# Calls weighed together at most; those behind them are placed one after the other.
CALLS_MAX: Final = 64
# Arcs between calls and engines at most. Above, each call keeps only its cheapest engines, so many at least.
ARCS_MAX: Final = 2_048
CHOICES_MIN: Final = 8
# A row has so many steps of its price, which rises with each call.
CROWDING_STEPS_MAX: Final = 4
# The solver wants integers: thousandths of a micro-dollar, and no more than keeps its sums in 64 bits.
COST_SCALE: Final = 1_000.0
COST_MAX: Final = 1 << 44


@dataclass(frozen=True, slots=True)
class Asked:
    """One waiting call, and the prompt tokens that rows hold of it by row index."""

    request: Request
    cached: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Joint:
    """What came of it, in the order of the calls, to be committed in that order.

    `gain_micro_usd` is what it costs less than one after the other, among the calls that both place;
    `placed_more` is how many calls more find a seat. `is_joint`: the assignment was better, and taken.
    """

    outcomes: tuple[Placement | Objection, ...]
    cost_micro_usd: float
    gain_micro_usd: float
    placed_more: int
    is_joint: bool


def warm_up() -> None:
    """Import the solver, which takes a tenth of a second."""
    import numpy as np  # noqa: F401
    from ortools.graph.python import min_cost_flow  # noqa: F401


# ------------------------------------------------------------ the assignment


def assign(
    costs: Sequence[Sequence[float]],
    seats: Sequence[int],
    crowding: Sequence[float] | None = None,
) -> list[int | None]:
    """For each call its column, or None: of all that seat the first calls first, the cheapest.

    `costs[call][column]` is INFEASIBLE where the call can not go, `seats[column]` how many can go there,
    and each one there makes the next dearer by `crowding[column]`. A call is left out only if it could be
    seated in no way together with those before it that are seated.
    """
    options = [
        {at: cost for at, cost in enumerate(row) if cost < INFEASIBLE and seats[at] > 0}
        for row in costs
    ]
    dearer = {} if crowding is None else dict(enumerate(crowding))
    return _assign(options, dict(enumerate(seats)), dearer)


def _assign(
    options: list[dict[int, float]], seats: Mapping[int, int], crowding: Mapping[int, float]
) -> list[int | None]:
    """As `assign`, from the columns that each call can take."""
    seated = _seat_in_order(options, seats)
    calls = [call for call, column in enumerate(seated) if column is not None]
    if len(calls) < 2:  # noqa: PLR2004  (nobody is in the way of a single call)
        return [
            None if column is None else min(options[call], key=options[call].__getitem__)
            for call, column in enumerate(seated)
        ]
    if sum(len(options[call]) for call in calls) > ARCS_MAX:
        # Keeping the cheapest columns only must not cost anybody a seat: the one found stays.
        kept = max(CHOICES_MIN, ARCS_MAX // len(calls))
        options = [
            {at: some[at] for at in {*sorted(some, key=some.__getitem__)[:kept], column}}
            if column is not None
            else {}
            for some, column in zip(options, seated, strict=True)
        ]
    solved = _solve(options, seats, crowding, calls)
    return seated if solved is None else solved


def _seat_in_order(options: list[dict[int, float]], seats: Mapping[int, int]) -> list[int | None]:
    """Seat call after call; who is seated may be moved, never unseated (Kuhn's augmenting paths)."""
    seated: list[int | None] = [None] * len(options)
    taken: dict[int, list[int]] = {}
    # What one search could reach without finding a seat, none will find one from.
    full: set[int] = set()

    def find(call: int, seen: set[int]) -> bool:
        for column in options[call]:
            if len(taken.get(column, ())) < seats[column]:
                taken.setdefault(column, []).append(call)
                seated[call] = column
                return True
        for column in options[call]:
            if column in seen or column in full:
                continue
            seen.add(column)
            for at, other in enumerate(taken[column]):
                if find(other, seen):
                    taken[column][at] = call
                    seated[call] = column
                    return True
        return False

    for call in range(len(options)):
        seen: set[int] = set()
        if not find(call, seen):
            full |= seen
    return seated


def _solve(
    options: list[dict[int, float]],
    seats: Mapping[int, int],
    crowding: Mapping[int, float],
    calls: list[int],
) -> list[int | None] | None:
    """The cheapest assignment that seats all of `calls`; None when the solver has none."""
    import numpy as np
    from ortools.graph.python import min_cost_flow

    pairs = [(call, column) for call in calls for column in options[call]]
    columns = sorted({column for _, column in pairs})
    node_of = {column: len(calls) + at for at, column in enumerate(columns)}
    sink = len(calls) + len(columns)
    tails = [at for at, call in enumerate(calls) for _ in options[call]]
    heads = [node_of[column] for _, column in pairs]
    capacities = [1] * len(pairs)
    costs = [cost for call in calls for cost in options[call].values()]
    for column in columns:
        room = min(seats[column], len(calls))
        dearer = max(0.0, crowding.get(column, 0.0))
        steps = min(room, CROWDING_STEPS_MAX) if dearer else 1
        for step in range(steps):
            tails.append(node_of[column])
            heads.append(sink)
            capacities.append(1 if step < steps - 1 else room - step)
            costs.append(step * dearer)
    # Its stubs know neither the dtypes that it takes nor what it returns.
    flow: Any = min_cost_flow.SimpleMinCostFlow()
    flow.add_arcs_with_capacity_and_unit_cost(
        np.asarray(tails, dtype=np.int32),
        np.asarray(heads, dtype=np.int32),
        np.asarray(capacities, dtype=np.int64),
        np.minimum(np.asarray(costs) * COST_SCALE, COST_MAX).astype(np.int64),
    )
    supplies = np.zeros(sink + 1, dtype=np.int64)
    supplies[: len(calls)] = 1
    supplies[sink] = -len(calls)
    flow.set_nodes_supplies(np.arange(sink + 1, dtype=np.int32), supplies)
    if flow.solve() != flow.OPTIMAL:
        return None
    found: list[int | None] = [None] * len(options)
    used = flow.flows(np.arange(len(pairs), dtype=np.int32))
    for at in np.flatnonzero(used).tolist():
        call, column = pairs[at]
        found[call] = column
    return found


# ------------------------------------------------------------ calls and engines


def place_jointly(
    asked: Sequence[Asked],
    rows: Sequence[EngineRow],
    now_ms: int,
    floors: Mapping[TenantId, int] | None = None,
) -> Joint:
    """Where waiting calls go, in the order of the queue: better than one after the other, or just that.

    Better is: seats for calls that come earlier in the order; then, for the same calls, fewer dollars,
    each priced as the rows stand when it is committed after those before it. `floors` gives a tenant so
    many calls ahead of the order, where that many of its calls wait.
    """
    order = _with_floors(asked, floors)
    ordered = [asked[at] for at in order]
    shadows = _Shadows(rows)
    greedy = _one_by_one(ordered, shadows, now_ms)
    best, is_joint = greedy, False
    head = ordered[:CALLS_MAX]
    if len(head) > 1:
        others = _Shadows(rows)
        joint = _together(head, ordered[CALLS_MAX:], rows, others, now_ms)
        is_joint = _is_better(joint, greedy)
        if is_joint:
            best, shadows = joint, others
    outcomes: dict[int, Placement | Objection] = {}
    for at, each, placed in zip(order, ordered, best, strict=True):
        # Why there is no seat is said of the rows as they will be then.
        outcomes[at] = placed or object_to(each.request, shadows.rows, dict(each.cached), now_ms)
    both = [
        (one.cost_micro_usd, other.cost_micro_usd)
        for one, other in zip(greedy, best, strict=True)
        if one is not None and other is not None
    ]
    return Joint(
        tuple(outcomes[at] for at in range(len(asked))),
        _cost(best),
        sum(one - other for one, other in both),
        _placed(best) - _placed(greedy),
        is_joint,
    )


class _Shadows:
    """Copies of the rows, on which calls are taken that may never come to that. `open`: with a seat."""

    def __init__(self, rows: Sequence[EngineRow]) -> None:
        self.rows = [row.as_of(row.dynamic()) for row in rows]
        self.open = [row for row in self.rows if _free_seats(row) > 0]
        self._real = dict(zip(map(id, self.rows), rows, strict=True))

    def real(self, placement: Placement) -> Placement:
        prefill = placement.prefill
        return replace(
            placement,
            decode=self._real[id(placement.decode)],
            prefill=None if prefill is None else self._real[id(prefill)],
        )

    def place(self, each: Asked, rows: Sequence[EngineRow], now_ms: int) -> Placement | None:
        """Place a call on some of the copies, and take what it needs there."""
        outcome = place(each.request, rows, each.cached, now_ms)
        if isinstance(outcome, Objection):
            return None
        self.take(each.request, outcome, now_ms)
        return self.real(outcome)

    def take(self, request: Request, placement: Placement, now_ms: int) -> None:
        """What committing the placement changes in its rows."""
        row, prefill = placement.decode, placement.prefill
        duty = duty_ratio(request, placement.e2e_ms_predicted)
        urgency = urgency_micro_usd_per_s(request, now_ms)
        row.seats_taken += 1
        row.kv_tokens_taken += placement.kv_tokens
        row.flows_micro_usd_per_s += urgency * duty
        row.flows_ms_per_step += step_ms_added(request, row) * duty
        first = row
        if prefill is not None:
            first = prefill
            prefill.seats_taken += 1
            prefill.kv_tokens_taken += request.prompt_tokens
            prefill.flows_micro_usd_per_s += urgency
        first.prefill_tokens_pending += max(0, request.prompt_tokens - placement.cached_tokens)


def _with_floors(asked: Sequence[Asked], floors: Mapping[TenantId, int] | None) -> list[int]:
    """The order in which calls are seated: those under their tenant's floor first."""
    if not floors:
        return list(range(len(asked)))
    left = dict(floors)
    ahead, behind = [], []
    for at, each in enumerate(asked):
        tenant = each.request.tenant
        if left.get(tenant, 0) > 0:
            left[tenant] -= 1
            ahead.append(at)
        else:
            behind.append(at)
    return ahead + behind


def _one_by_one(ordered: Sequence[Asked], shadows: _Shadows, now_ms: int) -> list[Placement | None]:
    """Each call takes what is cheapest for itself, after those before it."""
    return [shadows.place(each, shadows.open, now_ms) for each in ordered]


def _together(
    head: Sequence[Asked],
    tail: Sequence[Asked],
    rows: Sequence[EngineRow],
    shadows: _Shadows,
    now_ms: int,
) -> list[Placement | None]:
    """Assign `head` at once, then commit it in order; who is left out takes what is left."""
    free = [row for row in rows if _free_seats(row) > 0]
    kept = max(CHOICES_MIN, ARCS_MAX // len(head))
    priced = [prices(each.request, free, each.cached, now_ms, kept) for each in head]
    options = [costs for costs, _ in priced]
    wanted = sorted(set().union(*options))
    seats = {at: _seats(free[at], head) for at in wanted}
    crowding = {
        at: _crowding(head[len(head) // 2], free[at], now_ms) for at in wanted if seats[at] > 1
    }
    prefills = [row for row in shadows.open if row.role is Role.PREFILL]
    outcomes: list[Placement | None] = []
    assigned = _assign(options, seats, crowding)
    for each, column, (_, pairs) in zip(head, assigned, priced, strict=True):
        some = shadows.open
        if column is not None:
            some = [*(prefills if column in pairs else ()), shadows.open[column]]
        placed = shadows.place(each, some, now_ms)
        if placed is None and column is not None:
            placed = shadows.place(each, shadows.open, now_ms)
        outcomes.append(placed)
    return outcomes + _one_by_one(tail, shadows, now_ms)


def _free_seats(row: EngineRow) -> int:
    return min(row.seats_lent, row.seats_bound + row.seats_over) - row.seats_taken


def _seats(row: EngineRow, head: Sequence[Asked]) -> int:
    """How many calls the row can take at once, whichever of them they are: by seats and by KV."""
    over = row.seats_over if any(each.request.is_preferred for each in head) else 0
    seats = min(row.seats_lent, row.seats_bound + over) - row.seats_taken
    if seats <= 1:
        return max(0, seats)
    seats = min(seats, len(head))
    needs = sorted(
        each.request.prompt_tokens
        - each.cached.get(row.index, 0)
        + max(each.request.completion_tokens_expected, each.request.completion_tokens_high)
        for each in head
    )
    kv_free = row.kv_tokens_lent - row.kv_tokens_taken
    while seats > 1 and sum(needs[-seats:]) > kv_free:
        seats -= 1
    return seats


def _crowding(each: Asked, row: EngineRow, now_ms: int) -> float:
    """How much dearer the row gets for one call when another like it is there."""
    fuller = _Shadows([row])
    shadow = fuller.rows[0]
    tokens = each.cached.get(row.index, 0)
    before = Forecast(each.request, row, tokens, now_ms, WHOLE, 0.0)
    cost = price(each.request, row, before)
    there = Placement(shadow, None, tokens, before.kv_tokens, before.ttft_ms, before.e2e_ms, cost)
    fuller.take(each.request, there, now_ms)
    after = price(each.request, shadow, Forecast(each.request, shadow, tokens, now_ms, WHOLE, 0.0))
    return max(0.0, after - cost) if after < INFEASIBLE and cost < INFEASIBLE else 0.0


def _is_better(one: list[Placement | None], other: list[Placement | None]) -> bool:
    """Seats for earlier calls, or the same seats for less."""
    for mine, theirs in zip(one, other, strict=True):
        if (mine is None) != (theirs is None):
            return theirs is None
    return _cost(one) < _cost(other)


def _cost(placed: Sequence[Placement | None]) -> float:
    return sum(each.cost_micro_usd for each in placed if each is not None)


def _placed(placed: Sequence[Placement | None]) -> int:
    return sum(each is not None for each in placed)
