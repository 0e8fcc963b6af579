"""The live fleet of one replica: fed by agents' reports, and the only writer of engine rows.

Knows what agents say and what this replica took; decides nothing. Every change of a row goes through
the tick log first, so that a past decision can be explained from the rows as they stood. What breakers,
ramps and back-pressure make of it is worked out in `runtime/health.py`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from controlplane.domain.catalog import Catalog, Node, Role
from controlplane.domain.decision import Placement
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import EngineId, ModelName, NodeId
from controlplane.domain.outcome import AttemptOutcome
from controlplane.domain.pool import OverrideMode, PoolFacts
from controlplane.domain.request import Request
from controlplane.reliability.slow_start import ENGINE_RAMP_MS, POOL_RAMP_MS
from controlplane.runtime.call import Address, monotonic_ms, wall_ms
from controlplane.runtime.health import EngineHealth, FleetHealth, RegionHealth
from controlplane.scheduler.perf_model import engine_rates
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from dataplane.protocol.messages import (
    Beat,
    Bye,
    CreditGrant,
    EngineFacts,
    EngineState,
    Hello,
    Telemetry,
)

log = logging.getLogger(__name__)

TTFT_CORRECTION_MIN = 0.25
TTFT_CORRECTION_MAX = 4.0
TTFT_CORRECTION_GAIN = 0.1
SPEEDUP_MIN = 0.01


@dataclass(slots=True)
class EngineEntry:
    """What the replica knows of an engine beside its row."""

    row: EngineRow
    facts: EngineFacts
    address: Address
    health: EngineHealth


@dataclass(slots=True)
class NodeEntry:
    """One agent: its epoch and when it was last heard, in monotonic milliseconds."""

    id: NodeId
    agent_epoch: int
    heard_ms: float
    engines: dict[EngineId, EngineEntry]


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
        self._by_index: dict[int, EngineEntry] = {}
        self._by_id: dict[str, EngineEntry] = {}
        self._free_indexes: list[int] = []
        self._index_next = 0
        self._unknown_nodes: set[str] = set()
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

    def address_of(self, row: EngineRow) -> Address:
        return self._by_index[row.index].address

    def row_of(self, engine_id: str) -> EngineRow | None:
        entry = self._by_id.get(engine_id)
        return None if entry is None else entry.row

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

    def use_stretch(self, model: ModelName, tpot_stretch_ratio: float | None) -> None:
        """Bound calls in flight so that TPOT stays within this multiple of an empty engine's.

        None: only credits bound them.
        """
        self._health.use_stretch(model, tpot_stretch_ratio)

    def use_overrides(
        self, overrides: Mapping[str, OverrideMode], now_ms: float | None = None
    ) -> None:
        """Take operators' decisions: `engine:ID` or `pool:MODEL/REGION` to how its breaker is held."""
        self._health.use_overrides(overrides, monotonic_ms() if now_ms is None else now_ms)

    def regions(self) -> list[RegionHealth]:
        """The breakers of pools, by model and region."""
        return self._health.regions()

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
                known.facts = facts
                self._replace_row(node, declared, known)
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
            if entry.facts.state is not state:
                is_known = False
            if self._set_accepting(entry.row, is_accepting=self._may_accept(node.id, state)):
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
        for report in message.engines:
            entry = node.engines.get(EngineId(report.engine_id))
            if entry is None:
                continue
            row = entry.row
            kv_tokens_used = int(report.kv_used_ratio * row.kv_tokens_capacity)
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

    def take(self, request: Request, placement: Placement) -> None:
        """Spend the credits of a placement. The caller has just asked `fits` of both rows."""
        row = placement.decode
        self.ticks.before_change(row)
        row.seats_taken += 1
        row.kv_tokens_taken += placement.kv_tokens
        self._health.dispatched(row, request)
        computed = max(0, request.prompt_tokens - placement.cached_tokens)
        prefill = placement.prefill
        if prefill is None:
            row.prefill_tokens_pending += computed
            return
        self.ticks.before_change(prefill)
        prefill.seats_taken += 1
        prefill.kv_tokens_taken += request.prompt_tokens
        prefill.prefill_tokens_pending += computed

    def release_decode(self, placement: Placement) -> None:
        self._give_back(placement.decode, placement.kv_tokens)

    def release_prefill(self, request: Request, placement: Placement) -> None:
        if placement.prefill is not None:
            self._give_back(placement.prefill, request.prompt_tokens)

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

    def first_token(
        self, row: EngineRow, predicted_ms: float, actual_ms: float, now_ms: float | None = None
    ) -> None:
        """Correct the row's TTFT prediction towards what was measured, within bounds."""
        if self._is_current(row):
            instant_ms = monotonic_ms() if now_ms is None else now_ms
            self._health.first_token(row, predicted_ms, actual_ms, instant_ms)
        if predicted_ms <= 0:
            return
        ratio = row.ttft_correction * actual_ms / predicted_ms
        corrected = row.ttft_correction + TTFT_CORRECTION_GAIN * (ratio - row.ttft_correction)
        self.ticks.before_change(row)
        row.ttft_correction = min(TTFT_CORRECTION_MAX, max(TTFT_CORRECTION_MIN, corrected))

    # ------------------------------------------------------------ inside

    def _give_back(self, row: EngineRow, kv_tokens: int) -> None:
        self.ticks.before_change(row)
        row.seats_taken -= 1
        row.kv_tokens_taken -= kv_tokens
        if row.seats_taken < 0 or row.kv_tokens_taken < 0:
            msg = f"credits of {row.engine_id} were released twice"
            raise RuntimeError(msg)

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
                row.is_warm = True
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
        self.prefixes.set_capacity(index, row.kv_tokens_capacity)
        health = self._health.joined(row, facts)
        entry = EngineEntry(row, facts, (declared.address, facts.port), health)
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
        fresh = self._make_row(declared, entry.facts, entry.row.index)
        row = entry.row
        self.ticks.before_change(row)
        for name in _DECLARED_FIELDS:
            setattr(row, name, getattr(fresh, name))
        # An engine tells its capacity when it is ready.
        self.prefixes.set_capacity(row.index, row.kv_tokens_capacity)
        entry.address = (declared.address, entry.facts.port)

    def _make_row(self, declared: Node, facts: EngineFacts, index: int) -> EngineRow:
        catalog = self.catalog
        model = catalog.models[ModelName(facts.model)]
        rates = engine_rates(model, catalog.gpu_types[declared.gpu_type], facts.gpus)
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
            decode_ms_base=rates.decode_ms_base / speed,
            decode_ms_per_seq=rates.decode_ms_per_seq / speed,
            decode_ms_per_kv_token=rates.decode_ms_per_kv_token / speed,
            kv_price_micro_usd_per_token_s=rates.kv_price_micro_usd_per_token_s * speed,
            load_ms=int(model.load_ms / speed),
        )
        row.generation = facts.started_ms
        row.is_accepting = self._may_accept(declared.id, facts.state)
        row.is_warm = facts.state is not EngineState.STARTING
        return row

    def _changed(self) -> None:
        self._by_model.clear()
        self.generation += 1


_DECLARED_FIELDS = (
    "region", "region_bit", "gpu_type", "gpu_bit", "model", "role", "context_tokens_max", "kv_tokens_capacity",
    "seats_capacity", "micro_usd_per_ms", "prefill_base_ms", "prefill_ms_per_token", "prefill_ms_per_token_sq",
    "decode_ms_base", "decode_ms_per_seq", "decode_ms_per_kv_token", "kv_price_micro_usd_per_token_s", "load_ms",
    "generation", "is_accepting", "is_warm",
)  # fmt: skip


def _mask(known: tuple[str, ...], names: tuple[str, ...] | None) -> int:
    return sum(1 << bit for bit, name in enumerate(known) if names is None or name in names)
