"""Every decision of this replica: kept cheaply, explained on demand from the rows as they stood.

A request costs one small tuple here. Candidates are worked out again only when somebody asks, and
for refusals and the sampled share, which are written to Postgres with their full record.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, NamedTuple

import xxhash

from controlplane.domain.decision import (
    Admit,
    Decision,
    Explanation,
    Placement,
    Queue,
    Reason,
    Refuse,
)
from controlplane.domain.request import Request
from controlplane.runtime.call import Ticket, wall_ms
from controlplane.runtime.fleet_state import FleetState
from controlplane.scheduler.explain import explain
from controlplane.store.journal import DecisionRow, Journal
from policies.evaluate import Ruling
from policies.facts import LiveFacts, StaticFacts, as_json

DECISIONS_KEPT = 20_000
SAMPLE_ONE_IN = 32
RECORDS_PENDING_MAX = 1_000
# Full records worked out in one sweep; what is sampled beyond that is written without one.
RECORDS_PER_SWEEP_MAX = 8
# Once in so many sweeps the latest placement is explained to who listens, whatever is sampled.
SWEEPS_PER_LATEST = 8


class Decided(NamedTuple):
    """What a decision was made from: the request, what rules could read of it, the tick of the fleet, the
    cached prompt tokens.
    """

    request: Request
    static: StaticFacts
    live: LiveFacts
    ruling: Ruling
    tick: int
    cached: Mapping[int, int]
    now_ms: int
    decision: Decision
    number: int
    wall_ms: float
    revision: str


def _deaf(_: object) -> None: ...


class DecisionLog:
    def __init__(self, fleet: FleetState, journal: Journal, replica_id: str) -> None:
        self._fleet = fleet
        self._journal = journal
        self._replica_id = replica_id
        self._kept: OrderedDict[str, Decided] = OrderedDict()
        self._pending: deque[Decided] = deque()
        self._latest: Decided | None = None
        self._sweeps = 0
        # Told of each explanation that is worked out here, and of that of a placement now and then.
        self.on_explained: Callable[[Explanation], None] = _deaf

    def record(
        self,
        ticket: Ticket,
        cached: Mapping[int, int],
        decision: Decision,
        *,
        now_ms: int,
    ) -> None:
        """Remember a decision, made just now and not yet committed to the rows."""
        request = ticket.request
        decided = Decided(
            request,
            ticket.static,
            ticket.live,
            ticket.ruling,
            self._fleet.ticks.mark(),
            cached,
            now_ms,
            decision,
            ticket.decisions,
            wall_ms(),
            ticket.policy.revision,
        )
        self._kept[request.id] = decided
        if len(self._kept) > DECISIONS_KEPT:
            self._kept.popitem(last=False)
        if isinstance(decision, Admit):
            self._latest = decided
        is_recorded = isinstance(decision, Refuse) or _is_sampled(request)
        if is_recorded and len(self._pending) < RECORDS_PENDING_MAX:
            self._pending.append(decided)
            return
        self._journal.decided(self._row(decided, None))

    def write_records(self) -> None:
        """Work out and journal the full records that wait, off the request path."""
        self._sweeps += 1
        if self._sweeps % SWEEPS_PER_LATEST == 0:
            self._tell_latest()
        budget = RECORDS_PER_SWEEP_MAX
        while self._pending:
            decided = self._pending.popleft()
            explanation = self._explain(decided) if budget > 0 else None
            budget -= 1
            if explanation is None:
                record = _brief(decided)
            else:
                self.on_explained(explanation)
                record = _as_json(explanation, decided)
            self._journal.decided(self._row(decided, record))

    def _tell_latest(self) -> None:
        latest, self._latest = self._latest, None
        explanation = None if latest is None else self._explain(latest)
        if explanation is not None:
            self.on_explained(explanation)

    def explain(self, request_id: str) -> Explanation | None:
        """The candidates of a decision still remembered here, or None."""
        decided = self._kept.get(request_id)
        return None if decided is None else self._explain(decided)

    def _explain(self, decided: Decided) -> Explanation | None:
        rows = self._fleet.ticks.rows_at(decided.tick, self._fleet.rows_for(decided.request.model))
        if rows is None:
            return None
        _, winner, reason = _verdict(decided.decision)
        return explain(decided.request, rows, decided.cached, decided.now_ms, winner, reason)

    def _row(self, decided: Decided, record: dict[str, Any] | None) -> DecisionRow:
        verdict, winner, reason = _verdict(decided.decision)
        is_refused = isinstance(decided.decision, Refuse)
        rule = decided.decision.rule or None if isinstance(decided.decision, Refuse) else None
        is_sampled = _is_sampled(decided.request)
        return DecisionRow(
            request_id=decided.request.id,
            number=decided.number,
            replica_id=self._replica_id,
            verdict=verdict,
            reason=None if reason is None else str(reason),
            decode_engine_id=None if winner is None else winner.decode.engine_id,
            prefill_engine_id=None
            if winner is None or winner.prefill is None
            else winner.prefill.engine_id,
            cost_micro_usd=None if winner is None else winner.cost_micro_usd,
            ttft_ms_predicted=None if winner is None else winner.ttft_ms_predicted,
            cached_tokens_predicted=None if winner is None else winner.cached_tokens,
            policy_revision=decided.revision,
            decided_at=datetime.fromtimestamp(decided.wall_ms / 1000.0, UTC),
            record=record,
            tenant_id=decided.request.tenant,
            model=decided.request.model,
            rule=rule,
            # Of an admitted call that is not sampled nothing can be replayed.
            facts=as_json(decided.static, decided.live) if is_refused or is_sampled else None,
            sample_weight=1 if is_refused else SAMPLE_ONE_IN,
        )


def _is_sampled(request: Request) -> bool:
    return xxhash.xxh3_64_intdigest(request.id.encode()) % SAMPLE_ONE_IN == 0


def _verdict(decision: Decision) -> tuple[str, Placement | None, Reason | None]:
    match decision:
        case Admit(placement):
            return "admit", placement, None
        case Queue(reason):
            return "queue", None, reason
        case Refuse(reason=reason):
            return "refuse", None, reason


def _as_json(explanation: Explanation, decided: Decided) -> dict[str, Any]:
    """The explanation as members of JSON; an infinite cost becomes null, its objection says why."""
    request, ruling = decided.request, decided.ruling
    record = asdict(explanation)
    for candidate in record["candidates"]:
        candidate["cost_micro_usd"] = _finite(candidate["cost_micro_usd"])
        candidate["ttft_ms_predicted"] = _finite(candidate["ttft_ms_predicted"])
        candidate["e2e_ms_predicted"] = _finite(candidate["e2e_ms_predicted"])
        for axis in candidate["axes"]:
            axis["cost_micro_usd"] = _finite(axis["cost_micro_usd"])
    record["tenant"] = request.tenant
    record["prompt_tokens"] = request.prompt_tokens
    record["completion_tokens_max"] = request.completion_tokens_max
    record["rules"] = {
        "fired": ruling.fired,
        "audited": ruling.audited,
        "annotations": dict(ruling.annotations),
    }
    if isinstance(decided.decision, Refuse):
        record["refusal"] = _refusal(decided.decision)
    return record


def _brief(decided: Decided) -> dict[str, Any] | None:
    """A refusal whose candidates nobody had time to work out: its words and numbers; None of others."""
    refuse = decided.decision
    if not isinstance(refuse, Refuse):
        return None
    words = f"{refuse.detail}; its candidates were not worked out: too many were refused at once."
    return {
        "request_id": decided.request.id,
        "model": decided.request.model,
        "candidates": [],
        "winner": None,
        "runner_up": None,
        "reason": str(refuse.reason),
        "sentence": words,
        "refusal": _refusal(refuse),
    }


def _refusal(refuse: Refuse) -> dict[str, Any]:
    """What the client was told, and the numbers that kept it out."""
    return {
        "detail": refuse.detail,
        "retry_after_ms": refuse.retry_after_ms,
        "is_final": refuse.is_final,
        "hurdles": [
            {
                "quantity": str(hurdle.quantity),
                "there": None if hurdle.there is None else _finite(hurdle.there),
                "needed": _finite(hurdle.needed),
                "of": hurdle.of,
            }
            for hurdle in refuse.hurdles
        ],
    }


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None  # noqa: PLR0124
