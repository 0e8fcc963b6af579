"""EDF with true sizes: a reference that no live policy can be, for it knows what is left of every workflow.

A central queue in the order of the latest start that still makes the deadline, a bound on calls in flight
per engine, sticky engines, and nothing spent on what can not finish in time even alone. Not an upper bound.
"""

import heapq
from dataclasses import replace
from math import ceil

from cli.simulate.bounds import isolated_s
from cli.simulate.contracts import MS_PER_S, Call, EngineView, Pushes, Step

# With fewer calls in flight an engine's batches do not pay.
CALLS_MIN = 2


class EdfTrueSizes(Pushes):
    """`tpot_stretch` bounds the calls of an engine so that a token takes at most so many times as long as
    on an empty engine. `slack_order`: by deadline less what is left, else by the deadline alone.
    """

    name = "edf-true-sizes"

    def __init__(self, tpot_stretch: float, *, slack_order: bool = True) -> None:
        self.tpot_stretch = tpot_stretch
        self.slack_order = slack_order
        self._queue: list[tuple[float, int, Call]] = []
        self._here: dict[str, int] = {}
        self._number = 0
        self._prompts: dict[int, dict[str, int]] = {}

    @property
    def waiting(self) -> int:
        return len(self._here)

    def arrived(self, call: Call) -> None:
        left_ms = self._left_ms(call)
        if self.floor.now_ms + left_ms > call.deadline_ms and call.step_number == 0:
            self.floor.refuse(call, None, is_final=True)
            return
        self._number += 1
        order = call.deadline_ms - (left_ms if self.slack_order else 0.0)
        self._here[call.id] = self._number
        heapq.heappush(self._queue, (order, self._number, call))
        self._dispatch()

    def _left_ms(self, call: Call) -> float:
        """What the rest of the workflow takes alone, from this step on, on the fastest engine."""
        rest = replace(call.plan, steps=_rest(call))
        specs = {
            id(engine.rates): engine.spec for engine in self.floor.engines if engine.is_accepting
        }
        return min((isolated_s(rest, spec) for spec in specs.values()), default=0.0) * MS_PER_S

    def _bound(self, engine: EngineView) -> int:
        prompts = self._prompts.get(engine.index, {})
        context = sum(prompts.values()) / len(prompts) if prompts else 0.0
        rates = engine.rates
        each_ms = rates.decode_ms_per_seq + rates.decode_ms_per_kv_token * context
        stretch_ms = (self.tpot_stretch - 1.0) * rates.decode_ms_base
        return max(CALLS_MIN, min(engine.spec.seats, ceil(stretch_ms / each_ms)))

    def _dispatch(self) -> None:
        kept: list[tuple[float, int, Call]] = []
        free = {
            engine.index: self._bound(engine) - engine.in_flight
            for engine in self.floor.engines
            if engine.is_accepting
        }
        room = sum(max(0, seats) for seats in free.values())
        while self._queue and room > 0:
            entry = heapq.heappop(self._queue)
            _, number, call = entry
            if self._here.get(call.id) != number:
                continue
            engine = self._engine(call, free)
            if engine is None:
                kept.append(entry)
                continue
            del self._here[call.id]
            free[engine] -= 1
            room -= 1
            self._prompts.setdefault(engine, {})[call.id] = call.prompt_tokens
            self.floor.send(call, engine, call.deadline_ms)
        for entry in kept:
            heapq.heappush(self._queue, entry)

    def _engine(self, call: Call, free: dict[int, int]) -> int | None:
        if call.home in free and self.floor.can_take(call, call.home):
            return call.home if free[call.home] > 0 else None
        able = [
            index for index, seats in free.items() if seats > 0 and self.floor.can_take(call, index)
        ]
        return min(
            able,
            key=lambda index: (self.floor.engines[index].in_flight, index),
            default=None,
        )

    def _left(self, call: Call) -> None:
        self._prompts.get(call.engine, {}).pop(call.id, None)
        self._dispatch()

    def ended(self, call: Call) -> None:
        self._left(call)

    def failed(self, call: Call) -> None:
        for prompts in self._prompts.values():
            prompts.pop(call.id, None)
        self.arrived(call)

    def expired(self, call: Call) -> None:
        self._here.pop(call.id, None)
        self._left(call)

    def engine_changed(self, engine: int) -> None:
        del engine
        self._dispatch()

    def tick(self, now_ms: float) -> None:
        del now_ms
        self._dispatch()


def _rest(call: Call) -> tuple[Step, ...]:
    """The calls that come from this one on in its chain, then in those that wait for it."""
    chain, steps = call.chain, call.chain.steps[call.place :]
    while chain.parent is not None:
        chain = chain.parent
        steps += chain.steps[chain.place + 1 :]
    return steps
