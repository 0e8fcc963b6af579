"""Sums of flows in the rows against an oracle that adds up everything anew after every step."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from controlplane.domain.decision import Placement
from controlplane.runtime.flows import Flows
from controlplane.scheduler.tick_log import TickLog
from tests.decision_builders import NOW_MS, call, engine_row
from tests.examples import MACHINE_S_MAX, machine_examples

pytestmark = pytest.mark.timeout(MACHINE_S_MAX)

GAP_MS = 10_000
CALL_MS = 1_000.0
SILENCE_MS = 50_000
ENGINES = 3
WORKFLOWS = ("v", "w")


class FlowsAgainstSums(RuleBasedStateMachine):
    """`lives` is where each workflow is and until when it stays; `running` are the calls that hold seats."""

    @initialize()
    def begin(self):
        self.rows = [engine_row(index) for index in range(ENGINES)]
        self.flows = Flows(TickLog())
        self.now_ms = NOW_MS
        self.running = []
        self.lives = {}
        self.number = 0

    def placement(self, engine):
        return Placement(self.rows[engine], None, 0, 1_100, 100.0, CALL_MS, 1.0)

    @rule(engine=st.integers(0, ENGINES - 1), weight=st.sampled_from([1.0, 4.0]))
    def lone_call(self, engine, weight):
        self.number += 1
        request = call(id=f"req-{self.number}", weight=weight, arrival_ms=self.now_ms)
        request = replace(
            request,
            deadline_ms=self.now_ms + 60_000,
            workflow_deadline_ms=self.now_ms + 60_000,
        )
        self.take(request, engine, weight * 5_000 / 60, 1.0)

    @rule(
        engine=st.integers(0, ENGINES - 1),
        workflow=st.sampled_from(WORKFLOWS),
        is_last=st.booleans(),
    )
    def step(self, engine, workflow, is_last):
        self.number += 1
        request = call(
            id=f"req-{self.number}",
            workflow=workflow,
            step=2 if is_last else 1,
            steps_expected=3,
            step_gap_ms=0 if is_last else GAP_MS,
            workflow_deadline_ms=self.now_ms + 500_000,
        )
        left_s = 500 if is_last else 490
        duty = 1.0 if is_last else CALL_MS / (CALL_MS + GAP_MS)
        self.take(request, engine, 5_000 / left_s, duty)

    def take(self, request, engine, urgency, duty):
        placement = self.placement(engine)
        key = request.workflow or request.id
        running = sum(each[1] == key for each in self.running)
        self.lives[key] = {
            "engine": engine,
            "urgency": urgency * duty,
            # 0.1 ms a sequence, and 1,050 tokens of 0.0001 ms.
            "step_ms": 0.205 * duty,
            "until_ms": self.now_ms + CALL_MS + (SILENCE_MS if request.step_gap_ms else 30_000),
            "running": running + 1,
        }
        self.running.append((placement, key, request.workflow is None or not request.step_gap_ms))
        self.flows.taken(request, placement, self.now_ms)

    @rule(data=st.data())
    def release(self, data):
        if not self.running:
            return
        at = data.draw(st.integers(0, len(self.running) - 1))
        placement, key, ends = self.running.pop(at)
        self.flows.released(placement)
        life = self.lives.get(key)
        if life is not None:
            life["running"] = sum(each[1] == key for each in self.running)
            if ends and not life["running"]:
                del self.lives[key]

    @rule(workflow=st.sampled_from(WORKFLOWS))
    def end(self, workflow):
        # As the gate does: a workflow ends when none of its calls runs.
        if not any(each[1] == workflow for each in self.running):
            self.flows.ended(workflow)
            self.lives.pop(workflow, None)

    @rule(passed_ms=st.sampled_from([1_000, 20_000, 60_000]))
    def wait(self, passed_ms):
        self.now_ms += passed_ms
        self.flows.expire(self.now_ms)
        self.lives = {
            key: life
            for key, life in self.lives.items()
            if life["running"] or life["until_ms"] > self.now_ms
        }

    @invariant()
    def rows_hold_the_sums(self):
        if not hasattr(self, "rows"):
            return
        assert len(self.flows) == len(self.lives)
        for index, row in enumerate(self.rows):
            here = [life for life in self.lives.values() if life["engine"] == index]
            assert row.flows_micro_usd_per_s == pytest.approx(
                sum(life["urgency"] for life in here), abs=1e-6
            )
            assert row.flows_ms_per_step == pytest.approx(
                sum(life["step_ms"] for life in here), abs=1e-9
            )
            if not here:
                assert (row.flows_micro_usd_per_s, row.flows_ms_per_step) == (0.0, 0.0)


TestFlowsAgainstSums = FlowsAgainstSums.TestCase
TestFlowsAgainstSums.settings = settings(
    max_examples=machine_examples(300), stateful_step_count=25, deadline=None
)


def test_a_prompt_in_the_making_counts_on_its_own_engine_until_it_is_made():
    flows = Flows(TickLog())
    prefill, decode = engine_row(0), engine_row(1)
    placement = Placement(decode, prefill, 0, 1_100, 100.0, 1_000.0, 1.0)
    flows.taken(call(), placement, NOW_MS)
    assert prefill.flows_micro_usd_per_s == pytest.approx(5_000 / 60)
    assert decode.flows_micro_usd_per_s == pytest.approx(5_000 / 60)
    flows.released_prefill(placement)
    flows.released_prefill(placement)
    assert prefill.flows_micro_usd_per_s == 0.0
    flows.released(placement)
    assert decode.flows_micro_usd_per_s == 0.0
