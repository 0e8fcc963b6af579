"""Counts what only PostgreSQL knows: how workflows ended and what they cost, where budgets stand, what the fleet costs.

Every replica counts the workflows whose end was told to it. The leader alone reads what is the same for all,
so that sums over replicas count it once.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Scope
from controlplane.domain.errors import StateUnavailable
from controlplane.domain.ids import WorkflowId
from controlplane.domain.money import usd
from controlplane.domain.outcome import WorkflowState
from controlplane.runtime.call import monotonic_ms
from controlplane.runtime.fleet_state import FleetState
from controlplane.scheduler.perf_model import MS_PER_HOUR
from controlplane.store import figures, replicas
from controlplane.store.figures import BudgetSum, EndedWorkflow
from controlplane.store.reaper import ReapSummary
from controlplane.telemetry.metrics import Labels, Metrics
from controlplane.telemetry.named_tenants import OVERFLOW, TENANTS_NAMED_MAX

FIGURES_INTERVAL_S: Final = 2.0
# The leader's sums read the accounts of all tenants and keys: not at every pass.
SUMS_INTERVAL_MS: Final = 10_000.0
# Calls of a workflow that has just ended may not be written yet: the journal has so long.
SETTLE_MS: Final = 2_000.0
# A workflow that had ended so long before its end was told has been counted.
COUNTED_WITHIN_S: Final = 60.0
ENDED_WAITING_MAX: Final = 20_000
ENDED_PER_PASS_MAX: Final = 2_000
ENDED_KNOWN_MAX: Final = 20_000
# A workflow was killed late when so much of it had been paid for.
LATE_RATIO: Final = 0.5
# Time between two passes that the fleet's cost is counted for, at most: a leader that hung saw nothing.
COST_GAP_MS_MAX: Final = 60_000.0

_KILLED: Final = frozenset({WorkflowState.EXPIRED, WorkflowState.CANCELLED})


class Figures:
    """Owned by one task; `look` is its pass. `clock_ms` tells milliseconds of the monotonic clock."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        metrics: Metrics,
        fleet: FleetState,
        is_leading: Callable[[], bool],
        is_bus_connected: Callable[[], bool],
        replica_ttl_s: float,
        version: str,
        clock_ms: Callable[[], float] = monotonic_ms,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._fleet = fleet
        self._is_leading = is_leading
        self._clock_ms = clock_ms
        self._replica_ttl_s = replica_ttl_s
        self._ended: deque[tuple[WorkflowId, float]] = deque()
        self._known: OrderedDict[WorkflowId, None] = OrderedDict()
        self._is_store_reachable = True
        self._sums: dict[str, BudgetSum] = {}
        self._tenants: dict[str, BudgetSum] = {}
        self._running: dict[str, int] = {}
        self._replicas_live: int | None = None
        self._summed_ms = float("-inf")
        self._cost_ms: float | None = None
        metrics.build.watch(lambda: {(version,): 1.0})
        metrics.leads.watch(lambda: {(): float(is_leading())})
        metrics.bus_connected.watch(lambda: {(): float(is_bus_connected())})
        metrics.store_reachable.watch(lambda: {(): float(self._is_store_reachable)})
        metrics.replicas_live.watch(
            lambda: {} if self._replicas_live is None else {(): float(self._replicas_live)}
        )
        metrics.workflows_running.watch(
            lambda: {(scope,): float(count) for scope, count in self._running.items()}
        )
        metrics.budget.watch(lambda: _as_series(self._sums))
        metrics.tenant_budget.watch(lambda: _as_series(self._tenants))

    # ------------------------------------------------------------ what is told

    def workflow_ended(self, workflow: WorkflowId) -> None:
        """A workflow has ended. It may be told several times, and is counted once."""
        if workflow in self._known:
            return
        if len(self._ended) >= ENDED_WAITING_MAX:
            self._metrics.workflows_uncounted.add()
            return
        self._known[workflow] = None
        if len(self._known) > ENDED_KNOWN_MAX:
            self._known.popitem(last=False)
        self._ended.append((workflow, self._clock_ms()))

    def reaped(self, summary: ReapSummary) -> None:
        """What was left open by others has been ended by this replica."""
        self._metrics.requests_lost.add((), summary.requests_lost)
        for workflow in summary.workflows_expired:
            self.workflow_ended(workflow)

    # ------------------------------------------------------------ the pass

    async def look(self) -> None:
        """Count what has ended, and read the sums while this replica leads. Raises StateUnavailable."""
        now_ms = self._clock_ms()
        is_leader = self._is_leading()
        self._count_cost(now_ms, is_leader=is_leader)
        if not is_leader:
            self._forget_sums()
        try:
            live = await replicas.count_live(self._engine, self._replica_ttl_s)
            await self._count_ended(now_ms)
            if is_leader:
                self._replicas_live = live
                await self._read_sums(now_ms)
        except StateUnavailable:
            self._is_store_reachable = False
            raise
        self._is_store_reachable = True

    async def _count_ended(self, now_ms: float) -> None:
        ready: list[WorkflowId] = []
        for workflow, told_ms in self._ended:
            if len(ready) >= ENDED_PER_PASS_MAX or now_ms - told_ms < SETTLE_MS:
                break
            ready.append(workflow)
        if not ready:
            return
        # Nothing is taken off before it is read: PostgreSQL may be away.
        found = await figures.ended_workflows(self._engine, ready, COUNTED_WITHIN_S)
        for _ in ready:
            self._ended.popleft()
        for ended in found:
            count_workflow(self._metrics, ended)

    async def _read_sums(self, now_ms: float) -> None:
        if now_ms - self._summed_ms < SUMS_INTERVAL_MS:
            return
        self._summed_ms = now_ms
        sums = await figures.budget_sums(self._engine)
        tenants = await figures.tenant_budgets(self._engine, TENANTS_NAMED_MAX)
        running = await figures.running_workflows(self._engine)
        self._sums = sums
        self._tenants = {str(tenant): each for tenant, each in tenants.items()}
        self._tenants[OVERFLOW] = _rest(sums.get("tenant"), list(tenants.values()))
        self._running = {str(scope): running.get(scope, 0) for scope in Scope}

    def _forget_sums(self) -> None:
        """Another replica tells them now."""
        self._sums, self._tenants, self._running = {}, {}, {}
        self._replicas_live = None
        self._summed_ms = float("-inf")

    def _count_cost(self, now_ms: float, *, is_leader: bool) -> None:
        """What the GPUs of the nodes that are heard cost since the last pass."""
        since_ms, self._cost_ms = self._cost_ms, now_ms if is_leader else None
        if since_ms is None or not is_leader:
            return
        hours = min(now_ms - since_ms, COST_GAP_MS_MAX) / MS_PER_HOUR
        catalog = self._fleet.catalog
        for declared in catalog.nodes.values():
            node = self._fleet.nodes.get(declared.id)
            gpu = catalog.gpu_types.get(declared.gpu_type)
            if gpu is not None and node is not None and node.heard_ms:
                cost = declared.gpus * hours * usd(gpu.price_micro_usd_per_hour)
                self._metrics.fleet_cost.add((declared.gpu_type, declared.region), cost)


def count_workflow(metrics: Metrics, workflow: EndedWorkflow) -> None:
    """Feeds the series of one ended workflow."""
    scope, state = workflow.scope, workflow.state
    spent_usd = usd(workflow.spent_micro_usd)
    metrics.workflows_ended.add((scope, workflow.tenant_class, workflow.slo_class, state))
    metrics.workflow_spent.add((scope, workflow.tenant_class, state), spent_usd)
    metrics.workflow_cost.observe(spent_usd, (scope, state))
    metrics.workflow_steps.observe(workflow.steps_done, (scope, state))
    lasted_s = (workflow.ended_at - workflow.created_at).total_seconds()
    metrics.workflow_time.observe(max(0.0, lasted_s), (scope, state))
    if state == WorkflowState.SUCCEEDED:
        return
    if spent_usd:
        metrics.wasted.add((f"workflow_{state}",), spent_usd)
    is_late = workflow.steps_done >= LATE_RATIO * workflow.steps_expected
    if state in _KILLED and is_late and workflow.steps_done:
        metrics.late_kills.add((scope, state))


def _as_series(sums: dict[str, BudgetSum]) -> dict[Labels, float]:
    return {
        (name, kind): usd(amount)
        for name, each in sums.items()
        for kind, amount in (
            ("limit", each.limit),
            ("spent", each.spent),
            ("reserved", each.reserved),
        )
    }


def _rest(whole: BudgetSum | None, parts: list[BudgetSum]) -> BudgetSum:
    """What is left of all tenants' accounts beside the named ones; they are read one after the other."""
    if whole is None:
        return BudgetSum(limit=0, spent=0, reserved=0)
    return BudgetSum(
        limit=max(0, whole.limit - sum(part.limit for part in parts)),
        spent=max(0, whole.spent - sum(part.spent for part in parts)),
        reserved=max(0, whole.reserved - sum(part.reserved for part in parts)),
    )
