"""A pool under overload in virtual time: seats, workflows of several steps, clients that come back when told.

Runs the real `PoolLoad` and the real queue; an engine is a seat that a call holds for a drawn time.
`python -m tests.simulation.overload` prints the table; `NAME=value` sets a constant of the load's modules for one run.
"""

import heapq
import sys
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from controlplane.admission import appointments, commitments
from controlplane.admission import load as loads
from controlplane.admission.load import PoolLoad, Room
from controlplane.admission.queue import Answer, Waiting, WaitingQueue
from tests.decision_builders import call

TTFT_MS = 2_000
CALL_MS = 1_000.0
GAP_MS = 1_500
RETRIES_MAX = 2
WARM_UP_MS = 15_000
TICK_MS = 250


@dataclass
class Workflow:
    number: int
    is_high: bool
    steps: int
    deadline_ms: int
    step: int = 0
    tries: int = 0
    is_told_when: bool = False
    seat_ms: float = 0.0


@dataclass
class Result:
    """Workflows by whether they are of high priority; times of seats in milliseconds."""

    seconds: int
    started: Counter = field(default_factory=Counter)
    succeeded: Counter = field(default_factory=Counter)
    late: Counter = field(default_factory=Counter)
    refused: int = 0
    told: int = 0
    kept: int = 0
    wasted_ms: float = 0.0
    used_ms: float = 0.0
    finished_at_ms: list = field(default_factory=list)

    def success_ratio(self, *, is_high):
        return self.succeeded[is_high] / max(1, self.started[is_high])

    @property
    def finished_per_s(self):
        return self.finished_between(WARM_UP_MS, self.seconds * 1_000)

    def finished_between(self, from_ms, to_ms):
        return (
            sum(from_ms <= at_ms < to_ms for at_ms in self.finished_at_ms) / (to_ms - from_ms) * 1e3
        )

    @property
    def wasted_ratio(self):
        return self.wasted_ms / max(1.0, self.used_ms)

    @property
    def late_ratio(self):
        return self.late.total() / max(1, self.refused)

    @property
    def kept_ratio(self):
        return self.kept / max(1, self.told)

    def __str__(self):
        return (
            f"high {self.success_ratio(is_high=True):.3f} low {self.success_ratio(is_high=False):.3f}"
            f" finished {self.finished_per_s:.2f}/s wasted {self.wasted_ratio:.3f}"
            f" late/refused {self.late_ratio:.3f} kept {self.kept}/{self.told}"
        )


class World:
    """`load` is the work offered per seat; `is_gated` False lets everybody in and serves by arrival.

    `halved` are the milliseconds (from, to) in which half of the seats are away.
    """

    def __init__(
        self, seed, *, seats=16, load=2.0, seconds=120, high_ratio=0.3, is_gated=True, slack=3.0, steps=(3, 9),
        knows_steps=True, halved=None,
    ):  # fmt: skip
        self.random = Random(seed)
        self.seats_max = self.seats = seats
        self.load, self.seconds, self.high_ratio = load, seconds, high_ratio
        self.is_gated, self.slack, self.steps, self.knows_steps = (
            is_gated,
            slack,
            steps,
            knows_steps,
        )
        self.halved = halved
        self.pool = PoolLoad(2.5)
        self.events = []
        self.queue = WaitingQueue(100_000, order="deadline" if is_gated else "arrival")
        self.busy = self.sequence = self.now_ms = 0
        self.result = Result(seconds)

    def at(self, when_ms, act, *arguments):
        self.sequence += 1
        heapq.heappush(self.events, (when_ms, self.sequence, act, arguments))

    def run(self):
        rate = self.load * self.seats_max / (CALL_MS * sum(self.steps) / 2)
        when_ms, number = 0.0, 0
        while when_ms < self.seconds * 1_000:
            when_ms += self.random.expovariate(rate)
            number += 1
            self.at(when_ms, self.arrive, number)
        for tick_ms in range(0, self.seconds * 2_000, TICK_MS):
            self.at(tick_ms, self.tick)
        while self.events:
            self.now_ms, _, act, arguments = heapq.heappop(self.events)
            act(*arguments)
        return self.result

    def request(self, workflow):
        return call(
            id=f"r{workflow.number}-{workflow.step}-{workflow.tries}", arrival_ms=int(self.now_ms),
            tenant="high" if workflow.is_high else "low", workflow=f"w{workflow.number}",
            step=workflow.step, is_begun=workflow.step > 0,
            steps_expected=workflow.steps if self.knows_steps else sum(self.steps) // 2,
            deadline_ms=workflow.deadline_ms, workflow_deadline_ms=workflow.deadline_ms,
            priority=9 if workflow.is_high else 2, weight=4.0 if workflow.is_high else 1.0,
            ttft_ms_max=TTFT_MS, step_gap_ms=GAP_MS, completion_tokens_expected=100,
        )  # fmt: skip

    def room(self):
        return Room(self.seats, CALL_MS, self.busy / self.seats)

    def tick(self):
        is_halved = self.halved is not None and self.halved[0] <= self.now_ms < self.halved[1]
        self.seats = self.seats_max // 2 if is_halved else self.seats_max
        self.pool.tick(int(self.now_ms), 1.5, 2.5)
        oldest_ms = self.queue.oldest_wait_ms("m", int(self.now_ms))
        if oldest_ms:
            self.pool.levels.waited(oldest_ms, TTFT_MS)
        self.dispatch()

    def arrive(self, number):
        steps = self.random.randint(*self.steps)
        alone_ms = steps * CALL_MS + (steps - 1) * GAP_MS
        is_high = self.random.random() < self.high_ratio
        workflow = Workflow(number, is_high, steps, int(self.now_ms + self.slack * alone_ms))
        self.result.started[is_high] += 1
        self.ask(workflow)

    def ask(self, workflow):
        if self.now_ms > workflow.deadline_ms:
            self.end(workflow)
            return
        request = self.request(workflow)
        if self.is_gated and workflow.step:
            self.pool.continues(request, self.room(), int(self.now_ms))
        elif self.is_gated and self.is_refused(workflow, request):
            return
        self.queue.enter(Waiting(request, workflow, 1), int(self.now_ms))
        self.dispatch()

    def is_refused(self, workflow, request):
        refusal = self.pool.may_begin(request, self.room(), int(self.now_ms))
        self.result.kept += workflow.is_told_when and refusal is None
        workflow.is_told_when = False
        if refusal is None:
            return False
        self.result.refused += 1
        workflow.tries += 1
        if not refusal.is_final and workflow.tries <= RETRIES_MAX:
            workflow.is_told_when = True
            self.result.told += 1
            self.at(self.now_ms + refusal.retry_after_ms, self.ask, workflow)
        return True

    def dispatch(self):
        now_ms = int(self.now_ms)
        for item in self.queue.expire(now_ms):
            self.end(item.ticket)
        free = self.seats - self.busy

        def ask(_):
            nonlocal free
            free -= 1
            return Answer.GOES if free >= 0 else Answer.POOL_FULL

        for item in self.queue.dispatch(ask, 64, now_ms) if free > 0 else ():
            workflow = item.ticket
            self.pool.levels.waited(self.now_ms - item.request.arrival_ms, TTFT_MS)
            self.busy += 1
            held_ms = CALL_MS * self.random.uniform(0.4, 1.6)
            workflow.seat_ms += held_ms
            self.result.used_ms += held_ms
            self.at(self.now_ms + held_ms, self.finish, workflow, held_ms)

    def finish(self, workflow, held_ms):
        self.busy -= 1
        if self.is_gated:
            request = self.request(workflow)
            self.pool.seat_time.learn(request, held_ms)
            self.pool.step_ended(request, self.room(), int(self.now_ms))
        workflow.step += 1
        if workflow.step == workflow.steps:
            self.end(workflow)
        else:
            self.at(self.now_ms + GAP_MS * self.random.uniform(0.2, 1.8), self.ask, workflow)
        self.dispatch()

    def end(self, workflow):
        is_in_time = workflow.step == workflow.steps and self.now_ms <= workflow.deadline_ms
        if is_in_time:
            self.result.succeeded[workflow.is_high] += 1
            self.result.finished_at_ms.append(self.now_ms)
        else:
            self.result.wasted_ms += workflow.seat_ms
            self.result.late[workflow.is_high] += 1
        if self.is_gated:
            self.pool.ended(is_in_time=is_in_time)
            self.pool.dropped(self.request(workflow), int(self.now_ms))


CASES = {
    "load 0.9": {"load": 0.9},
    "load 1.0": {"load": 1.0},
    "load 1.0, nobody asked": {"load": 1.0, "is_gated": False},
    "load 1.2": {"load": 1.2},
    "load 2.0": {},
    "load 2.0, nobody asked": {"is_gated": False},
    "load 2.0, tight": {"slack": 2.0},
    "load 2.0, loose": {"slack": 6.0},
    "load 2.0, steps unknown": {"knows_steps": False},
    "load 2.0, 6 seats": {"seats": 6},
    "load 2.0, 64 seats": {"seats": 64},
    "load 3.0": {"load": 3.0},
    "load 0.85, half away": {"load": 0.85, "halved": (30_000, 90_000)},
}


def main():
    for pair in sys.argv[1:]:
        name, value = pair.split("=")
        for module in (loads, commitments, appointments):
            if hasattr(module, name):
                setattr(module, name, float(value))
    for title, options in CASES.items():
        for seed in (1, 2):
            print(f"{title:24}", World(seed, **options).run())


if __name__ == "__main__":
    main()
