"""What agents tell of their machines in the live fleet: cordons, sleep, loads, GPUs, progress."""

import msgspec
import pytest

from controlplane.domain.catalog import Catalog, Node, WeightLoad
from controlplane.domain.decision import Reason
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import GpuTypeName, ModelName, NodeId, RegionName
from controlplane.runtime.credits import in_use, wanted
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.gauges import watch_machines
from controlplane.runtime.load_times import LoadTimes
from controlplane.scheduler.place import object_to
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from controlplane.telemetry.metrics import Metrics
from dataplane.protocol.messages import (
    Beat,
    CreditRequest,
    EngineState,
    GpuTelemetry,
    Hello,
    Phase,
    Progress,
    Telemetry,
    decode,
)
from tests.unit.test_runtime_fleet_state import NOW, catalog, facts, grant, hello, request

SMALL = ModelName("small")


@pytest.fixture
def fleet() -> FleetState:
    state = FleetState(PrefixIndex(), TickLog())
    state.use_catalog(catalog())
    assert state.hello(hello(facts()), NOW)
    assert state.granted(grant(), NOW)
    return state


def only(fleet: FleetState) -> EngineRow:
    [row] = fleet.rows_for(SMALL)
    return row


def told(fleet: FleetState, **changes: object) -> None:
    assert fleet.hello(hello(msgspec.structs.replace(facts(), **changes)), NOW)


def reason(fleet: FleetState) -> Reason:
    return object_to(request(), fleet.rows_for(SMALL), {}, int(NOW)).reason


def test_a_cordoned_engine_takes_nothing_and_gives_its_credits_back(fleet: FleetState) -> None:
    row = only(fleet)
    row.seats_taken, row.kv_tokens_taken = 1, 300
    assert wanted(row, is_contended=False) == (4, 5_300)
    assert in_use(row) == (4, 10_000)
    told(fleet, cordon="by command")
    assert not row.is_accepting
    # What was lent and is not in use is given back, and nothing is asked for, however many wait.
    assert wanted(row, is_contended=True) == (1, 300)
    assert in_use(row) == (1, 300)
    assert reason(fleet) is Reason.NO_CAPACITY
    told(fleet, cordon="")
    assert row.is_accepting


def test_a_beat_alone_cordons_and_asks_for_the_hello_that_was_lost(fleet: FleetState) -> None:
    def beat(*cordoned: str) -> bool:
        states = {"e1": EngineState.SERVING}
        message = Beat(node_id="n1", agent_epoch=1, engine_states=states, cordoned=list(cordoned))
        return fleet.beat(message, NOW)

    assert beat()
    assert not beat("e1")
    assert not only(fleet).is_accepting
    told(fleet, cordon="crash loop")
    assert beat("e1")
    assert not only(fleet).is_accepting
    assert not beat(), "the cordon has ended, and that hello was lost"


def test_a_sleeping_engine_is_warm_in_part(fleet: FleetState) -> None:
    row = only(fleet)
    load_ms = row.warm_up_ms
    assert row.load_ms == 1_000
    told(fleet, state=EngineState.SLEEPING, sleep_level=1)
    assert (row.is_accepting, row.is_warm, row.sleep_level) == (False, False, 1)
    assert 0 < row.warm_up_ms < load_ms / 10
    assert reason(fleet) is Reason.WARMING
    assert fleet.pool(SMALL, NOW + 500).warm_in_ms > 0
    # What its latest waking took is believed over what is usual.
    told(fleet, state=EngineState.SLEEPING, sleep_level=1, wake_ms=400)
    assert 400 <= row.warm_up_ms < 500
    told(fleet, wake_ms=400)
    assert (row.is_accepting, row.is_warm, row.sleep_level) == (True, True, 0)


def test_sleep_drops_what_was_known_of_its_cache(fleet: FleetState) -> None:
    row = only(fleet)
    fleet.prefixes.routed(row.index, (11, 22), 2_000)
    told(fleet, wake_ms=5)
    assert fleet.prefixes.cached((11, 22), (1_000, 2_000), 9_000) == {row.index: 2_000}
    told(fleet, state=EngineState.SLEEPING, sleep_level=2)
    assert fleet.prefixes.cached((11, 22), (1_000, 2_000), 9_000) == {}


def test_an_engine_to_be_left_is_announced_once(fleet: FleetState) -> None:
    left: list[str] = []
    fleet.on_leaving = lambda row: left.append(row.engine_id)
    told(fleet, state=EngineState.DRAINING)
    told(fleet, state=EngineState.DRAINING, wake_ms=1)
    assert left == ["e1"]


def load(node: str, load_ms: int, started_ms: int, medium: str = "disk") -> WeightLoad:
    return WeightLoad(
        model=SMALL, node_id=NodeId(node), gpus=1, medium=medium, load_ms=load_ms, loads=1,
        started_ms=started_ms,
    )  # fmt: skip


def more_nodes(*names: str) -> Catalog:
    whole = catalog()
    nodes = {
        NodeId(name): Node(
            id=NodeId(name), region=RegionName("us"), gpu_type=GpuTypeName("h100"), gpus=2,
            address="10.0.0.9", is_cordoned=False,
        )
        for name in names
    }  # fmt: skip
    return Catalog(
        revision=2, regions=whole.regions, gpu_types=whole.gpu_types, models=whole.models,
        slo_classes=whole.slo_classes, nodes={**whole.nodes, **nodes},
    )  # fmt: skip


def test_measured_loads_stand_in_for_declared_ones(fleet: FleetState) -> None:
    row = only(fleet)
    warm_up_ms = row.warm_up_ms
    fleet.use_load_times([load("n1", 7_000, 9, "page_cache"), load("n1", 60_000, 5)])
    # The medium of the latest load is expected again.
    assert (row.load_ms, row.warm_up_ms) == (7_000, warm_up_ms + 6_000)
    # A new declaration does not bring the old number back.
    told(fleet, wake_ms=1)
    assert row.load_ms == 7_000


def test_a_node_that_never_loaded_the_model_is_like_those_of_its_kind() -> None:
    times = LoadTimes.of(
        [load("n2", 10_000, 9), load("n3", 30_000, 8), load("n4", 20_000, 7), load("n2", 99, 1)],
        more_nodes("n2", "n3", "n4"),
    )
    nodes = more_nodes("n2", "n3", "n4").nodes
    assert times.of_engine(SMALL, 1, nodes[NodeId("n2")]) == 10_000
    assert times.of_engine(SMALL, 1, nodes[NodeId("n1")]) == 20_000
    assert times.of_engine(SMALL, 2, nodes[NodeId("n1")]) is None
    assert times.of_engine(ModelName("other"), 1, nodes[NodeId("n1")]) is None


def test_progress_is_taken_in_order_and_of_this_life_only(fleet: FleetState) -> None:
    def progress(sequence: int, epoch: int = 1, engine: str = "e1") -> bool:
        return fleet.progress(
            Progress(
                node_id="n1", agent_epoch=epoch, sequence=sequence, engine_id=engine,
                phase=Phase.LOADING,
            )
        )  # fmt: skip

    assert progress(2)
    assert not progress(2)
    assert not progress(1)
    assert not progress(3, epoch=9)
    assert not progress(3, engine="e9")
    assert progress(3)
    [entry] = fleet.entries()
    assert entry.progress is not None
    assert entry.progress.sequence == 3


def gpu(index: int, fault: str = "") -> GpuTelemetry:
    return GpuTelemetry(
        index=index, uuid=f"GPU-{index}", name="H100", memory_used_bytes=40, memory_total_bytes=80,
        utilisation_ratio=0.5, temperature_c=65, ecc_uncorrected=2, xid=79 if fault else 0,
        fault=fault,
    )  # fmt: skip


def test_gpus_are_seen_and_counted(fleet: FleetState) -> None:
    metrics = Metrics()
    watch_machines(metrics, fleet)
    fleet.telemetry(
        Telemetry(node_id="n1", agent_epoch=1, engines=[], gpus=[gpu(0), gpu(1, "lost")]), NOW
    )
    fleet.telemetry(Telemetry(node_id="n1", agent_epoch=1, engines=[]), NOW)
    assert [one.index for one in fleet.nodes[NodeId("n1")].gpus] == [0, 1]
    assert metrics.gpu_at_fault.value(("n1", "1")) == 1.0
    assert metrics.gpu_at_fault.value(("n1", "0")) == 0.0
    assert metrics.gpu_memory_used.value(("n1", "0")) == 40.0
    assert metrics.gpu_temperature.value(("n1", "0")) == 65.0
    told(fleet, cordon="x", load_ms=2_500)
    assert metrics.engine_cordoned.value(("e1", "small", "us")) == 1.0
    assert metrics.engine_load_seconds.value(("e1", "small", "us")) == 2.5


def test_messages_without_the_further_members_are_understood() -> None:
    beat = b'{"v":1,"node_id":"n1","agent_epoch":1,"engine_states":{"e1":"serving"}}'
    assert decode(beat, Beat).cordoned == []
    asked = b'{"v":1,"replica_id":"r1","wants":{"e1":[1,2]}}'
    assert decode(asked, CreditRequest).closed == []
    members = msgspec.to_builtins(hello(facts()))
    for name in ("cordon", "sleep_level", "wake_ms", "load_ms", "load_medium", "capabilities"):
        del members["engines"][0][name]
    assert decode(msgspec.json.encode(members), Hello) == hello(facts())
