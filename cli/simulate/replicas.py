"""Several replicas of Headway that share the engines: each decides alone, on what agents lend it.

Every replica has its own queue, loads, estimates and budgets. A workflow stays with one replica, as a
load balancer that hashes it would have it. Agents lend by their own book (`dataplane/agent/credits.py`), and
replicas ask for what live ones would. Not shared as the live store does it: what was learned of sizes.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

import xxhash

from cli.simulate.contracts import Call, Condition, EngineView, Fate, Floor, Plan
from cli.simulate.headway import Headway, HeadwayOptions
from controlplane.domain.ids import EngineId, ModelName
from controlplane.runtime.credits import CONTENTION_MS, in_use, wanted
from dataplane.agent.credits import Amount, CreditBook
from dataplane.protocol.messages import CreditGrant

# A live replica that found no credit asks again so soon (`controlplane/runtime/credits.py`).
NUDGE_MS: Final = 20.0


class Replica(Headway):
    """One of `count` replicas, which is lent its share."""

    def __init__(
        self, number: int, count: int, book: CreditBook, options: HeadwayOptions | None
    ) -> None:
        super().__init__(options)
        self._id = f"replica-{number}"
        self._book = book
        self._contended_ms: dict[ModelName, float] = {}
        self.loads.use_replicas(count)

    def _lent(self, offer: CreditGrant) -> CreditGrant:
        wants: dict[str, Amount] = {}
        holds: dict[str, Amount] = {}
        for name in offer.holds:
            row = self.fleet.row_of(EngineId(name))
            if row is not None:
                contended_ms = self._contended_ms.get(row.model, float("-inf"))
                is_contended = self._now_ms - contended_ms < CONTENTION_MS
                wants[name] = wanted(row, is_contended=is_contended)
                holds[name] = in_use(row)
        lent = self._book.ask(self._id, wants, holds, int(self._now_ms))
        return CreditGrant(
            node_id=offer.node_id, agent_epoch=offer.agent_epoch, ttl_ms=offer.ttl_ms, holds=lent
        )

    def _contended(self, model: ModelName) -> None:
        self._contended_ms[model] = self._now_ms
        if self._now_ms - self._agents_ms >= NUDGE_MS:
            self._agents()


class Replicated:
    """Implements `Strategy` as `count` replicas of Headway behind a hash of the workflow."""

    def __init__(self, count: int, options: HeadwayOptions | None = None) -> None:
        self.book = CreditBook()
        self.replicas = tuple(Replica(number, count, self.book, options) for number in range(count))

    @property
    def name(self) -> str:
        return f"{self.replicas[0].name}-{len(self.replicas)}-replicas"

    @property
    def waiting(self) -> int:
        return sum(replica.waiting for replica in self.replicas)

    def gauges(self) -> Mapping[str, float]:
        total: Counter[str] = Counter()
        for replica in self.replicas:
            total.update(replica.gauges())
        return dict(total)

    def of(self, plan: Plan) -> Replica:
        chance = xxhash.xxh3_64_intdigest(f"replica {plan.number}".encode())
        return self.replicas[chance % len(self.replicas)]

    def begin(self, floor: Floor) -> None:
        self.floor = floor
        for view in floor.engines:
            self._open(view)
        for replica in self.replicas:
            replica.begin(floor)

    def _open(self, view: EngineView) -> None:
        """Lend of an engine as its agent does, by what it is doing."""
        name = view.spec.name
        if view.condition in (Condition.SERVING, Condition.CORDONED):
            self.book.open(name, (view.spec.seats, view.kv_tokens_capacity))
        elif view.condition is Condition.OFF:
            self.book.forget(name)
        else:
            self.book.close(name)

    def arrived(self, call: Call) -> None:
        self.of(call.plan).arrived(call)

    def prefilled(self, call: Call) -> None:
        self.of(call.plan).prefilled(call)

    def first_token(self, call: Call) -> None:
        self.of(call.plan).first_token(call)

    def ended(self, call: Call) -> None:
        self.of(call.plan).ended(call)

    def failed(self, call: Call) -> None:
        self.of(call.plan).failed(call)

    def expired(self, call: Call) -> None:
        self.of(call.plan).expired(call)

    def workflow_ended(self, plan: Plan, fate: Fate) -> None:
        self.of(plan).workflow_ended(plan, fate)

    def engine_changed(self, engine: int) -> None:
        self._open(self.floor.engines[engine])
        for replica in self.replicas:
            replica.engine_changed(engine)

    def refreshed(self) -> None:
        for replica in self.replicas:
            replica.refreshed()

    def tick(self, now_ms: float) -> None:
        for replica in self.replicas:
            replica.tick(now_ms)
