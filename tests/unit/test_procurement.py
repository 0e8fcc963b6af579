"""The curve that a purchase is planned from, against a sum by hand."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from controlplane.domain.catalog import Catalog, GpuType, Model, Role, Scope, SloClass
from controlplane.domain.ids import GpuTypeName, ModelName, RegionName
from controlplane.runtime.demand import SLOT_S, Sizes, Slot
from controlplane.runtime.procurement import HOURS_MAX, demand_curve
from controlplane.scheduler.planner.loads import STRETCH_RATIO_DEFAULT, Load, load_of
from controlplane.scheduler.planner.problem import Demand, pool_kind
from controlplane.store.demand import ClassKey
from policies.evaluate import Policy, compile_policy
from policies.load import bundle_of, files_of

START = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)
FAST, SLOW = GpuTypeName("fast"), GpuTypeName("slow")
MODEL = ModelName("m")


def _gpu(name: GpuTypeName, factor: float, price: int) -> GpuType:
    return GpuType(
        name=name, hbm_bytes=80 * 10**9, bandwidth_bytes_per_s=3e12 * factor,
        flops_per_s=9e14 * factor, price_micro_usd_per_hour=price, price_source="t",
        price_date="2026-11-01",
    )  # fmt: skip


@pytest.fixture(scope="module")
def policy() -> Policy:
    return compile_policy(bundle_of(files_of(None)))


@pytest.fixture
def catalog() -> Catalog:
    return Catalog(
        revision=1,
        regions=(RegionName("eu"),),
        gpu_types={FAST: _gpu(FAST, 1.0, 3_000_000), SLOW: _gpu(SLOW, 0.25, 1_000_000)},
        models={
            MODEL: Model(
                name=MODEL, parameters=8 * 10**9, layers=32, hidden_size=4096,
                weights_bytes=16 * 10**9, kv_bytes_per_token=131_072, context_tokens_max=32_768,
                load_ms=1_000, price_prompt_micro_usd_per_mtok=1,
                price_cached_micro_usd_per_mtok=1, price_completion_micro_usd_per_mtok=1,
            )
        },
        slo_classes={
            "s": SloClass(
                name="s", ttft_ms_max=1, tpot_ms_max=1, e2e_ms_max=1, value_micro_usd=1,
                late_micro_usd_per_s=1,
            )
        },
        nodes={},
    )  # fmt: skip


def slot(number: int, workflows: float, scope: Scope = Scope.CHAT, **needs: Any) -> Slot:
    return Slot(
        key=ClassKey(model=MODEL, tenant_class="gold", scope=scope),
        slo_class="s",
        started_at=START + timedelta(seconds=number * SLOT_S),
        workflows=workflows,
        needs=Sizes(
            **{
                "steps": 2.0, "uncached_tokens": 500.0, "context_tokens": 1_000.0,
                "completion_tokens": 100.0, "gap_s": 0.0, "deadline_s": 1_000.0, **needs,
            }
        ),
    )  # fmt: skip


def loads(catalog: Catalog, gpu: GpuTypeName) -> list[tuple[int, Load]]:
    """GPUs and load of a workflow as `slot` makes it, at each size of an engine."""
    demand = Demand(
        class_id="c", model=MODEL, arrivals_per_s_now=1.0, arrivals_per_s_forecast=1.0, steps=2.0,
        uncached_tokens=500.0, context_tokens=1_000.0, completion_tokens=100.0, value_micro_usd=1.0,
    )  # fmt: skip
    return [
        (gpus, load_of(demand, kind, STRETCH_RATIO_DEFAULT))
        for gpus in (1, 2, 4, 8)
        if (kind := pool_kind(catalog.models[MODEL], catalog.gpu_types[gpu], gpus, Role.BOTH))
    ]


def gpu_s(catalog: Catalog, gpu: GpuTypeName) -> float:
    return min(gpus * load.gpu_ms / 1000.0 for gpus, load in loads(catalog, gpu))


def test_an_hour_counts_as_its_busiest_quarter(catalog: Catalog, policy: Policy) -> None:
    slots = [slot(0, 900.0), slot(1, 90.0), slot(2, 450.0), slot(9, 1_800.0)]
    curve = demand_curve(slots, catalog, policy, {})
    assert curve is not None
    # Both types can do it all; the one that costs less is the unit.
    assert curve.unit == SLOW
    one = gpu_s(catalog, SLOW)
    assert curve.work == pytest.approx([900.0 / 900 * one, 0.0, 1_800.0 / 900 * one])
    assert curve.started_at == START
    assert curve.work_per_gpu[SLOW] == pytest.approx(1.0)
    assert curve.work_per_gpu[FAST] == pytest.approx(one / gpu_s(catalog, FAST))
    assert (curve.classes, curve.classes_left_out) == (1, 0)


def test_a_type_that_is_late_for_some_work_is_not_offered_for_any(
    catalog: Catalog, policy: Policy
) -> None:
    fast, slow = (min(load.finish_s for _, load in loads(catalog, gpu)) for gpu in (FAST, SLOW))
    assert fast < slow
    tight = slot(0, 9.0, Scope.RESEARCH, deadline_s=(fast + slow) / 2.0)
    curve = demand_curve([slot(0, 900.0), tight], catalog, policy, {})
    assert curve is not None
    assert (curve.unit, set(curve.work_per_gpu)) == (FAST, {FAST})
    # What nothing can do in time is left out, and said to be.
    hopeless = slot(0, 900.0, Scope.RESEARCH, deadline_s=0.001)
    curve = demand_curve([slot(0, 900.0), hopeless], catalog, policy, {})
    assert curve is not None
    assert (curve.unit, curve.classes, curve.classes_left_out) == (SLOW, 1, 1)
    assert demand_curve([hopeless], catalog, policy, {}) is None
    assert demand_curve([], catalog, policy, {}) is None


def test_simulated_engines_that_run_faster_take_less(catalog: Catalog, policy: Policy) -> None:
    real = demand_curve([slot(0, 900.0)], catalog, policy, {})
    fast = demand_curve([slot(0, 900.0)], catalog, policy, {FAST: 20.0})
    assert real is not None
    assert fast is not None
    assert fast.work[0] == pytest.approx(real.work[0] / 20.0)


def test_a_curve_is_no_longer_than_a_programme_takes(catalog: Catalog, policy: Policy) -> None:
    curve = demand_curve([slot(0, 5.0), slot(4 * (HOURS_MAX + 50), 900.0)], catalog, policy, {})
    assert curve is not None
    assert len(curve.work) == HOURS_MAX
    assert curve.work[-1] > 0
    assert sum(curve.work[:-1]) == 0
