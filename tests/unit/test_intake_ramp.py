"""While a cold pool is warmed up the lowest priorities yield to all others, and are not refused."""

from typing import Any

from controlplane.domain.catalog import Principal, Tenant
from controlplane.domain.ids import KeyId, SloClassName, TenantId
from controlplane.reliability.slow_start import POOL_RAMP_MS
from controlplane.runtime.call import Call, monotonic_ms
from controlplane.runtime.estimates import Estimates
from controlplane.runtime.intake import Intake, Prepared
from controlplane.runtime.workflow_state import WorkflowStates
from controlplane.store.session import make_engine
from policies.evaluate import compile_policy
from policies.load import load_bundle
from tests.unit.test_reliability_fleet import NEW_MS, OK, World

# Priorities of the shipped bundle: 9, 5, and 2, which yields.
CLASSES = ("gold", "silver", "bronze")


def call(tenant_class: str, **changes: Any) -> Call:
    tenant = Tenant(
        id=TenantId("t"), name="T", tenant_class=tenant_class, slo_class=SloClassName("s"),
        is_disabled=False, cache_salt="",
    )  # fmt: skip
    fields: dict[str, Any] = {
        "principal": Principal(key_id=KeyId("k"), tenant=tenant), "endpoint": "chat",
        "model": "small", "is_stream": False, "prompt_bytes": 40, "prefix_bytes": b"hi",
        "tools_digest": 0, "completion_tokens_max": 8, "n": 1, "workflow": None, "step": None,
        "session": None, "deadline_ms": 60_000, "completion_tokens_hint": None,
        "priority_hint": None, "client_retries": 0, "is_single_engine": False,
        "received_ms": monotonic_ms(),
    }  # fmt: skip
    return Call(**(fields | changes))


async def asked(world: World) -> dict[str, tuple[bool, bool]]:
    """By class: whether the call waits for idle room, and whether for ever."""
    policy = compile_policy(load_bundle(None))
    engine = make_engine("postgresql://nobody@127.0.0.1:9/nothing")
    intake = Intake(
        replica_id="r", fleet=world.fleet, workflows=WorkflowStates(engine),
        estimates=Estimates(), policy_for=lambda _: policy, ruled=lambda *_: None,
    )  # fmt: skip
    found = {}
    for name in CLASSES:
        prepared = await intake.prepare(call(name))
        assert isinstance(prepared, Prepared)
        assert prepared.refuse is None
        ticket = prepared.ticket
        now_ms = monotonic_ms()
        is_for_ever = not now_ms < ticket.idle_until_ms <= now_ms + POOL_RAMP_MS
        found[name] = (ticket.request.waits_for_idle, is_for_ever)
    await engine.dispose()
    return found


async def test_the_lowest_class_waits_for_idle_room_until_the_pool_is_warm() -> None:
    # The intake reads this process's clock.
    world = World(2, started_ms=NEW_MS, now_ms=monotonic_ms())
    held_back = {"gold": (False, True), "silver": (False, True), "bronze": (True, False)}
    assert await asked(world) == held_back, "cold"
    world.end(world.begin("e0"), OK)
    world.pass_ms(0)
    assert await asked(world) == held_back, "proved, and ramped up"
    world.fleet.look_again(world.now_ms + 2 * POOL_RAMP_MS)
    assert await asked(world) == dict.fromkeys(CLASSES, (False, True)), "warm"
