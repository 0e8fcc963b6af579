"""The live fleet of one replica: fed by agents' reports, and the only writer of engine rows.

Knows what agents say and what this replica took; decides nothing. Every change of a row goes through
the tick log first, so that a past decision can be explained from the rows as they stood. What breakers,
ramps and back-pressure make of it is worked out in `runtime/health.py`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Final

from controlplane.domain.catalog import Catalog, Node, Role, WeightLoad
from controlplane.domain.decision import Placement
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import EngineId, GpuTypeName, ModelName, NodeId, RegionName
from controlplane.domain.outcome import AttemptOutcome
from controlplane.domain.pool import OverrideMode, PoolFacts
from controlplane.domain.request import Request
from controlplane.domain.transfer import Connector, KvSource
from controlplane.reliability.slow_start import ENGINE_RAMP_MS, POOL_RAMP_MS
from controlplane.runtime.call import Address, monotonic_ms, wall_ms
from controlplane.runtime.flows import Flows
from controlplane.runtime.health import EngineHealth, FleetHealth, RegionHealth
from controlplane.runtime.load_times import LoadTimes
from controlplane.scheduler.correction import Correction
from controlplane.scheduler.perf_model import (
    PUBLISHED,
    VLLM,
    engine_rates,
    kv_tokens_on,
    sequences_on,
    uncached_prefill_ms,
)
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from dataplane.protocol.messages import (
    Beat,
    Bye,
    CreditGrant,
    EngineFacts,
    EngineState,
    EngineTelemetry,
    Feature,
    GpuTelemetry,
    Hello,
    Progress,
    Telemetry,
)

log = logging.getLogger(__name__)

SPEEDUP_MIN = 0.01
# The kind of engine that agents report of a vLLM server.
VLLM_KIND = "vllm"

_CONNECTORS = frozenset(Connector)
# Groups of engines among which KV moves; what agents declare beyond that is not paired.
PAIR_KEYS_MAX = 1_024

# A pool as the planner prices it: model, GPU type, GPUs of an engine, role, region.
PoolKey = tuple[ModelName, GpuTypeName, int, Role, RegionName]
# How much of what an engine's next call is worth, and finds there, counts for the usual.
USUAL_GAIN = 0.02
# Calls by model are counted over about this time.
DEMAND_MS = 60_000.0
# An engine wakes from sleep at least this many times faster than it loads, from memory or from disk
# (blog.vllm.ai, 26 Oct 2025: 18 to 200 times).
WAKE_SPEEDUP = 18.0
# KV comes back from the host's memory at four fifths of what PCIe 4.0 x16 carries, for each GPU.
HOST_BYTES_PER_S_PER_GPU = 25e9
# So many drafts of speculative decoding tell what it is worth, and it is taken over when it moved by this.
DRAFTS_MIN = 256
TOKENS_PER_STEP_MOVED_RATIO = 0.05


@dataclass(slots=True)
class EngineEntry:
    """What the replica knows of an engine beside its row.

    Each step of it gives `tokens_per_step` tokens to a sequence, by the drafts it kept since `drafts`
    (how many there were, and how many of their tokens were kept).
    """

    row: EngineRow
    facts: EngineFacts
    address: Address
    health: EngineHealth
    correction: Correction
    progress: Progress | None = None
    tokens_per_step: float = 1.0
    drafts: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class NodeEntry:
    """One agent: its epoch and when it was last heard, in monotonic milliseconds."""

    id: NodeId
    agent_epoch: int
    heard_ms: float
    engines: dict[EngineId, EngineEntry]
    gpus: tuple[GpuTelemetry, ...] = ()


@dataclass(slots=True)
class Demand:
    """Calls that came for a model lately, decayed over DEMAND_MS; `planned_per_s` stands above it."""

    calls: float = 0.0
    at_ms: float = 0.0
    planned_per_s: float | None = None

    def came(self, now_ms: float) -> None:
        self.calls = self.calls * self._kept(now_ms) + 1.0
        self.at_ms = max(self.at_ms, now_ms)

    def per_ms(self, now_ms: float) -> float:
        if self.planned_per_s is not None:
            return self.planned_per_s / 1_000.0
        return self.calls * self._kept(now_ms) / DEMAND_MS

    def _kept(self, now_ms: float) -> float:
        return exp(min(0.0, self.at_ms - now_ms) / DEMAND_MS)


class FleetState:
    """Rows by index, engines by id, nodes by id, and what is eligible for a model."""

    def __init__(
        self,
        prefixes: PrefixIndex,
        ticks: TickLog,
        *,
        engine_ramp_ms: float = ENGINE_RAMP_MS,
        pool_ramp_ms: float = POOL_RAMP_MS,
        wall_ms: Callable[[], float] = wall_ms,
    ) -> None:
        """`wall_ms` is the clock by which agents say when an engine started."""
        self.prefixes = prefixes
        self.ticks = ticks
        self._health = FleetHealth(
            self.rows_for,
            ticks,
            engine_ramp_ms=engine_ramp_ms,
            pool_ramp_ms=pool_ramp_ms,
            wall_ms=wall_ms,
        )
        self.nodes: dict[NodeId, NodeEntry] = {}
        self._catalog: Catalog | None = None
        self._by_model: dict[ModelName, tuple[EngineRow, ...]] = {}
        self._decodes: dict[ModelName, dict[int, EngineRow]] = {}
        self._by_index: dict[int, EngineEntry] = {}
        self._by_id: dict[str, EngineEntry] = {}
        self._free_indexes: list[int] = []
        self._index_next = 0
        self._unknown_nodes: set[str] = set()
        self.flows = Flows(ticks)
        self._demand: dict[ModelName, Demand] = {}
        self._bids: dict[ModelName, float] = {}
        self._kv_prices: Mapping[PoolKey, float] = {}
        self._stretches_max: Mapping[ModelName, float] = {}
        self._pair_keys: dict[tuple[RegionName, str, str, int], int] = {}
        self._load_times = LoadTimes()
        # Called once for each engine that is to be left, with calls of this replica still there: the
        # place of whoever moves them elsewhere.
        self.on_leaving: Callable[[EngineRow], None] | None = None
        # Rows that left the fleet while calls still held their credits.
        self.generation = 0

    # ------------------------------------------------------------ reading

    @property
    def catalog(self) -> Catalog:
        if self._catalog is None:
            msg = "the catalogue is read before the fleet is used"
            raise RuntimeError(msg)
        return self._catalog

    def rows_for(self, model: ModelName) -> tuple[EngineRow, ...]:
        """Every engine that serves `model`, accepting or not; the same tuple until the fleet changes."""
        rows = self._by_model.get(model)
        if rows is None:
            rows = tuple(entry.row for entry in self._by_index.values() if entry.row.model == model)
            self._by_model[model] = rows
        return rows

    def decodes_of_pairs(self, model: ModelName) -> Mapping[int, EngineRow]:
        """Engines, by index, that can fetch from a prefill engine of `model`; kept until the fleet changes."""
        rows = self._decodes.get(model)
        if rows is None:
            all_rows = self.rows_for(model)
            domains = {row.pair_key for row in all_rows if row.role is Role.PREFILL} - {0}
            rows = self._decodes[model] = {
                row.index: row
                for row in all_rows
                if row.role is not Role.PREFILL and row.pair_key in domains
            }
        return rows

    def address_of(self, row: EngineRow) -> Address:
        return self._by_index[row.index].address

    def kv_source_of(self, row: EngineRow) -> KvSource | None:
        """How a prompt's KV is fetched from an engine; None when it hands out none."""
        entry = self._by_index[row.index]
        transfer = entry.facts.transfer
        if transfer is None or transfer.connector not in _CONNECTORS:
            return None
        host = entry.address[0]
        shown = f"[{host}]" if ":" in host else host
        return KvSource(
            connector=Connector(transfer.connector),
            lease_s=transfer.lease_s,
            engine_id=transfer.engine_id,
            bootstrap=f"http://{shown}:{transfer.bootstrap_port}"
            if transfer.bootstrap_port
            else "",
        )

    def row_of(self, engine_id: str) -> EngineRow | None:
        entry = self._by_id.get(engine_id)
        return None if entry is None else entry.row

    def entry_of(self, engine_id: str) -> EngineEntry | None:
        return self._by_id.get(engine_id)

    def epoch_of(self, node_id: str) -> int:
        """The epoch of a node's agent, 0 while it is not known."""
        node = self.nodes.get(NodeId(node_id))
        return 0 if node is None else node.agent_epoch

    def entries_on(self, node_id: str) -> list[EngineEntry]:
        node = self.nodes.get(NodeId(node_id))
        return [] if node is None else list(node.engines.values())

    def entries(self) -> Iterator[EngineEntry]:
        for node in self.nodes.values():
            yield from node.engines.values()

    def region_mask(self, names: tuple[str, ...] | None) -> int:
        """Bits of the named regions, of all when `names` is None."""
        return _mask(self.catalog.regions, names)

    def gpu_mask(self, names: tuple[str, ...] | None) -> int:
        return _mask(tuple(self.catalog.gpu_types), names)

    # ------------------------------------------------------------ health

    def pool(self, model: ModelName, now_ms: float | None = None) -> PoolFacts:
        """The engines of `model` as a whole, at most 100 ms old."""
        return self._health.pool(model, monotonic_ms() if now_ms is None else now_ms)

    def pool_ramp_ratio(self, model: ModelName, now_ms: float | None = None) -> float:
        """1 for a warm pool, 0 for a cold one that has served nothing yet."""
        return self.pool(model, now_ms).ramp_ratio

    def engine_ramp_ratio(self, row: EngineRow, now_ms: float) -> float:
        """The same for one engine: its own ramp or its pool's, whichever allows less."""
        return self._health.ramp_ratio(row, now_ms)

    def use_stretch(self, model: ModelName, tpot_stretch_ratio: float | None) -> None:
        """Bound calls in flight so that TPOT stays within this multiple of an empty engine's.

        None: only credits bound them. The planner may have said less.
        """
        most = self._stretches_max.get(model)
        if most is not None and tpot_stretch_ratio is not None:
            tpot_stretch_ratio = min(tpot_stretch_ratio, most)
        self._health.use_stretch(model, tpot_stretch_ratio)

    def seats_at(self, model: ModelName, tpot_stretch_ratio: float) -> float:
        """Seats of a model's engines, for all replicas together, if they were paced by this stretch."""
        return self._health.seats_at(model, tpot_stretch_ratio)

    def use_stretches_max(self, ratios: Mapping[ModelName, float]) -> None:
        """What the planner found by replay: `use_stretch` goes no further, from its next call on."""
        self._stretches_max = ratios

    def use_kv_prices(self, micro_usd_per_token_s: Mapping[PoolKey, float]) -> None:
        """What a KV token-second is worth in each pool beyond its rent; pools not named are not short."""
        self._kv_prices = micro_usd_per_token_s
        for node in self.nodes.values():
            declared = self.catalog.nodes.get(node.id)
            if declared is None:
                continue
            for entry in node.engines.values():
                row = entry.row
                price = self._make_row(
                    declared, entry.facts, row.index
                ).kv_price_micro_usd_per_token_s
                if price != row.kv_price_micro_usd_per_token_s:
                    self.ticks.before_change(row)
                    row.kv_price_micro_usd_per_token_s = price

    def use_overrides(
        self, overrides: Mapping[str, OverrideMode], now_ms: float | None = None
    ) -> None:
        """Take operators' decisions: `engine:ID` or `pool:MODEL/REGION` to how its breaker is held."""
        self._health.use_overrides(overrides, monotonic_ms() if now_ms is None else now_ms)

    def regions(self) -> list[RegionHealth]:
        """The breakers of pools, by model and region."""
        return self._health.regions()

    # ------------------------------------------------------------ what the planner says

    def use_bid_price(self, model: ModelName, micro_usd: float | None) -> None:
        """What a call that finds no seat is worth in this pool; None: what calls there usually are."""
        if micro_usd is None:
            self._bids.pop(model, None)
            return
        self._bids[model] = micro_usd
        for row in self.rows_for(model):
            if row.bid_micro_usd != micro_usd:
                self.ticks.before_change(row)
                row.bid_micro_usd = micro_usd

    def use_demand(self, model: ModelName, calls_per_s: float | None) -> None:
        """Calls expected of a model, over which warm-ups are spread; None: as many as came lately."""
        self._demand.setdefault(model, Demand()).planned_per_s = calls_per_s

    def use_sleep(self, engine_id: str, sleep_level: int) -> None:
        """An engine sleeps at level 1 or 2 and wakes when it is called, or is awake (0)."""
        row = self.row_of(engine_id)
        if row is None or row.sleep_level == sleep_level:
            return
        self.ticks.before_change(row)
        row.sleep_level = sleep_level
        row.is_warm = sleep_level == 0
        row.warm_up_ms = _warm_up_ms(row, self._by_id[row.engine_id].facts.wake_ms)
        if sleep_level:
            # Whatever the level, its KV is gone.
            self.prefixes.forget(row.index)

    def use_load_times(self, loads: Sequence[WeightLoad]) -> None:
        """What loads were measured to need, the latest first; it stands in for what models declare."""
        self._load_times = LoadTimes.of(loads, self.catalog)
        for node in self.nodes.values():
            declared = self.catalog.nodes.get(node.id)
            for entry in node.engines.values():
                row = entry.row
                if declared is None or row.model not in self.catalog.models:
                    continue
                load_ms = self._load_ms(declared, entry.facts)
                if load_ms != row.load_ms:
                    self.ticks.before_change(row)
                    row.load_ms = load_ms
                    row.warm_up_ms = _warm_up_ms(row, entry.facts.wake_ms)

    def workflow_ended(self, workflow: str) -> None:
        """Its engine need not expect further steps."""
        self.flows.ended(workflow)

    # ------------------------------------------------------------ declarations

    def use_catalog(self, catalog: Catalog) -> None:
        """Take a newer catalogue: rates are computed again, cordoned nodes stop accepting."""
        self._catalog = catalog
        for node in self.nodes.values():
            declared = catalog.nodes.get(node.id)
            for entry in list(node.engines.values()):
                if declared is None:
                    self._drop(node, entry)
                else:
                    self._replace_row(node, declared, entry)
        self._unknown_nodes.clear()
        self._changed()

    # ------------------------------------------------------------ reports of agents

    def hello(self, message: Hello, now_ms: float) -> bool:
        """Take what an agent declares. False when the node is not in the catalogue."""
        declared = self.catalog.nodes.get(NodeId(message.node_id))
        if declared is None:
            if message.node_id not in self._unknown_nodes:
                self._unknown_nodes.add(message.node_id)
                log.warning("unknown_node", extra={"fields": {"node": message.node_id}})
            return False
        node = self.nodes.get(declared.id)
        if node is not None and message.agent_epoch < node.agent_epoch:
            return False
        if node is None:
            node = self.nodes[declared.id] = NodeEntry(declared.id, message.agent_epoch, now_ms, {})
        if message.agent_epoch > node.agent_epoch:
            # Credits of the agent's earlier life are void: it no longer knows that it lent them.
            node.agent_epoch = message.agent_epoch
            for entry in node.engines.values():
                self._void_credits(entry.row)
        node.heard_ms = now_ms
        told = {EngineId(facts.engine_id): facts for facts in message.engines}
        for engine_id, entry in list(node.engines.items()):
            if engine_id not in told:
                self._drop(node, entry)
        for engine_id, facts in told.items():
            known = node.engines.get(engine_id)
            if known is None:
                self._add(node, declared, facts)
            elif known.facts != facts:
                is_restarted = known.facts.started_ms != facts.started_ms
                is_leaving = (
                    facts.state is EngineState.DRAINING
                    and known.facts.state is not EngineState.DRAINING
                )
                has_slept = facts.sleep_level and not known.facts.sleep_level
                known.facts = facts
                self._replace_row(node, declared, known)
                if has_slept and self._is_current(known.row):
                    # Whatever the level, its KV is gone.
                    self.prefixes.forget(known.row.index)
                if is_leaving and self.on_leaving is not None:
                    self.on_leaving(known.row)
                if is_restarted and self._is_current(known.row):
                    self.prefixes.forget(known.row.index)
                    known.health = self._health.joined(known.row, facts)
        self._changed()
        for entry in node.engines.values():
            self._health.declared(entry.row, entry.facts.state, now_ms)
        return True

    def beat(self, message: Beat, now_ms: float) -> bool:
        """Take a sign of life. False when the agent must be asked to introduce itself again."""
        node = self.nodes.get(NodeId(message.node_id))
        if node is None:
            return message.node_id in self._unknown_nodes
        if message.agent_epoch != node.agent_epoch:
            return False
        is_back = node.heard_ms == 0.0
        node.heard_ms = now_ms
        is_known = set(message.engine_states) == set(node.engines)
        for engine_id, state in message.engine_states.items():
            entry = node.engines.get(EngineId(engine_id))
            if entry is None:
                continue
            is_cordoned = engine_id in message.cordoned
            if entry.facts.state is not state or bool(entry.facts.cordon) != is_cordoned:
                is_known = False
            may_accept = not is_cordoned and self._may_accept(node.id, state)
            if self._set_accepting(entry.row, is_accepting=may_accept):
                self._health.declared(entry.row, state, now_ms)
        return is_known and not is_back

    def bye(self, message: Bye) -> None:
        node = self.nodes.get(NodeId(message.node_id))
        if node is None or message.agent_epoch != node.agent_epoch:
            return
        for entry in list(node.engines.values()):
            self._drop(node, entry)
        del self.nodes[node.id]
        self._changed()

    def telemetry(self, message: Telemetry, now_ms: float) -> None:
        node = self.nodes.get(NodeId(message.node_id))
        if node is None or message.agent_epoch != node.agent_epoch:
            return
        node.heard_ms = now_ms
        if message.gpus:
            node.gpus = tuple(message.gpus)
        declared = self.catalog.nodes.get(node.id)
        for report in message.engines:
            entry = node.engines.get(EngineId(report.engine_id))
            if entry is None:
                continue
            row = entry.row
            self._learn_drafts(declared, entry, report)
            kv_tokens_used = _kv_tokens_used(row, report)
            if (row.running, row.waiting, row.kv_tokens_used) == (
                report.running,
                report.waiting,
                kv_tokens_used,
            ):
                continue
            self.ticks.before_change(row)
            row.running = report.running
            row.waiting = report.waiting
            row.kv_tokens_used = kv_tokens_used

    def progress(self, message: Progress) -> bool:
        """Take how far an engine is on its way. False when it is older news or of no known engine."""
        node = self.nodes.get(NodeId(message.node_id))
        if node is None or message.agent_epoch != node.agent_epoch:
            return False
        entry = node.engines.get(EngineId(message.engine_id))
        if entry is None:
            return False
        if entry.progress is not None and (
            entry.progress.agent_epoch == message.agent_epoch
            and entry.progress.sequence >= message.sequence
        ):
            return False
        entry.progress = message
        return True

    def _learn_drafts(
        self, declared: Node | None, entry: EngineEntry, report: EngineTelemetry
    ) -> None:
        """What speculative decoding is worth there: its steps give more tokens than one."""
        if not entry.facts.speculative_tokens or declared is None:
            return
        drafts, accepted = report.drafts, report.draft_tokens_accepted
        if drafts < entry.drafts[0]:
            entry.drafts = (0, 0)
        made, kept = drafts - entry.drafts[0], accepted - entry.drafts[1]
        if made < DRAFTS_MIN:
            return
        entry.drafts = (drafts, accepted)
        tokens = 1.0 + kept / made
        before = entry.tokens_per_step
        if abs(tokens - before) <= TOKENS_PER_STEP_MOVED_RATIO * before:
            return
        entry.tokens_per_step = tokens
        row = entry.row
        fresh = self._make_row(declared, entry.facts, row.index, tokens)
        self.ticks.before_change(row)
        entry.correction.paced_otherwise(fresh.rates, before / tokens)
        row.published = fresh.rates
        row.use_rates(entry.correction.rates())

    def silence(self, now_ms: float, silence_ms_max: float) -> None:
        """Stop sending to nodes not heard for `silence_ms_max`; called only while the bus is connected."""
        for node in self.nodes.values():
            if node.heard_ms and now_ms - node.heard_ms > silence_ms_max:
                node.heard_ms = 0.0
                log.warning("node_silent", extra={"fields": {"node": node.id}})
                for entry in node.engines.values():
                    self._set_accepting(entry.row, is_accepting=False)

    def grace(self, now_ms: float) -> None:
        """Count every node as heard now: after the bus was away, silence says nothing about agents."""
        for node in self.nodes.values():
            node.heard_ms = now_ms

    def unknown_nodes(self) -> list[str]:
        """Nodes whose agents introduced themselves and which nobody declared, by id."""
        return sorted(self._unknown_nodes)

    def heard_since(self, instant_ms: float) -> list[NodeId]:
        return [node.id for node in self.nodes.values() if node.heard_ms >= instant_ms]

    # ------------------------------------------------------------ credits and commitments

    def granted(self, grant: CreditGrant, asked_ms: float) -> bool:
        """Take a grant, valid from when it was asked for. False when it is of another agent epoch."""
        node = self.nodes.get(NodeId(grant.node_id))
        if node is None or grant.agent_epoch != node.agent_epoch:
            return False
        expire_ms = int(asked_ms) + grant.ttl_ms
        for engine_id, (seats, kv_tokens) in grant.holds.items():
            entry = node.engines.get(EngineId(engine_id))
            if entry is None:
                continue
            row = entry.row
            self.ticks.before_change(row)
            row.seats_lent = seats
            row.kv_tokens_lent = kv_tokens
            row.credits_expire_ms = expire_ms
            row.credits_epoch = grant.agent_epoch
            self._health.lent(row, asked_ms)
        return True

    def take(self, request: Request, placement: Placement, now_ms: float | None = None) -> None:
        """Spend the credits of a placement. The caller has just asked `fits` of both rows.

        `now_ms` is by default when the call arrived.
        """
        row = placement.decode
        instant_ms = float(request.arrival_ms) if now_ms is None else now_ms
        self.ticks.before_change(row)
        self._found(row, request, instant_ms)
        row.seats_taken += 1
        row.kv_tokens_taken += placement.kv_tokens
        self._health.dispatched(row, request)
        computed = max(0, request.prompt_tokens - placement.cached_tokens)
        prefill = placement.prefill
        if prefill is not None:
            self.ticks.before_change(prefill)
        self.flows.taken(request, placement, instant_ms)
        if prefill is None:
            row.prefill_tokens_pending += computed
            return
        prefill.seats_taken += 1
        prefill.kv_tokens_taken += request.prompt_tokens
        prefill.prefill_tokens_pending += computed

    def release_decode(self, placement: Placement) -> None:
        self._give_back(placement.decode, placement.kv_tokens)
        self.flows.released(placement)

    def release_prefill(self, request: Request, placement: Placement) -> None:
        if placement.prefill is not None:
            self._give_back(placement.prefill, request.prompt_tokens)
            self.flows.released_prefill(placement)

    def prefill_moved(self, request: Request, before: Placement, after: Placement) -> None:
        """A prompt is computed elsewhere than was decided: on another prefill engine, or by who decodes.

        The credits of the first prefill leg have been given back.
        """
        self.prefilled(request, before)
        computed = max(0, request.prompt_tokens - after.cached_tokens)
        row = after.prefill or after.decode
        self.ticks.before_change(row)
        row.prefill_tokens_pending += computed
        if after.prefill is not None:
            row.seats_taken += 1
            row.kv_tokens_taken += request.prompt_tokens
        self.flows.moved(before, after)

    def prefilled(self, request: Request, placement: Placement) -> None:
        """The prompt of a placement is computed, or never will be: it is no longer pending."""
        row = placement.prefill or placement.decode
        computed = max(0, request.prompt_tokens - placement.cached_tokens)
        self.ticks.before_change(row)
        row.prefill_tokens_pending = max(0, row.prefill_tokens_pending - computed)

    # ------------------------------------------------------------ what serving teaches

    def attempted(
        self,
        row: EngineRow,
        outcome: AttemptOutcome,
        now_ms: float,
        *,
        began_ms: float | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        """How a call of an engine ended, while it still holds its seat.

        `began_ms` is the instant that `began` was told of the same placement; `retry_after_ms` is what
        an engine said that refused.
        """
        if self._is_current(row):
            self._health.attempted(row, outcome, now_ms, began_ms, retry_after_ms)

    def began(self, placement: Placement, now_ms: float) -> None:
        """Calls go to these engines: breakers that are half-open count them as probes."""
        for row in (placement.decode, placement.prefill):
            if row is not None and self._is_current(row):
                self._health.began(row, now_ms)

    def look_again(self, now_ms: float) -> None:
        """Let time pass: breakers try their engines again, ramps go on, restraints end."""
        self._health.look_again(now_ms)
        self.flows.expire(now_ms)
        for entry in self._by_index.values():
            if not entry.row.is_warm:
                self._spread(entry.row, now_ms)

    def first_token(
        self,
        row: EngineRow,
        predicted_ms: float,
        actual_ms: float,
        now_ms: float | None = None,
        *,
        request: Request | None = None,
        cached_tokens: int = 0,
    ) -> None:
        """What a first token teaches of the engine's prefill. Times are milliseconds from the decision.

        `request` and `cached_tokens`, as they were decided on, tell the time of the call's own prompt
        from that of the prompts before it; without them both count as one.
        """
        entry = self._by_index.get(row.index)
        if entry is None or entry.row is not row:
            return
        instant_ms = monotonic_ms() if now_ms is None else now_ms
        self._health.first_token(row, predicted_ms, actual_ms, instant_ms)
        if predicted_ms <= 0.0:
            return
        prompt_ms = predicted_ms - row.prefill_base_ms
        if request is not None:
            prompt_ms = uncached_prefill_ms(request, row, cached_tokens) - row.prefill_base_ms
        queued_ms = max(0.0, predicted_ms - row.prefill_base_ms - prompt_ms)
        # The batch that is there now stands for the one that was there at the decision.
        batch_ms = min(
            queued_ms,
            sequences_on(row) * row.decode_ms_per_seq
            + kv_tokens_on(row) * row.decode_ms_per_kv_token,
        )
        # What was predicted by corrected rates is what it would have been by published ones.
        per_token = entry.correction.first.factors[1]
        entry.correction.first_token(
            max(0.0, prompt_ms) / per_token,
            (queued_ms - batch_ms) / per_token,
            batch_ms,
            actual_ms,
        )
        self._correct(entry)

    def paced(self, row: EngineRow, predicted_ms: float, actual_ms: float) -> None:
        """What the pace of a finished call teaches: milliseconds per token after the first.

        `predicted_ms` was predicted at its decision; the batch that it shared is taken to have been
        half as it was then and half as it is now.
        """
        entry = self._by_index.get(row.index)
        if entry is None or entry.row is not row or predicted_ms <= 0.0:
            return
        sequences, kv_tokens = float(max(1, sequences_on(row))), float(kv_tokens_on(row))
        batch_ms = sequences * row.decode_ms_per_seq + kv_tokens * row.decode_ms_per_kv_token
        then_ms = max(0.0, predicted_ms - row.decode_ms_base)
        ratio = 0.5 * (batch_ms + then_ms) / batch_ms if batch_ms > 0.0 else 1.0
        entry.correction.paced(sequences * ratio, kv_tokens * ratio, actual_ms)
        self._correct(entry)

    def unheld(self, row: EngineRow, request: Request, kept_tokens: int) -> None:
        """A call failed on an engine: of its prompt no more than it had before is believed to be there."""
        if self._is_current(row):
            self.prefixes.unrouted(row.index, request.prefix, request.prefix_tokens, kept_tokens)

    def served(
        self,
        placement: Placement,
        session: str,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int | None,
    ) -> None:
        """A call has ended well on these engines, which counted its tokens: 0, or None, where they did not.

        `cached_tokens` are those of the engine that computed the prompt.
        """
        first, decode = placement.prefill or placement.decode, placement.decode
        served = self.prefixes.served
        if first is not decode and self._is_current(first):
            served(first.index, session, prompt_tokens, 0)
        if self._is_current(decode):
            cached = cached_tokens if first is decode else None
            served(decode.index, session, prompt_tokens, completion_tokens, cached)

    def reused(
        self,
        placement: Placement,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        completion_tokens: int,
    ) -> None:
        """What an engine told of a call that has ended: how much of the prompt it had, and how long the
        answer was, which takes room in the KV cache of the engine that gave it.
        """
        first, decode = placement.prefill or placement.decode, placement.decode
        if self._is_current(first):
            self.prefixes.observed(
                first.index,
                predicted_tokens=placement.cached_tokens,
                cached_tokens=cached_tokens,
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens if first is decode else 0,
            )
        if first is not decode and self._is_current(decode):
            self.prefixes.observed(
                decode.index,
                predicted_tokens=0,
                cached_tokens=0,
                prompt_tokens=0,
                completion_tokens=completion_tokens,
            )

    # ------------------------------------------------------------ inside

    def _found(self, row: EngineRow, request: Request, now_ms: float) -> None:
        """What the call is worth and how full it found the engine, whose change is being logged."""
        seats = min(row.seats_lent, row.seats_bound)
        full = min(1.0, row.seats_taken / seats) if seats > 0 else 1.0
        row.offered_ratio += USUAL_GAIN * (full - row.offered_ratio)
        if row.model not in self._bids:
            worth = request.weight * request.value_micro_usd
            is_first = row.bid_micro_usd == 0.0
            row.bid_micro_usd += (1.0 if is_first else USUAL_GAIN) * (worth - row.bid_micro_usd)
        demand = self._demand.get(row.model)
        if demand is None:
            demand = self._demand[row.model] = Demand()
        demand.came(now_ms)

    def _spread(self, row: EngineRow, now_ms: float) -> None:
        """Calls that share a warm-up: those of its engine for as long as the warm-up takes.

        An engine that was started is kept at least until it has cost as much again (ski rental), so that
        many calls follow for certain; the model's calls are spread over the engines that serve it.
        """
        demand = self._demand.get(row.model)
        engines = 1 + sum(peer.is_accepting and peer.is_warm for peer in self.rows_for(row.model))
        per_ms = 0.0 if demand is None else demand.per_ms(now_ms)
        calls = max(1.0, per_ms * row.warm_up_ms / engines)
        if abs(calls - row.calls_per_load) > USUAL_GAIN * row.calls_per_load:
            self.ticks.before_change(row)
            row.calls_per_load = calls

    def _give_back(self, row: EngineRow, kv_tokens: int) -> None:
        self.ticks.before_change(row)
        row.seats_taken -= 1
        row.kv_tokens_taken -= kv_tokens
        if row.seats_taken < 0 or row.kv_tokens_taken < 0:
            msg = f"credits of {row.engine_id} were released twice"
            raise RuntimeError(msg)

    def _correct(self, entry: EngineEntry) -> None:
        self.ticks.before_change(entry.row)
        entry.row.use_rates(entry.correction.rates())

    def _is_current(self, row: EngineRow) -> bool:
        """The row has not left the fleet while a call held it."""
        entry = self._by_index.get(row.index)
        return entry is not None and entry.row is row

    def _may_accept(self, node_id: NodeId, state: EngineState) -> bool:
        declared = self.catalog.nodes.get(node_id)
        return declared is not None and not declared.is_cordoned and state is EngineState.SERVING

    def _set_accepting(self, row: EngineRow, *, is_accepting: bool) -> bool:
        """Whether it accepts now and did not before."""
        has_begun = is_accepting and not row.is_accepting
        if row.is_accepting != is_accepting or row.is_warm != is_accepting:
            self.ticks.before_change(row)
            row.is_accepting = is_accepting
            if is_accepting:
                row.is_warm = row.sleep_level == 0
        return has_begun

    def _void_credits(self, row: EngineRow) -> None:
        self.ticks.before_change(row)
        row.seats_lent = 0
        row.kv_tokens_lent = 0
        row.credits_expire_ms = 0

    def _add(self, node: NodeEntry, declared: Node, facts: EngineFacts) -> None:
        if ModelName(facts.model) not in self.catalog.models:
            log.warning(
                "unknown_model", extra={"fields": {"engine": facts.engine_id, "model": facts.model}}
            )
            return
        if self._free_indexes:
            index = self._free_indexes.pop()
        else:
            index = self._index_next
            self._index_next += 1
        row = self._make_row(declared, facts, index)
        self._hold_prefixes(row, facts)
        health = self._health.joined(row, facts)
        entry = EngineEntry(row, facts, _address(declared, facts), health, Correction(row.rates))
        node.engines[row.engine_id] = entry
        self._by_index[index] = entry
        self._by_id[row.engine_id] = entry

    def _drop(self, node: NodeEntry, entry: EngineEntry) -> None:
        row = entry.row
        self._set_accepting(row, is_accepting=False)
        self._void_credits(row)
        del node.engines[row.engine_id]
        del self._by_index[row.index]
        if self._by_id.get(row.engine_id) is entry:
            del self._by_id[row.engine_id]
        self._health.left(row)
        self.prefixes.forget(row.index)
        self._free_indexes.append(row.index)
        self._changed()

    def _replace_row(self, node: NodeEntry, declared: Node, entry: EngineEntry) -> None:
        """Recompute the rates in place: calls in flight hold the row and give back to it."""
        if ModelName(entry.facts.model) not in self.catalog.models:
            self._drop(node, entry)
            return
        fresh = self._make_row(declared, entry.facts, entry.row.index, entry.tokens_per_step)
        row = entry.row
        self.ticks.before_change(row)
        if (row.model, row.gpu_type) != (fresh.model, fresh.gpu_type):
            entry.correction = Correction(fresh.rates)
        for name in _DECLARED_FIELDS:
            setattr(row, name, getattr(fresh, name))
        # What was learned of the hardware holds for its rates as they are published now.
        entry.correction.published = row.published = fresh.rates
        row.use_rates(entry.correction.rates())
        # An engine tells its capacity when it is ready.
        self._hold_prefixes(row, entry.facts)
        entry.address = _address(declared, entry.facts)

    def _hold_prefixes(self, row: EngineRow, facts: EngineFacts) -> None:
        """What of prompts the engine can keep: on its GPUs, and for longer in the host's memory."""
        if Feature.PREFIX_CACHE in facts.lacks:
            self.prefixes.set_capacity(row.index, 0)
            return
        per_token = self.catalog.models[row.model].kv_bytes_per_token
        host_tokens = facts.kv_host_bytes // per_token
        if not host_tokens:
            self.prefixes.set_capacity(row.index, row.kv_tokens_capacity)
            return
        fetch_ms = per_token * 1000.0 / (HOST_BYTES_PER_S_PER_GPU * max(1, facts.gpus))
        saved = 1.0 - fetch_ms * max(facts.speedup, SPEEDUP_MIN) ** -1 / row.prefill_ms_per_token
        self.prefixes.set_capacity(
            row.index, row.kv_tokens_capacity, host_tokens, min(1.0, max(0.0, saved))
        )

    def _make_row(
        self, declared: Node, facts: EngineFacts, index: int, tokens_per_step: float = 1.0
    ) -> EngineRow:
        catalog = self.catalog
        model = catalog.models[ModelName(facts.model)]
        coefficients = VLLM if facts.kind == VLLM_KIND else PUBLISHED
        rates = engine_rates(
            model,
            catalog.gpu_types[declared.gpu_type],
            facts.gpus,
            coefficients,
            max(1, facts.pipeline),
            facts.expert_gpus,
        )
        # A step that verifies drafts computes each of them, and gives those that are kept at once.
        drafted = 1 + facts.speculative_tokens if tokens_per_step > 1.0 else 1
        # A simulated engine does in a millisecond what its hardware does in `speed` of them, and costs
        # as much for it.
        speed = max(facts.speedup, SPEEDUP_MIN)
        # One that has not been ready yet does not know its capacity: it will hold one context at least.
        context_tokens_max = facts.context_tokens_max or model.context_tokens_max
        row = EngineRow(
            index=index,
            engine_id=EngineId(facts.engine_id),
            node_id=declared.id,
            region=declared.region,
            region_bit=_mask(catalog.regions, (declared.region,)),
            gpu_type=declared.gpu_type,
            gpu_bit=_mask(tuple(catalog.gpu_types), (declared.gpu_type,)),
            model=model.name,
            role=Role(facts.role),
            context_tokens_max=context_tokens_max,
            kv_tokens_capacity=facts.kv_tokens or context_tokens_max,
            seats_capacity=facts.seats,
            micro_usd_per_ms=rates.micro_usd_per_ms * speed,
            prefill_base_ms=rates.prefill_base_ms / speed,
            prefill_ms_per_token=rates.prefill_ms_per_token / speed,
            prefill_ms_per_token_sq=rates.prefill_ms_per_token_sq / speed,
            decode_ms_base=rates.decode_ms_base / speed / tokens_per_step,
            decode_ms_per_seq=rates.decode_ms_per_seq * drafted / speed / tokens_per_step,
            decode_ms_per_kv_token=rates.decode_ms_per_kv_token / speed / tokens_per_step,
            kv_price_micro_usd_per_token_s=rates.kv_price_micro_usd_per_token_s * speed
            + self._kv_prices.get(
                (model.name, declared.gpu_type, facts.gpus, Role(facts.role), declared.region), 0.0
            ),
            pair_key=self._pair_key(declared, facts),
            load_ms=self._load_ms(declared, facts),
            adapter_slots=facts.adapter_slots,
            lacks=frozenset(facts.lacks),
        )
        row.adapters = frozenset(facts.adapters)
        row.sleep_level = facts.sleep_level
        row.warm_up_ms = _warm_up_ms(row, facts.wake_ms)
        row.bid_micro_usd = self._bids.get(model.name, 0.0)
        row.generation = facts.started_ms
        row.is_accepting = not facts.cordon and self._may_accept(declared.id, facts.state)
        # What is closed on purpose will not serve after a warm-up either.
        is_closed = bool(facts.cordon) or declared.is_cordoned
        row.is_warm = is_closed or facts.state not in _COLD
        return row

    def _pair_key(self, declared: Node, facts: EngineFacts) -> int:
        """A number for the engines among which KV can move; 0 for an engine that moves none.

        GPU types may differ: what connectors can not match they refuse when engines meet, and then compute.
        """
        transfer = facts.transfer
        if transfer is None or transfer.connector not in _CONNECTORS:
            return 0
        # Stored prompts are found by their tokens up to a whole block, so the block is part of their name.
        is_stored = transfer.connector == Connector.SHARED_FOLDER
        block_tokens = facts.block_tokens if is_stored else 0
        key = (declared.region, transfer.connector, transfer.domain, block_tokens)
        if key not in self._pair_keys and len(self._pair_keys) >= PAIR_KEYS_MAX:
            return 0
        return self._pair_keys.setdefault(key, len(self._pair_keys) + 1)

    def _load_ms(self, declared: Node, facts: EngineFacts) -> int:
        """What a load of this engine takes: as measured there, else on nodes like it, else as declared.

        A measured time is one of the wall clock, whatever speed the engine simulates.
        """
        model = self.catalog.models[ModelName(facts.model)]
        measured = self._load_times.of_engine(model.name, facts.gpus, declared)
        if measured is not None:
            return measured
        return int(model.load_ms / max(facts.speedup, SPEEDUP_MIN))

    def _changed(self) -> None:
        self._by_model.clear()
        self._decodes.clear()
        self.generation += 1


_DECLARED_FIELDS = (
    "region", "region_bit", "gpu_type", "gpu_bit", "model", "role", "context_tokens_max", "kv_tokens_capacity",
    "seats_capacity", "micro_usd_per_ms", "prefill_base_ms", "prefill_ms_per_token", "prefill_ms_per_token_sq",
    "decode_ms_base", "decode_ms_per_seq", "decode_ms_per_kv_token", "kv_price_micro_usd_per_token_s", "load_ms",
    "warm_up_ms", "generation", "is_accepting", "is_warm", "pair_key", "sleep_level", "adapter_slots",
    "adapters", "lacks",
)  # fmt: skip


# States in which an engine could serve after a load or a waking, and can not now.
_COLD: Final = (EngineState.STARTING, EngineState.SLEEPING)


def _warm_up_ms(row: EngineRow, wake_ms: int = 0) -> int:
    """Until a cold engine answers: a load, or a waking, and the shortest answer to warm its kernels.

    `wake_ms` is what its latest waking took, 0 when it has not slept before.
    """
    until_ready_ms = float(row.load_ms)
    if row.sleep_level:
        until_ready_ms = float(wake_ms) if wake_ms else row.load_ms / WAKE_SPEEDUP
    return int(until_ready_ms + row.prefill_base_ms + row.decode_ms_base)


def _address(declared: Node, facts: EngineFacts) -> Address:
    if facts.rank < 0:
        return (declared.address, facts.port)
    return (declared.address, facts.port, b"x-data-parallel-rank: %d\r\n" % facts.rank)


def _kv_tokens_used(row: EngineRow, report: EngineTelemetry) -> int:
    """What calls hold of the KV cache: as reported, else a seat's part of it for each call there.

    Unknown use is not zero, and what this replica took is only its own.
    """
    if report.kv_used_ratio is not None:
        return int(report.kv_used_ratio * row.kv_tokens_capacity)
    seats = max(1, row.seats_capacity)
    return min(report.running, seats) * row.kv_tokens_capacity // seats


def _mask(known: tuple[str, ...], names: tuple[str, ...] | None) -> int:
    return sum(1 << bit for bit, name in enumerate(known) if names is None or name in names)
