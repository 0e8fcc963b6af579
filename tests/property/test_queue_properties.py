"""The waiting queue against a plain list that is sorted anew for every question."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controlplane.admission.queue import Waiting, WaitingQueue
from tests.decision_builders import call


def turn(request):
    """Written from the documentation: arrival + given time / weight."""
    return request.arrival_ms + (request.workflow_deadline_ms - request.arrival_ms) / request.weight


class QueueAgainstList(RuleBasedStateMachine):
    @initialize(calls_max=st.integers(1, 5), bytes_max=st.integers(1, 12))
    def begin(self, calls_max, bytes_max):
        self.queue = WaitingQueue(calls_max, bytes_max)
        self.calls_max, self.bytes_max = calls_max, bytes_max
        self.model = []  # in order of arrival
        self.number = 0

    def in_order(self):
        return sorted(self.model, key=lambda item: turn(item.request))

    @rule(
        arrival=st.integers(0, 3),
        given_ms=st.integers(0, 8),
        deadline=st.integers(1, 9),
        weight=st.sampled_from([1.0, 2.0, 4.0]),
        size=st.integers(0, 5),
    )
    def push(self, arrival, given_ms, deadline, weight, size):
        self.number += 1
        request = call(
            id=f"r{self.number}",
            arrival_ms=arrival,
            workflow_deadline_ms=arrival + given_ms,
            deadline_ms=deadline,
            weight=weight,
        )
        item = Waiting(request, self.number, size)
        has_room = (
            len(self.model) < self.calls_max
            and sum(other.body_bytes for other in self.model) + size <= self.bytes_max
        )
        assert self.queue.push(item) == has_room
        if has_room:
            self.model.append(item)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data):
        item = data.draw(st.sampled_from(self.model))
        assert self.queue.remove(item.request.id) is item
        assert self.queue.remove(item.request.id) is None
        self.model.remove(item)

    @rule(now=st.integers(0, 10))
    def expire(self, now):
        expected = [item for item in self.model if item.request.deadline_ms <= now]
        expected.sort(key=lambda item: item.request.deadline_ms)
        assert self.queue.expire(now) == expected
        self.model = [item for item in self.model if item not in expected]

    @rule(parity=st.integers(0, 2), tries=st.integers(0, 6))
    def pop_ready(self, parity, tries):
        expected = [item for item in self.in_order()[:tries] if item.ticket % 3 != parity]
        assert self.queue.pop_ready(lambda item: item.ticket % 3 != parity, tries) == expected
        self.model = [item for item in self.model if item not in expected]

    @invariant()
    def agrees(self):
        assert len(self.queue) == len(self.model)
        assert self.queue.bytes == sum(item.body_bytes for item in self.model)
        assert list(self.queue.ordered()) == self.in_order()


TestQueueAgainstList = QueueAgainstList.TestCase
TestQueueAgainstList.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


@given(
    st.lists(st.tuples(st.sampled_from(["in", "out", "popped"]), st.integers(1, 90)), max_size=12)
)
def test_memory_is_bounded_by_what_waits(bursts):
    queue = WaitingQueue()
    alive = []
    steps = [step for step, times in bursts for _ in range(times)]
    for number, step in enumerate(steps):
        if step == "in":
            queue.push(Waiting(call(id=f"r{number}"), number, 1))
            alive.append(f"r{number}")
        elif step == "out" and alive:
            queue.remove(alive.pop())
        elif alive:
            alive.remove(queue.pop_ready(lambda _: True, 1)[0].request.id)
        assert len(queue._heap) <= 64 + 2 * len(alive) + 2
        assert len(queue._expiry) <= 64 + 2 * len(alive) + 2


def test_a_heavier_tenant_goes_first_and_a_light_one_is_not_starved():
    queue = WaitingQueue()
    light = call(id="light", arrival_ms=0, workflow_deadline_ms=60_000, weight=1.0)
    queue.push(Waiting(light, "light", 0))
    for number in range(20):
        arrival = number * 5_000
        heavy = call(
            id=f"heavy-{number}",
            arrival_ms=arrival,
            workflow_deadline_ms=arrival + 60_000,
            weight=4.0,
        )
        queue.push(Waiting(heavy, f"heavy-{number}", 0))
    order = [item.ticket for item in queue.ordered()]
    assert order[0] == "heavy-0"
    # Its turn is at 60 s: of equal weight or more, whatever arrives from 45 s on goes behind it.
    assert order.index("light") == 9
