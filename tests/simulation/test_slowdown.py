"""All engines of a fleet take twice as long for a minute: what is refused meanwhile, and how soon all is well again.

The workload and the fleet of the overload benchmark, in virtual time, with the live decision code.
"""

from dataclasses import dataclass, replace

import pytest

from cli.simulate import contracts, fleets, world
from cli.simulate.headway import Headway, HeadwayOptions
from controlplane.domain.catalog import Scope
from tests.benchmarks.overload import fleet as lab
from tests.benchmarks.overload import workload
from tests.benchmarks.overload.scenarios import HALVED_LOAD, LOAD_1_RATE

SLOW_FROM_S = 40.0
SLOW_UNTIL_S = 100.0
UNTIL_S = 130.0
WARM_UP_S = 12.0
# What arrives this long before the fleet slows down has mostly ended by then.
TYPICAL_S = 12.0
RECOVERY_S = 10.0
GOLD, BRONZE = 9, 2


def plan_of(planned: workload.Plan) -> contracts.Plan:
    """The same workflow for the simulated world, where a pause follows a step."""
    steps = []
    context = planned.kind.prefix_tokens
    pauses = [step.gap_s for step in planned.steps[1:]] + [0.0]
    for step, pause_s in zip(planned.steps, pauses, strict=True):
        new = step.prompt_tokens_new + workload.MESSAGE_TOKENS
        steps.append(contracts.Step(new, context, step.answer_tokens, pause_s))
        context += new + step.answer_tokens + workload.MESSAGE_TOKENS
    tier = planned.tier
    return contracts.Plan(
        number=planned.number,
        tenant=tier.tenant,
        workflow_class=planned.kind.name,
        arrival_s=planned.arrival_s,
        steps=tuple(steps),
        deadline_s=planned.deadline_s,
        model=lab.MODEL,
        tenant_class=tier.tenant_class,
        priority=GOLD if tier.is_high else BRONZE,
        weight=4.0 if tier.is_high else 1.0,
        scope=Scope(planned.kind.scope),
        prefix=f"{tier.tenant}-{planned.kind.name}",
        prefix_tokens=planned.kind.prefix_tokens,
        ttft_s_max=3.0,
        tpot_s_max=0.3,
        value_usd=0.04 if tier.is_high else 0.01,
    )


@dataclass(frozen=True)
class Run:
    """Whether each workflow succeeded, by when it came."""

    ended: list[tuple[contracts.Plan, bool]]

    def succeeded(self, since_s: float, until_s: float, *, is_high: bool = False) -> float:
        """Share of those that came in this time."""
        found = [
            is_well
            for plan, is_well in self.ended
            if since_s <= plan.arrival_s < until_s and (not is_high or plan.priority == GOLD)
        ]
        return sum(found) / len(found)


class Watched(Headway):
    """Keeps how workflows ended, those included that load refused."""

    def __init__(self) -> None:
        super().__init__(HeadwayOptions())
        self.ended_plans: list[tuple[contracts.Plan, bool]] = []

    def workflow_ended(self, plan: contracts.Plan, fate: contracts.Fate) -> None:
        self.ended_plans.append((plan, fate is contracts.Fate.SUCCEEDED))
        super().workflow_ended(plan, fate)


def played(seed: int) -> Run:
    base = fleets.from_document("lab", lab.document(workload.TENANTS))
    engines = tuple(
        replace(engine, kv_tokens=lab.KV_TOKENS, seats=lab.ENGINE_SEATS) for engine in base.engines
    )
    faults = tuple(
        contracts.SlowEngine(at_s=SLOW_FROM_S, until_s=SLOW_UNTIL_S, engine=engine, factor=2.0)
        for engine in range(len(engines))
    )
    planned = workload.plans(
        seed=seed,
        times=lab.engine_times(),
        rate=LOAD_1_RATE * HALVED_LOAD,
        until_s=UNTIL_S,
        deadlines=workload.DeadlineModel.KIND,
    )
    headway = Watched()
    world.play(
        [plan_of(each) for each in planned],
        replace(base, engines=engines),
        headway,
        contracts.WorldOptions(seed=seed, horizon_s=UNTIL_S, warm_up_s=WARM_UP_S, faults=faults),
    )
    return Run(headway.ended_plans)


@pytest.mark.timeout(180)
def test_a_fleet_that_was_slow_for_a_minute_is_well_within_ten_seconds():
    runs = [played(seed) for seed in (2, 3, 4)]
    for run in runs:
        before = run.succeeded(WARM_UP_S, SLOW_FROM_S - TYPICAL_S)
        later = run.succeeded(SLOW_UNTIL_S + RECOVERY_S, UNTIL_S)
        assert later >= 0.95 * before
    # Meanwhile half of the work can be done, and what is worth most is kept for longest.
    high = [run.succeeded(SLOW_FROM_S, SLOW_UNTIL_S, is_high=True) for run in runs]
    every = [run.succeeded(SLOW_FROM_S, SLOW_UNTIL_S) for run in runs]
    assert sum(high) / len(high) >= 0.75
    assert sum(every) / len(every) >= 0.3
