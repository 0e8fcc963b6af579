"""Strategies that keep a workflow on the engine that holds its context: FCFS, a static gate, PLAS, and vLLM's
own priority scheduling with deadlines.
"""

from collections import deque
from collections.abc import Sequence
from math import floor, log2
from typing import Final

from cli.simulate.baselines.placing import Placing, least_loaded
from cli.simulate.contracts import MS_PER_S, Call, EngineView, Fate, Plan

# Autellix: prompts of at most so many tokens go to the least used engine, longer ones stay.
SHORT_PROMPT_TOKENS: Final = 2_048
PLAS_LEVELS: Final = 8


class StickyFcfs(Placing):
    """Later steps go home, first ones to the fewest calls in flight. `spill_calls`: a home that is so many
    calls ahead of the least loaded engine is left; None never leaves it.
    """

    name = "sticky"

    def __init__(self, spill_calls: int | None = None) -> None:
        super().__init__()
        self.spill_calls = spill_calls

    def choose(self, call: Call, engines: Sequence[EngineView]) -> int:
        best = least_loaded(engines)
        home = next((engine for engine in engines if engine.index == call.home), None)
        if home is None:
            return best.index
        is_too_far_ahead = (
            self.spill_calls is not None and home.in_flight - best.in_flight > self.spill_calls
        )
        return best.index if is_too_far_ahead else home.index


class StaticGate(StickyFcfs):
    """Sticky FCFS behind a gate: at most `workflows_per_engine` workflows are under way, others wait in
    the order in which they came.
    """

    name = "static-gate"

    def __init__(self, workflows_per_engine: int) -> None:
        super().__init__()
        self.workflows_per_engine = workflows_per_engine
        self._under_way: set[int] = set()
        self._gate: dict[str, Call] = {}
        self._order: deque[str] = deque()

    @property
    def waiting(self) -> int:
        return super().waiting + len(self._gate)

    def arrived(self, call: Call) -> None:
        if call.plan.number in self._under_way:
            super().arrived(call)
            return
        self._gate[call.id] = call
        self._order.append(call.id)
        self._open()

    def expired(self, call: Call) -> None:
        self._gate.pop(call.id, None)
        super().expired(call)

    def workflow_ended(self, plan: Plan, fate: Fate) -> None:
        del fate
        self._under_way.discard(plan.number)
        self._open()

    def _open(self) -> None:
        most = self.workflows_per_engine * sum(engine.is_accepting for engine in self.floor.engines)
        while self._order and len(self._under_way) < most:
            call = self._gate.pop(self._order.popleft(), None)
            if call is not None:
                self._under_way.add(call.plan.number)
                super().arrived(call)

    def engine_changed(self, engine: int) -> None:
        super().engine_changed(engine)
        self._open()


class PlasSticky(StickyFcfs):
    """Autellix (arXiv 2502.13965): the program that got least service goes first, in doubling levels
    from `quantum_s`; a program that waited more than `beta` times its service goes to the top.
    """

    name = "plas"

    def __init__(self, quantum_s: float, *, moves_short: bool, beta: float = 10.0) -> None:
        super().__init__()
        self.quantum_ms = quantum_s * MS_PER_S
        self.moves_short = moves_short
        self.beta = beta
        self._service_ms: dict[int, float] = {}
        self._wait_ms: dict[int, float] = {}
        self._alone_ms: dict[str, float] = {}

    def choose(self, call: Call, engines: Sequence[EngineView]) -> int:
        if self.moves_short and call.prompt_tokens <= SHORT_PROMPT_TOKENS:
            return least_loaded(engines).index
        return super().choose(call, engines)

    def priority(self, call: Call) -> float:
        service_ms = self._service_ms.get(call.plan.number, 0.0)
        if service_ms < self.quantum_ms:
            return 0.0
        if self._wait_ms.get(call.plan.number, 0.0) >= self.beta * service_ms:
            return 0.0
        return float(min(PLAS_LEVELS - 1, 1 + floor(log2(service_ms / self.quantum_ms))))

    def sending(self, call: Call, engine: int) -> None:
        self._alone_ms[call.id] = self.floor.prefill_ms(call, engine)

    def ended(self, call: Call) -> None:
        prefill_ms = self._alone_ms.pop(call.id, 0.0)
        number = call.plan.number
        waited_ms = max(0.0, call.first_token_ms - call.arrived_ms - prefill_ms)
        served_ms = prefill_ms + call.ended_ms - call.first_token_ms
        self._service_ms[number] = self._service_ms.get(number, 0.0) + served_ms
        self._wait_ms[number] = self._wait_ms.get(number, 0.0) + waited_ms

    def expired(self, call: Call) -> None:
        self._alone_ms.pop(call.id, None)
        super().expired(call)

    def workflow_ended(self, plan: Plan, fate: Fate) -> None:
        del fate
        self._service_ms.pop(plan.number, None)
        self._wait_ms.pop(plan.number, None)


class VllmDeadlines(StickyFcfs):
    """vLLM's `--scheduling-policy priority` with the workflow's deadline as the priority, and its
    `--max-num-seqs` set by the fleet (see `Config.tpot_stretch`). No queue of its own.
    """

    name = "vllm-priority"

    def priority(self, call: Call) -> float:
        return call.deadline_ms
