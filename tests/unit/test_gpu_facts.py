"""What the agent makes of NVML's numbers and errors, over a stand-in for the library."""

import pynvml
import pytest

from dataplane.agent.gpu_facts import FATAL_XIDS, GpuFacts, cordon_of, uses
from dataplane.protocol.messages import EngineSpec
from tests.unit import nvml_stand_in
from tests.unit.nvml_stand_in import NvmlStandIn, StandInGpu

XID, DOUBLE_BIT = 8, 2


def spec(visible: str = "") -> EngineSpec:
    options = {"visible_devices": visible} if visible else {}
    return EngineSpec(engine_id="e", kind="vllm", model="m", role="both", gpus=1, options=options)


def opened(library: NvmlStandIn) -> GpuFacts:
    facts = GpuFacts(library)
    facts.open()
    return facts


def two() -> NvmlStandIn:
    return NvmlStandIn([StandInGpu("GPU-a"), StandInGpu("GPU-b", ecc=None)])


def test_the_stand_in_has_only_what_the_library_has() -> None:
    calls = [name for name in vars(NvmlStandIn) if name.lower().startswith("nvml")]
    assert len(calls) > 15
    for name in calls:
        assert hasattr(pynvml, name), name
        value = getattr(NvmlStandIn, name)
        if isinstance(value, int):
            assert value == getattr(pynvml, name), name
    assert issubclass(pynvml.NVMLError_Timeout, pynvml.NVMLError)
    assert issubclass(nvml_stand_in.NVMLError_Timeout, nvml_stand_in.NVMLError)


def test_no_driver_is_fine() -> None:
    facts = opened(NvmlStandIn([], has_driver=False))
    facts.read()
    assert (facts.count, facts.now(), facts.wait(), facts.faults()) == (0, [], False, [])
    facts.close()


def test_the_real_library_without_a_driver_is_fine_too() -> None:
    facts = GpuFacts.find()
    assert len(facts.now()) == facts.count
    facts.close()


def test_numbers_are_read() -> None:
    library = two()
    facts = opened(library)
    library.gpus[0].used, library.gpus[0].load, library.gpus[0].temperature = 5_000, 25, 71
    facts.read()
    first, second = facts.now()
    assert (first.index, first.uuid, first.name) == (0, "GPU-a", "Stand-in 80GB")
    assert (first.memory_used_bytes, first.memory_total_bytes) == (5_000, 80_000)
    assert (first.utilisation_ratio, first.temperature_c) == (0.25, 71)
    # A GPU without ECC counts none.
    assert (second.ecc_uncorrected, second.fault) == (0, "")
    facts.close()
    assert not library.is_open


@pytest.mark.parametrize("xid", sorted(FATAL_XIDS))
def test_a_fatal_xid_is_a_fault_of_its_gpu_only(xid: int) -> None:
    library = two()
    facts = opened(library)
    library.events.append((library.gpus[1], XID, xid))
    assert facts.wait()
    assert [(gpu.index, gpu.xid) for gpu in facts.faults()] == [(1, xid)]
    assert f"Xid {xid}" in facts.faults()[0].fault


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 94])
def test_an_error_of_the_application_or_one_that_was_contained_is_told_and_no_fault(
    xid: int,
) -> None:
    library = two()
    facts = opened(library)
    library.events.append((library.gpus[0], XID, xid))
    assert facts.wait()
    assert (facts.now()[0].xid, facts.faults()) == (xid, [])


def test_memory_errors_count_from_the_begin_of_the_watch_and_anew_after_forgiveness() -> None:
    library = NvmlStandIn([StandInGpu("GPU-a", ecc=7)])
    facts = opened(library)
    facts.read()
    assert facts.faults() == []
    library.gpus[0].ecc = 8
    facts.read()
    assert "1 uncorrectable" in facts.faults()[0].fault
    facts.forgive(spec("0"))
    facts.read()
    assert facts.faults() == []
    library.events.append((library.gpus[0], DOUBLE_BIT, 0))
    assert facts.wait()
    assert len(facts.faults()) == 1


def test_a_gpu_that_has_fallen_off_the_bus_is_found_though_it_can_not_name_itself() -> None:
    library = two()
    facts = opened(library)
    library.gpus[1].is_lost = True
    library.events.append((library.gpus[1], XID, 79))
    assert facts.wait()
    assert [gpu.index for gpu in facts.faults()] == [1]
    facts.read()
    assert [gpu.index for gpu in facts.faults()] == [1]


def test_a_fault_keeps_engines_on_that_gpu_from_work() -> None:
    library = two()
    facts = opened(library)
    library.events.append((library.gpus[1], XID, 79))
    facts.wait()
    faults = facts.faults()
    assert cordon_of(spec("0"), faults) == ""
    assert "GPU 1: Xid 79" in cordon_of(spec("1"), faults)
    assert cordon_of(spec("GPU-b"), faults)
    assert cordon_of(spec("0, 1"), faults)
    # An engine that does not say where it runs may run anywhere.
    assert cordon_of(spec(), faults)
    assert not uses(spec("11"), faults[0])
