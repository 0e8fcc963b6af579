"""The waiting queue against plain lists that are searched anew for every question.

The model is written from the documentation: bounds and who is displaced, whose turn it is among queue
classes, tenants and calls, who is passed over, who sleeps, and what is charged.
"""

from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controlplane.admission.fairness import Leeway
from controlplane.admission.queue import Answer, Entered, TurnedAway, Waiting, WaitingQueue
from controlplane.domain.decision import Reason
from tests.decision_builders import call
from tests.examples import MACHINE_S_MAX, machine_examples

pytestmark = pytest.mark.timeout(MACHINE_S_MAX)

LEAD, CREDIT = 1.5, 1.0
CLASS_WEIGHTS = {"standard": 4.0, "batch": 1.0}


def due(request):
    given_ms = max(0, request.workflow_deadline_ms - request.arrival_ms)
    service_ms = request.ttft_ms_max + request.completion_tokens_expected * request.tpot_ms_max
    latest_ms = 30.0 * max(1_000, service_ms)
    return request.arrival_ms + min(given_ms / request.weight, latest_ms)


def charge(item):
    uncached = max(0, item.request.prompt_tokens - item.cached_tokens)
    return max(1, uncached + 2 * item.request.completion_tokens_expected)


def wants(request):
    return request.home or (request.regions, request.gpu_types)


class Model:
    """One waiting call of the model."""

    def __init__(self, item, number, now):
        self.item, self.number = item, number
        self.line_up(now)

    def line_up(self, now):
        request = self.item.request
        is_ordinary = 0 < self.item.idle_until_ms <= now
        if request.not_before_ms > now:
            self.state = "asleep"
        elif request.waits_for_idle and not is_ordinary:
            self.state = "idle"
        else:
            self.state = "waits"

    @property
    def line(self):
        return self.item.request.model, self.item.queue_class


class Shares:
    """Counters of the tenants in one class of one pool, and the class's own."""

    def __init__(self):
        self.of_tenant = {}
        self.virtual = self.mean = self.own = 0.0
        self.missed = 0.2

    def came(self, tenant):
        least = self.virtual - CREDIT * self.mean
        # A stranger has no credit yet.
        self.of_tenant[tenant] = max(self.of_tenant.get(tenant, self.virtual), least)

    def judge(self, *, is_missed):
        self.missed += 0.02 * (is_missed - self.missed)

    @property
    def lead(self):
        return LEAD * max(0.5, (0.2 / max(self.missed, 0.001)) ** 2)

    def learn(self, amount):
        self.mean = self.mean + 0.05 * (amount - self.mean) if self.mean else amount


class QueueAgainstLists(RuleBasedStateMachine):
    @initialize(calls_max=st.sampled_from([2, 5, 99, 99]), bytes_max=st.sampled_from([9, 999, 999]))
    def begin(self, calls_max, bytes_max):
        self.queue = WaitingQueue(
            calls_max, bytes_max, class_weights=CLASS_WEIGHTS, leeway=Leeway(LEAD, CREDIT)
        )
        self.calls_max, self.bytes_max = calls_max, bytes_max
        self.calls: list[Model] = []  # in order of arrival
        self.shares: dict = {}
        self.pool_virtual: Counter = Counter()
        self.charges = []
        self.numbers = count(1)
        self.now = 0

    # ------------------------------------------------------------ the model

    def share(self, line):
        return self.shares.setdefault(line, Shares())

    def stand(self, entry):
        """A call gets its place among those that wait."""
        entry.line_up(self.now)
        if entry.state != "waits":
            return
        share, request = self.share(entry.line), entry.item.request
        others = [e for e in self.calls if e is not entry and e.state == "waits"]
        if all(other.line != entry.line for other in others):
            share.own = max(share.own, self.pool_virtual[request.model])
        if all((o.line, o.item.request.tenant) != (entry.line, request.tenant) for o in others):
            share.came(request.tenant)
        mine = due(request), entry.number
        ahead = [
            e for e in others if e.line == entry.line and (due(e.item.request), e.number) < mine
        ]
        wait_ms = self.queue._pools[request.model].rate.wait_ms(len(ahead), self.now)
        if wait_ms is not None and self.now + wait_ms > request.deadline_ms:
            share.judge(is_missed=True)

    def missed(self, entry):
        """A call leaves that had waited for its turn, and never will have it."""
        if entry.state == "waits":
            self.share(entry.line).judge(is_missed=True)

    def next_of(self, model, candidates):
        """Whose turn it is among these, and the least counter of their tenants."""
        lines = sorted(
            {entry.line for entry in candidates if entry.line[0] == model},
            key=lambda line: (self.share(line).own, line[1]),
        )
        if not lines:
            return None
        line, share = lines[0], self.share(lines[0])
        here = [entry for entry in candidates if entry.line == line]
        least = min(share.of_tenant[entry.item.request.tenant] for entry in here)
        may = [
            entry
            for entry in here
            if share.of_tenant[entry.item.request.tenant] <= least + share.lead * share.mean
        ]
        return min(may, key=lambda entry: (due(entry.item.request), entry.number)), least

    def serve(self, entry, least):
        share, request = self.share(entry.line), entry.item.request
        model = request.model
        self.pool_virtual[model] = max(self.pool_virtual[model], share.own)
        share.own += charge(entry.item) / CLASS_WEIGHTS[entry.item.queue_class]
        share.virtual = max(share.virtual, least)
        share.of_tenant[request.tenant] += charge(entry.item) / request.weight
        share.learn(charge(entry.item) / request.weight)

    def pass_through(self, answers, tries):
        gone = []
        for model in self.models_in_turn():
            waiting = [
                e for e in self.calls if e.state == "waits" and e.item.request.model == model
            ]
            left, stuck = list(waiting), set()
            while tries:
                found = self.next_of(model, [e for e in left if wants(e.item.request) not in stuck])
                if found is None:
                    break
                entry, least = found
                tries -= 1
                answer = answers(entry.item)
                if answer is Answer.POOL_FULL:
                    break
                if answer is Answer.STAYS:
                    stuck.add(wants(entry.item.request))
                    continue
                self.share(entry.line).judge(is_missed=answer is Answer.LEAVES)
                if answer is Answer.GOES:
                    self.serve(entry, least)
                    self.charges.append(entry.item)
                left.remove(entry)
                gone.append(entry)
                self.calls.remove(entry)
            if not tries:
                break
        return [entry.item for entry in gone]

    def models_in_turn(self):
        return list(self.queue._pools)

    # ------------------------------------------------------------ what happens

    @rule(
        given_ms=st.integers(0, 8),
        ends=st.sampled_from([1, 3, 8, 50, 200]),
        weight=st.sampled_from([0.5, 1.0, 2.0]),
        size=st.integers(0, 5),
        tenant=st.sampled_from(["a", "b", "c"]),
        model=st.sampled_from(["m", "n"]),
        queue_class=st.sampled_from(["standard", "batch"]),
        home=st.sampled_from([None, "e1", "e2"]),
        priority=st.integers(0, 2),
        is_begun=st.booleans(),
        tokens=st.integers(1, 40),
        cached=st.integers(0, 50),
        later=st.sampled_from([0, 0, 0, 2, 5]),
    )
    def enter(
        self, given_ms, ends, weight, size, tenant, model, queue_class, home, priority, is_begun,
        tokens, cached, later,
    ):  # fmt: skip
        number = next(self.numbers)
        request = call(
            id=f"r{number}", tenant=tenant, model=model, arrival_ms=self.now,
            workflow_deadline_ms=self.now + given_ms, deadline_ms=self.now + ends, weight=weight,
            home=home, priority=priority, is_begun=is_begun, prompt_tokens=tokens,
            completion_tokens_expected=3, not_before_ms=self.now + later if later else 0,
            ttft_ms_max=0, tpot_ms_max=0,
        )  # fmt: skip
        item = Waiting(request, number, size, queue_class, cached)
        calls, stored = len(self.calls), sum(entry.item.body_bytes for entry in self.calls)
        ratio = 1.25 if is_begun else 1.0
        calls_over = calls + 1 - int(self.calls_max * ratio)
        bytes_over = stored + size - self.bytes_max * ratio
        victims = []
        for entry in self.worth_less(request):
            if calls_over <= 0 and bytes_over <= 0:
                break
            victims.append(entry)
            calls_over -= 1
            bytes_over -= entry.item.body_bytes
        is_in = calls_over <= 0 and bytes_over <= 0
        outcome = self.queue.enter(item, self.now)
        if is_in:
            assert outcome == Entered(tuple(entry.item for entry in victims))
        else:
            assert isinstance(outcome, TurnedAway)
            assert outcome.reason is Reason.QUEUE_FULL
            self.share((model, queue_class)).judge(is_missed=True)
        if is_in:
            for victim in victims:
                self.missed(victim)
            self.calls = [entry for entry in self.calls if entry not in victims]
            self.calls.append(Model(item, number, self.now))
            self.stand(self.calls[-1])

    @rule(
        calls=st.lists(
            st.tuples(
                st.sampled_from(["a", "a", "b", "c"]),
                st.integers(0, 60),
                st.sampled_from(["standard", "standard", "batch"]),
                st.sampled_from([1, 5, 40]),
                st.sampled_from([None, "e1", "e2"]),
            ),
            min_size=5,
            max_size=20,
        )
    )
    def burst(self, calls):
        """Many calls of one pool at once, so that counters drift apart further than the lead."""
        if self.calls_max < 99 or self.bytes_max < 999 or len(self.calls) > 60:
            return
        for tenant, given_ms, queue_class, tokens, home in calls:
            number = next(self.numbers)
            request = call(
                id=f"r{number}", tenant=tenant, arrival_ms=self.now, home=home,
                workflow_deadline_ms=self.now + given_ms, deadline_ms=self.now + 500,
                prompt_tokens=tokens, completion_tokens_expected=1,
            )  # fmt: skip
            item = Waiting(request, number, 1, queue_class)
            assert self.queue.enter(item, self.now) == Entered(())
            self.calls.append(Model(item, number, self.now))
            self.stand(self.calls[-1])

    def worth_less(self, request):
        firsts = [entry for entry in self.calls if not entry.item.request.is_begun]
        sizes = Counter(
            (entry.item.request.priority, entry.item.request.tenant) for entry in firsts
        )

        def size(entry):
            return sizes[entry.item.request.priority, entry.item.request.tenant]

        lower = [
            entry
            for entry in firsts
            if request.is_begun or entry.item.request.priority < request.priority
        ]
        for priority in sorted({entry.item.request.priority for entry in lower}):
            here = [entry for entry in lower if entry.item.request.priority == priority]
            yield from self.by_size(here, size)
        if request.is_begun:
            return
        equals = [entry for entry in firsts if entry.item.request.priority == request.priority]
        if equals:
            mine = sizes[request.priority, request.tenant]
            largest = next(self.by_size(equals, size))
            spare = max(0, size(largest) - mine - 1)
            same = [e for e in equals if e.item.request.tenant == largest.item.request.tenant]
            yield from same[::-1][:spare]

    def by_size(self, entries, size):
        """Tenant by tenant, the largest first; of equal ones the one that became so first."""
        level = self.queue._displaceable._levels[entries[0].item.request.priority]
        tenants = sorted(
            {entry.item.request.tenant for entry in entries},
            key=lambda t: (
                -max(size(e) for e in entries if e.item.request.tenant == t),
                list(level._by_size[len(level.tenants[t])]).index(t),
            ),
        )
        for tenant in tenants:
            yield from [e for e in entries if e.item.request.tenant == tenant][::-1]

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def remove(self, data):
        entry = data.draw(st.sampled_from(self.calls))
        assert self.queue.remove(entry.item.request.id) is entry.item
        assert self.queue.remove(entry.item.request.id) is None
        # Their deadlines are all near: who goes away does not come again in time.
        self.missed(entry)
        self.calls.remove(entry)

    @rule(passed=st.integers(0, 4))
    def expire(self, passed):
        self.now += passed
        over = [entry for entry in self.calls if entry.item.request.deadline_ms <= self.now]
        over.sort(key=lambda entry: (entry.item.request.deadline_ms, entry.number))
        assert self.queue.expire(self.now) == [entry.item for entry in over]
        for entry in over:
            self.missed(entry)
        self.calls = [entry for entry in self.calls if entry not in over]
        self.wake()

    def wake(self):
        asleep = [entry for entry in self.calls if entry.state == "asleep"]
        asleep.sort(key=lambda entry: (entry.item.request.not_before_ms, entry.number))
        for entry in asleep:
            if entry.item.request.not_before_ms <= self.now:
                self.stand(entry)

    @rule(
        tries=st.sampled_from([0, 1, 2, 5, 9, 20]),
        passed=st.integers(0, 2),
        goes=st.sampled_from(
            [
                {"e1", "e2", (3, 15)},
                {"e1", "e2", (3, 15)},
                {"e1", (3, 15)},
                {"e2"},
                {(3, 15)},
                set(),
            ]
        ),
        full=st.sampled_from([None, None, None, None, "m", "n"]),
        leaves=st.sampled_from([0, 9, 9]),
    )
    def dispatch(self, tries, passed, goes, full, leaves):
        self.now += passed
        self.wake()

        def answers(item):
            if item.request.model == full:
                return Answer.POOL_FULL
            if item.ticket % 5 == leaves:
                return Answer.LEAVES
            return Answer.GOES if wants(item.request) in goes else Answer.STAYS

        expected = self.pass_through(answers, tries)
        assert self.queue.dispatch(answers, tries, self.now) == expected
        for item in expected:
            charged = self.queue.charge_of(item.request.id)
            if item in self.charges:
                self.charges.remove(item)
                assert charged.tokens == charge(item)
                self.paid = (charged, item)
            else:
                assert charged is None

    @precondition(lambda self: hasattr(self, "paid"))
    @rule(used=st.integers(0, 60))
    def correct(self, used):
        charged, item = self.paid
        del self.paid
        self.queue.correct(charged, used)
        share = self.share((item.request.model, item.queue_class))
        share.of_tenant[item.request.tenant] += (used - charge(item)) / item.request.weight

    @rule(tenant=st.sampled_from(["a", "b", "c"]), tokens=st.integers(1, 40))
    def served_at_once(self, tenant, tokens):
        request = call(tenant=tenant, model="m", prompt_tokens=tokens, completion_tokens_expected=0)
        self.queue.charge(request)
        share = self.share(("m", "standard"))
        here = [e for e in self.calls if e.line == ("m", "standard") and e.state == "waits"]
        if all(entry.item.request.tenant != tenant for entry in here):
            share.came(tenant)
        share.of_tenant[tenant] += tokens
        share.learn(tokens)
        if not here:
            share.virtual = max(share.virtual, share.of_tenant[tenant])

    # ------------------------------------------------------------ what holds

    @invariant()
    def agrees(self):
        assert len(self.queue) == len(self.calls)
        assert self.queue.bytes == sum(entry.item.body_bytes for entry in self.calls)
        assert sorted(item.ticket for item in self.queue.items()) == [e.number for e in self.calls]
        for model in ("m", "n"):
            here = [e for e in self.calls if e.line[0] == model and e.state == "waits"]
            assert self.queue.waiting_for(model) == len(here)
            ranks = [self.queue.position(entry.item.request.id) for entry in here]
            assert all(1 <= rank <= len(here) for rank in ranks)


TestQueueAgainstLists = QueueAgainstLists.TestCase
TestQueueAgainstLists.settings = settings(
    max_examples=machine_examples(200), stateful_step_count=30, deadline=None
)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 99)), max_size=40))
def test_by_arrival_nothing_else_counts(calls):
    queue = WaitingQueue(order="arrival", class_weights=CLASS_WEIGHTS)
    for number, (arrival, other) in enumerate(calls):
        request = call(
            id=f"r{number}", tenant=f"t{other % 7}", arrival_ms=arrival, weight=1 + other % 3,
            workflow_deadline_ms=arrival + other, prompt_tokens=other + 1,
        )  # fmt: skip
        queue.enter(Waiting(request, (arrival, number), 1, ["standard", "batch"][other % 2]), 0)
    gone = [item.ticket for item in queue.dispatch(lambda _: Answer.GOES, 99, 0)]
    assert gone == sorted(gone)
    assert len(gone) == len(calls)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9)), min_size=1, max_size=300))
def test_flows_and_memory_are_bounded_whoever_comes(arrivals):
    queue = WaitingQueue()
    for number, (tenant, going) in enumerate(arrivals):
        queue.enter(Waiting(call(id=f"r{number}", tenant=f"t{tenant}"), number, 1), 0)
        if going == 0:
            queue.dispatch(lambda _: Answer.GOES, 5, 0)
    [pool] = queue._pools.values()
    [flows] = pool.classes.values()
    assert len(flows.busy) <= 64 + 128
    assert len(flows._flows) <= 1_024
    assert sum(len(flow.turns) for flow in flows.busy.values()) == len(queue)
    assert len(queue._expiry) == len(queue)
    gone = queue.dispatch(lambda _: Answer.GOES, 1_000, 0)
    assert len(queue) == 0
    assert len({item.ticket for item in gone}) == len(gone)
    assert not flows.busy
    assert not queue._expiry
