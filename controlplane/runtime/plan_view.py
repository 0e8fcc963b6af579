"""What the leader told this replica: the plan of the fleet, and what capacity is worth now.

Applies prices and paces to the fleet. Obeys no leader of an older epoch, and no price that is old.
"""

import logging
from collections.abc import Callable, Mapping

from controlplane.bus import Bus
from controlplane.domain.catalog import Role
from controlplane.domain.errors import BusUnavailable
from controlplane.domain.ids import GpuTypeName, ModelName, RegionName
from controlplane.domain.money import MICRO_USD_PER_USD
from controlplane.runtime.call import wall_ms
from controlplane.runtime.fleet_state import FleetState
from controlplane.telemetry.metrics import Labels, Metrics
from dataplane.protocol import subjects
from dataplane.protocol.messages import ControlPlan, ControlPrices, ProtocolError, decode

log = logging.getLogger(__name__)

# Clocks of replicas may differ by this much before a price counts as one of the future.
CLOCK_SKEW_MS_MAX = 60_000
MS_PER_S = 1_000.0


class PlanView:
    """Fed by the bus, or by hand where there is none; `expire` is called several times a minute."""

    def __init__(
        self,
        fleet: FleetState,
        *,
        stretch_ratio_min: Callable[[], float],
        clock_ms: Callable[[], float] = wall_ms,
    ) -> None:
        """`stretch_ratio_min` is the least pace that policy allows; `clock_ms` tells Unix time."""
        self._fleet = fleet
        self._stretch_ratio_min = stretch_ratio_min
        self._clock_ms = clock_ms
        self._models: set[ModelName] = set()
        self.plan: ControlPlan | None = None
        self.prices: ControlPrices | None = None

    # ------------------------------------------------------------ the bus

    async def join(self, bus: Bus) -> None:
        """Subscribe, and take what was told before. Again after each reconnect."""
        await bus.subscribe(subjects.CONTROL_PLAN, self._on_plan)
        await bus.subscribe(subjects.CONTROL_PRICES, self._on_prices)

        async def catch_up() -> None:
            try:
                await bus.ensure_control_stream()
                for subject, take in (
                    (subjects.CONTROL_PLAN, self._on_plan),
                    (subjects.CONTROL_PRICES, self._on_prices),
                ):
                    data = await bus.last(subject)
                    if data is not None:
                        take(subject, data)
            except BusUnavailable as error:
                log.warning("plan_not_read", extra={"fields": {"why": str(error)}})

        bus.on_reconnect(catch_up)
        await catch_up()

    def _on_plan(self, subject: str, data: bytes) -> None:
        try:
            self.take_plan(decode(data, ControlPlan))
        except ProtocolError as error:
            log.warning(
                "message_refused", extra={"fields": {"subject": subject, "why": str(error)}}
            )

    def _on_prices(self, subject: str, data: bytes) -> None:
        try:
            self.take_prices(decode(data, ControlPrices))
        except ProtocolError as error:
            log.warning(
                "message_refused", extra={"fields": {"subject": subject, "why": str(error)}}
            )

    # ------------------------------------------------------------ what was told

    def take_plan(self, plan: ControlPlan) -> bool:
        """Whether it is news: neither of an older epoch nor of an earlier round than what is known."""
        known = self.plan
        if known is not None and (plan.epoch, plan.round) < (known.epoch, known.round):
            return False
        self.plan = plan
        return True

    def take_prices(self, prices: ControlPrices) -> bool:
        """Apply prices to the fleet. False: of an older epoch or round, or void already."""
        known = self.prices
        if known is not None and (prices.epoch, prices.round) < (known.epoch, known.round):
            return False
        if self._is_void(prices):
            return False
        self.prices = prices
        self._apply(prices)
        return True

    def expire(self) -> None:
        """Forget prices whose time is over: capacity costs its rent then, and pace is the replica's own."""
        if self.prices is not None and self._is_void(self.prices):
            log.warning("prices_expired", extra={"fields": {"epoch": self.prices.epoch}})
            self.prices = None
            self._apply(None)

    def age_s(self) -> float | None:
        """Seconds since the plan was made; None when none was ever told."""
        if self.plan is None:
            return None
        return max(0.0, self._clock_ms() - self.plan.made_ms) / MS_PER_S

    # ------------------------------------------------------------ inside

    def _is_void(self, prices: ControlPrices) -> bool:
        age_ms = self._clock_ms() - prices.made_ms
        return not -CLOCK_SKEW_MS_MAX <= age_ms <= prices.ttl_ms

    def _apply(self, prices: ControlPrices | None) -> None:
        fleet = self._fleet
        pools = () if prices is None else prices.pools
        models = () if prices is None else prices.models
        fleet.use_kv_prices(
            {
                (
                    ModelName(pool.model),
                    GpuTypeName(pool.gpu_type),
                    pool.gpus,
                    Role(pool.role),
                    RegionName(pool.region),
                ): pool.micro_usd_per_kv_token_s
                for pool in pools
            }
        )
        least = self._stretch_ratio_min()
        fleet.use_stretches_max(
            {ModelName(pace.model): max(least, pace.ratio) for pace in models if pace.ratio > 1.0}
        )
        told = set()
        for pace in models:
            model = ModelName(pace.model)
            told.add(model)
            # Where there is enough for all, what waiting calls were worth here last says more.
            fleet.use_bid_price(model, pace.bid_micro_usd_per_call or None)
            fleet.use_demand(model, pace.calls_per_s)
        for model in self._models - told:
            fleet.use_bid_price(model, None)
            fleet.use_demand(model, None)
        self._models = told


def watch(metrics: Metrics, view: PlanView) -> None:
    """Let the gauges of the plan read what this replica was told."""

    def of_plan(read: Callable[[ControlPlan], float]) -> Callable[[], Mapping[Labels, float]]:
        return lambda: {} if view.plan is None else {(): read(view.plan)}

    metrics.plan_age.watch(lambda: {} if (age_s := view.age_s()) is None else {(): age_s})
    metrics.plan_revision.watch(of_plan(lambda plan: plan.revision))
    metrics.plan_gap.watch(of_plan(lambda plan: plan.gap_ratio))
    metrics.plan_solve_time.watch(of_plan(lambda plan: plan.solve_s))
    metrics.desired_engines.watch(lambda: _engines(view.plan))
    metrics.desired_nodes.watch(lambda: _nodes(view.plan))
    metrics.pool_kv_shadow_price.watch(
        lambda: _pools(view, lambda pool: pool.micro_usd_per_kv_token_s)
    )
    metrics.pool_gpu_shadow_price.watch(
        lambda: _pools(view, lambda pool: pool.micro_usd_per_gpu_ms * MS_PER_S)
    )
    metrics.class_bid_price.watch(lambda: _classes(view.prices))


def _engines(plan: ControlPlan | None) -> dict[Labels, float]:
    found: dict[Labels, float] = {}
    for entry in () if plan is None else plan.engines:
        labels = (entry.model, entry.gpu_type, entry.role, entry.region)
        found[labels] = found.get(labels, 0.0) + entry.desired
    return found


def _nodes(plan: ControlPlan | None) -> dict[Labels, float]:
    found: dict[Labels, float] = {}
    for entry in () if plan is None else plan.nodes:
        labels = (entry.gpu_type, entry.region)
        found[labels] = found.get(labels, 0.0) + entry.desired
    return found


def _pools(view: PlanView, micro_usd: Callable[..., float]) -> dict[Labels, float]:
    """By pool; where engines of one pool differ in size, the highest price of them. Pools of the plan that are
    not short are told of at 0.
    """
    if view.prices is None:
        return {}
    found = dict.fromkeys(_engines(view.plan), 0.0)
    for pool in view.prices.pools:
        labels = (pool.model, pool.gpu_type, pool.role, pool.region)
        usd = micro_usd(pool) / MICRO_USD_PER_USD
        found[labels] = max(found.get(labels, 0.0), usd)
    return found


def _classes(prices: ControlPrices | None) -> dict[Labels, float]:
    if prices is None:
        return {}
    return {(entry.class_id,): entry.bid_micro_usd / MICRO_USD_PER_USD for entry in prices.classes}
