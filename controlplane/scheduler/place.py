"""The cheapest placement of one call: every feasible one is priced over the seven axes, in dollars.

Knows rows and a request, nothing of queues, money accounts or the clock. The same axis functions
are the explanation (`explain.py`) and the oracle of the tests.

Pairs of a prefill and a decode engine follow a hierarchical model, so that they cost P + D and not
P x D evaluations: KV moves inside a domain (a region, and engines whose connectors understand each
other) only; in each domain the prefill engine whose leg is cheapest is the one that pairs use; every
decode engine of the domain is priced with its time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from controlplane.domain.catalog import Role
from controlplane.domain.decision import Placement, Reason
from controlplane.domain.fleet import EngineRow, fits
from controlplane.domain.request import Request
from controlplane.scheduler.axes.agentic_scope import cost as agentic_scope
from controlplane.scheduler.axes.agentic_scope import is_within_fan_out
from controlplane.scheduler.axes.gpu_type import cost as gpu_type
from controlplane.scheduler.axes.gpu_type import is_allowed, is_context_within
from controlplane.scheduler.axes.kv_headroom import cost as kv_headroom
from controlplane.scheduler.axes.latency_budget import cost as latency_budget
from controlplane.scheduler.axes.latency_budget import is_reachable
from controlplane.scheduler.axes.tenant_priority import cost as tenant_priority
from controlplane.scheduler.axes.weight_warmth import cost as weight_warmth
from controlplane.scheduler.axes.weight_warmth import has_adapter, is_warm_in_time
from controlplane.scheduler.axes.workflow import HOME_RECOMPUTE_FACTOR, is_within_budget
from controlplane.scheduler.axes.workflow import cost as workflow
from controlplane.scheduler.flow import (
    caused_ms,
    own_ms,
    step_ms_added,
    urgency_micro_usd_per_s,
)
from controlplane.scheduler.legs import DECODE, PREFILL, WHOLE
from controlplane.scheduler.perf_model import (
    INFEASIBLE,
    MS_PER_S,
    Forecast,
    decode_gpu_ms,
    kv_tokens_needed,
    kv_tokens_on,
    sequences_on,
    uncached_prefill_ms,
)

# A refusal's advice when to come back stays within these, in milliseconds.
RETRY_AFTER_MS_MIN: Final = 1_000
RETRY_AFTER_MS_MAX: Final = 60_000
# A breaker tries its engine again after about this long.
SUSPECT_MS: Final = 5_000

TIE_FACTOR: Final = 0x5851_F42D  # 31 bits: a product with 30 bits stays in a tagged machine word
TIE_MASK: Final = 0x3FFF_FFFF

_PREFILL_ROLE: Final = Role.PREFILL


@dataclass(frozen=True)
class Objection:
    """Why nothing is feasible."""

    reason: Reason
    detail: str
    retry_after_ms: int | None

    @property
    def is_transient(self) -> bool:
        """Something under way can make room, so waiting can help."""
        return self.reason is Reason.QUEUE_FULL or self.reason is Reason.WARMING


def price(request: Request, row: EngineRow, forecast: Forecast, most: float = INFEASIBLE) -> float:
    """Micro-dollars of one leg on one engine, INFEASIBLE when an axis objects or it exceeds `most`.

    An explicit sum in the order of `AXES`, so that the compiled core calls C functions directly. No
    axis is negative, so the sum may end early once it is above what it has to beat.
    """
    total = gpu_type(request, row, forecast)
    if total > most:
        return INFEASIBLE
    total += kv_headroom(request, row, forecast)
    if total > most:
        return INFEASIBLE
    total += weight_warmth(request, row, forecast)
    total += tenant_priority(request, row, forecast)
    if total > most:
        return INFEASIBLE
    total += workflow(request, row, forecast)
    if total > most:
        return INFEASIBLE
    total += latency_budget(request, row, forecast)
    total += agentic_scope(request, row, forecast)
    return INFEASIBLE if total > most else total


def tie_seed(request: Request) -> int:
    return crc32(request.id.encode()) & TIE_MASK


def tie_break(seed: int, row: EngineRow) -> int:
    """Order of (request, engine) among equals: even and repeatable, whatever the order of the rows."""
    return ((seed ^ row.tie_seed) * TIE_FACTOR) & TIE_MASK


@dataclass(frozen=True)
class PrefillChoice:
    """The prefill engine that pairs of its domain use, its leg's dollars and its time to the KV."""

    row: EngineRow
    cost_micro_usd: float
    ttft_ms: float


def prefill_choices(
    request: Request,
    rows: Sequence[EngineRow],
    cached: dict[int, int],
    now_ms: int,
    most: float = INFEASIBLE,
) -> dict[int, PrefillChoice]:
    """By pair key, the cheapest feasible prefill engine of at most `most`; ties by `tie_break`."""
    best: dict[int, PrefillChoice] = {}
    seed = tie_seed(request)
    for row in rows:
        if row.role is not _PREFILL_ROLE or not row.pair_key:
            continue
        rival = best.get(row.pair_key)
        limit = most if rival is None else rival.cost_micro_usd
        kv_tokens = kv_tokens_needed(request, 0, PREFILL)
        if not is_allowed(request, row) or not fits(row, kv_tokens, now_ms, request.is_preferred):
            continue
        tokens = cached.get(row.index, 0)
        if floor_micro_usd(request, row, tokens, PREFILL, 0.0) > limit:
            continue
        forecast = Forecast(request, row, tokens, now_ms, PREFILL, 0.0)
        cost = price(request, row, forecast, limit)
        if cost == INFEASIBLE:
            continue
        is_tie = rival is not None and cost == rival.cost_micro_usd
        if is_tie and rival is not None and tie_break(seed, row) > tie_break(seed, rival.row):
            continue
        best[row.pair_key] = PrefillChoice(row, cost, forecast.ttft_ms)
    return best


def floor_micro_usd(
    request: Request, row: EngineRow, cached_tokens: int, leg: int, urgency: float
) -> float:
    """Lower bound of a leg's `price`, near to it, from the terms that need no forecast of the load.

    `urgency` is that of the request now. A hair below their exact sum, for the sum of the axes rounds in
    another order.
    """
    prefill_ms = uncached_prefill_ms(request, row, cached_tokens)
    gpu_ms = 0.0 if leg == DECODE else prefill_ms
    if leg != PREFILL:
        gpu_ms += decode_gpu_ms(request, row)
    total = gpu_ms * row.micro_usd_per_ms * row.attempts_expected
    if request.home is None and row.flows_micro_usd_per_s > 0.0:
        delay_ms = caused_ms(request, row, leg, prefill_ms)
        total += row.flows_micro_usd_per_s * delay_ms / MS_PER_S
    if leg != PREFILL:
        tpot_ms = (
            row.decode_ms_base
            + sequences_on(row) * row.decode_ms_per_seq
            + kv_tokens_on(row) * row.decode_ms_per_kv_token
            + step_ms_added(request, row)
        )
        expected = float(request.completion_tokens_expected)
        call_ms = (expected - 1.0) * tpot_ms if expected > 1.0 else 0.0
        if leg == WHOLE:
            call_ms += prefill_ms
        total += own_ms(request, row, call_ms, tpot_ms) / MS_PER_S * urgency
        is_moving = request.home is not None and request.home != row.engine_id
        if is_moving and request.workflow is not None:
            total += HOME_RECOMPUTE_FACTOR * prefill_ms * row.micro_usd_per_ms
    return total * (1.0 - 1e-9)


def place(
    request: Request, rows: Sequence[EngineRow], cached: Mapping[int, int], now_ms: int
) -> Placement | Objection:
    """The cheapest feasible placement, or why there is none. `cached`: row index -> prompt tokens.

    Single engines are those that decode; a pair must be strictly cheaper than the best of them.
    """
    held = cached if isinstance(cached, dict) else dict(cached)
    urgency = urgency_micro_usd_per_s(request, now_ms)
    seed = tie_seed(request)
    best: EngineRow | None = None
    best_cost = INFEASIBLE
    prefill_rows = 0
    others: list[EngineRow] = []
    # Who holds some of the prompt comes first: a cheap find ends the sums of most others early.
    for is_second in (False, True):
        for row in others if is_second else rows:
            tokens = 0
            if not is_second:
                if row.role is _PREFILL_ROLE:
                    prefill_rows += 1
                    continue
                tokens = held.get(row.index, 0)
                if tokens == 0:
                    others.append(row)
                    continue
            # Asked before anything is predicted. The axes ask again; most rows never come to that.
            if not is_allowed(request, row):
                continue
            kv_tokens = kv_tokens_needed(request, tokens, WHOLE, sequences_on(row))
            if not fits(row, kv_tokens, now_ms, request.is_preferred):
                continue
            if floor_micro_usd(request, row, tokens, WHOLE, urgency) > best_cost:
                continue
            forecast = Forecast(request, row, tokens, now_ms, WHOLE, 0.0)
            cost = price(request, row, forecast, best_cost)
            if cost == INFEASIBLE:
                continue
            is_tie = best is not None and cost == best_cost
            if is_tie and best is not None and tie_break(seed, row) > tie_break(seed, best):
                continue
            best = row
            best_cost = cost

    if prefill_rows and not request.is_single_engine:
        pair = _cheapest_pair(request, rows, held, now_ms, best_cost)
        if pair is not None:
            return pair
    if best is None:
        return object_to(request, rows, held, now_ms)
    tokens = held.get(best.index, 0)
    forecast = Forecast(request, best, tokens, now_ms, WHOLE, 0.0)
    return Placement(
        best,
        None,
        min(tokens, request.prompt_tokens),
        forecast.kv_tokens,
        forecast.ttft_ms,
        forecast.e2e_ms,
        best_cost,
    )


def prices(
    request: Request,
    rows: Sequence[EngineRow],
    cached: Mapping[int, int],
    now_ms: int,
    kept: int,
) -> tuple[dict[int, float], set[int]]:
    """Micro-dollars of the cheapest placement that decodes on a row, by its place in `rows`; which are pairs.

    Rows without one are left out, and of the others all but the `kept` cheapest by their lower bounds.
    """
    held = cached if isinstance(cached, dict) else dict(cached)
    urgency = urgency_micro_usd_per_s(request, now_ms)
    choices: dict[int, PrefillChoice] = {}
    if not request.is_single_engine:
        choices = prefill_choices(request, rows, held, now_ms)
    floors: list[tuple[float, int]] = []
    choice: PrefillChoice | None
    for at, row in enumerate(rows):
        if row.role is _PREFILL_ROLE or not is_allowed(request, row):
            continue
        tokens = held.get(row.index, 0)
        kv_tokens = kv_tokens_needed(request, tokens, WHOLE, sequences_on(row))
        if not fits(row, kv_tokens, now_ms, request.is_preferred):
            continue
        floor = floor_micro_usd(request, row, tokens, WHOLE, urgency)
        choice = choices.get(row.pair_key)
        if choice is not None and choice.cost_micro_usd < floor:
            paired = choice.cost_micro_usd + floor_micro_usd(request, row, tokens, DECODE, urgency)
            floor = min(floor, paired)
        floors.append((floor, at))
    if len(floors) > kept:
        floors.sort()
        del floors[kept:]
    found: dict[int, float] = {}
    pairs: set[int] = set()
    for _, at in floors:
        row = rows[at]
        tokens = held.get(row.index, 0)
        cost = price(request, row, Forecast(request, row, tokens, now_ms, WHOLE, 0.0))
        choice = choices.get(row.pair_key)
        if choice is not None and choice.cost_micro_usd < cost:
            least = choice.cost_micro_usd + floor_micro_usd(request, row, tokens, DECODE, urgency)
            if least < cost:
                forecast = Forecast(request, row, tokens, now_ms, DECODE, choice.ttft_ms)
                paired = choice.cost_micro_usd + price(request, row, forecast)
                if paired < cost:
                    cost = paired
                    pairs.add(at)
        if cost < INFEASIBLE:
            found[at] = cost
    return found, pairs


def _cheapest_pair(
    request: Request,
    rows: Sequence[EngineRow],
    cached: dict[int, int],
    now_ms: int,
    single_cost: float,
) -> Placement | None:
    """The cheapest pair, if it is strictly cheaper than `single_cost`."""
    choices = prefill_choices(request, rows, cached, now_ms, single_cost)
    if not choices:
        return None
    urgency = urgency_micro_usd_per_s(request, now_ms)
    seed = tie_seed(request)
    best: EngineRow | None = None
    best_cost = single_cost
    choice: PrefillChoice | None
    for row in rows:
        if row.role is _PREFILL_ROLE:
            continue
        choice = choices.get(row.pair_key)
        if choice is None or choice.cost_micro_usd > best_cost:
            continue
        if not is_allowed(request, row):
            continue
        kv_tokens = kv_tokens_needed(request, 0, DECODE, sequences_on(row))
        if not fits(row, kv_tokens, now_ms, request.is_preferred):
            continue
        tokens = cached.get(row.index, 0)
        # The limit is widened by a hair: it is a difference, and differences round.
        limit = (best_cost - choice.cost_micro_usd) * (1.0 + 1e-9)
        if floor_micro_usd(request, row, tokens, DECODE, urgency) > limit:
            continue
        forecast = Forecast(request, row, tokens, now_ms, DECODE, choice.ttft_ms)
        cost = choice.cost_micro_usd + price(request, row, forecast, limit)
        if cost > best_cost or (best is None and cost >= best_cost):
            continue
        if best is not None and cost == best_cost and tie_break(seed, row) > tie_break(seed, best):
            continue
        best = row
        best_cost = cost
    if best is None:
        return None
    choice = choices[best.pair_key]
    tokens = cached.get(best.index, 0)
    forecast = Forecast(request, best, tokens, now_ms, DECODE, choice.ttft_ms)
    first_ms = choice.ttft_ms + forecast.ttft_ms
    return Placement(
        best,
        choice.row,
        min(cached.get(choice.row.index, 0), request.prompt_tokens),
        forecast.kv_tokens,
        first_ms,
        first_ms + forecast.decode_ms,
        best_cost,
    )


# What stands in the way on one engine, in the order in which it is looked for.
_FORBIDDEN: Final = 0
_TOO_LONG: Final = 1
_STARTING: Final = 2
_CLOSED: Final = 3
_SUSPECT: Final = 4
_TOO_LATE: Final = 5
_TOO_DEAR: Final = 6
_FANNED_OUT: Final = 7
_UNADAPTED: Final = 8
_FULL: Final = 9
_KINDS: Final = 10


def _obstacle(request: Request, row: EngineRow, forecast: Forecast) -> int:
    """The first lasting obstacle to a whole call on this engine; `_FULL` when waiting can help."""
    if not is_allowed(request, row):
        return _FORBIDDEN
    is_too_big = forecast.kv_tokens_pinned > row.kv_tokens_capacity
    if is_too_big or not is_context_within(request, row):
        return _TOO_LONG
    if not row.is_accepting:
        # An engine that loads its weights accepts nothing yet; one that has them and does not
        # accept is cordoned, draining or silent.
        if not row.is_warm and is_warm_in_time(request, row, forecast.now_ms, 0.0):
            return _STARTING
        return _CLOSED
    if not has_adapter(request, row):
        return _UNADAPTED
    if row.is_suspect:
        return _SUSPECT
    if not is_reachable(request, forecast):
        return _TOO_LATE
    if not is_within_budget(request, row, forecast):
        return _TOO_DEAR
    if not is_within_fan_out(request):
        return _FANNED_OUT
    return _FULL


def object_to(
    request: Request, rows: Sequence[EngineRow], cached: dict[int, int], now_ms: int
) -> Objection:
    """The most informative reason why no engine can take the call; what will pass comes first."""
    counts = [0] * _KINDS
    engines = 0
    retry_after_ms = float(RETRY_AFTER_MS_MAX)
    load_ms = float(RETRY_AFTER_MS_MAX)
    for row in rows:
        if row.role is _PREFILL_ROLE or row.model != request.model:
            continue
        engines += 1
        forecast = Forecast(request, row, cached.get(row.index, 0), now_ms, WHOLE, 0.0)
        kind = _obstacle(request, row, forecast)
        counts[kind] += 1
        if kind == _FULL:
            # Calls are spread over their lives, so a seat frees once in a call's time / calls.
            retry_after_ms = min(retry_after_ms, forecast.e2e_ms / max(1, forecast.sequences))
        elif kind == _STARTING:
            load_ms = min(load_ms, float(row.warm_up_ms))
    model = request.model
    if counts[_FULL]:
        detail = f"all engines of `{model}` that could take the call are full ({counts[_FULL]:,})"
        return Objection(Reason.QUEUE_FULL, detail, _retry_after(request, retry_after_ms))
    if counts[_STARTING]:
        detail = f"engines of `{model}` are loading their weights ({counts[_STARTING]:,})"
        return Objection(Reason.WARMING, detail, _retry_after(request, load_ms))
    if counts[_TOO_LATE]:
        left_s = max(0, request.deadline_ms - now_ms) / MS_PER_S
        detail = (
            f"no engine of `{model}` can begin to answer within the {left_s:.1f} s that are left"
        )
        return Objection(Reason.DEADLINE_UNREACHABLE, detail, None)
    if counts[_TOO_DEAR]:
        detail = (
            "what is left of the workflow's budget does not cover the call; create a workflow with"
            " a larger one"
        )
        return Objection(Reason.INSUFFICIENT_QUOTA, detail, None)
    if counts[_FANNED_OUT]:
        detail = (
            f"the workflow has {request.calls_in_flight:,} calls in flight; wait for one to end"
        )
        return Objection(Reason.FAN_OUT_EXCEEDED, detail, None)
    if counts[_SUSPECT]:
        detail = f"the engines of `{model}` have failed just now ({counts[_SUSPECT]:,})"
        return Objection(Reason.NO_CAPACITY, detail, _retry_after(request, float(SUSPECT_MS)))
    if counts[_UNADAPTED]:
        detail = f"the adapter `{request.adapter}` is loaded on no engine of `{model}` at present"
        return Objection(Reason.NO_CAPACITY, detail, _retry_after(request, float(SUSPECT_MS)))
    if counts[_CLOSED] or engines == 0:
        detail = f"no engine serves `{model}` at present"
        return Objection(Reason.NO_CAPACITY, detail, _retry_after(request, float(SUSPECT_MS)))
    if counts[_TOO_LONG]:
        context = request.prompt_tokens + request.completion_tokens_expected
        detail = f"no engine of `{model}` holds a context of about {context:,} tokens; shorten it"
        return Objection(Reason.CONTEXT_LENGTH_EXCEEDED, detail, None)
    detail = f"policy allows no region or GPU type in which `{model}` is served"
    return Objection(Reason.FORBIDDEN_BY_POLICY, detail, None)


def _retry_after(request: Request, estimate_ms: float) -> int:
    """The estimate within its limits, spread by up to half of it so that clients do not return at once."""
    within = min(float(RETRY_AFTER_MS_MAX), max(float(RETRY_AFTER_MS_MIN), estimate_ms))
    return int(within * (1.0 + 0.5 * tie_seed(request) / TIE_MASK))


def still_fits(request: Request, placement: Placement, now_ms: int) -> bool:
    """The commit's question: does what was decided fit on the rows as they are now?"""
    preferred = request.is_preferred
    if not fits(placement.decode, placement.kv_tokens, now_ms, preferred):
        return False
    prefill = placement.prefill
    return prefill is None or fits(prefill, request.prompt_tokens, now_ms, preferred)
