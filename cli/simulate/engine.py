"""A vLLM-like engine in virtual time: continuous batching, chunked prefill, a bounded KV pool with a prefix cache.

Follows vLLM's scheduler as `dataplane/engines/simulated` does, but moves from one change of the
batch to the next instead of step by step: between two changes all decoding calls gain a token in
every step, so an odometer of steps and a heap of the readings at which calls end say when the next
change comes, exactly. Knows no workflow beyond what of its context is cached, and no money.

A pair of engines splits a call as vLLM's NIXL connector does. The one computes the prompt and holds its KV
without a seat until it was read. The other takes memory for the prompt, reads the blocks that it does not
hold itself, computes the last token of the prompt again to have something to sample from, and decodes.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Final

from cli.simulate.contracts import Call, EngineSpec

# vLLM's block of KV cache: what is cached is found in whole blocks.
BLOCK_TOKENS: Final = 16
# Steps of one segment at most; a segment this long is a day of decoding.
SEGMENT_STEPS_MAX: Final = 1 << 22
_EPSILON_STEPS: Final = 1e-9
# The key of a chain.
Context = int | tuple[int, int]


class Running:
    """One call on an engine. `computed` of its `target` tokens have their KV; the target grows with what
    it has generated when it must be computed again. `ends_at` is the odometer at which it ends.

    `is_prefill` computes the prompt for another engine; `is_received` gets its KV from another one, which
    `fetched_tokens` are read from.
    """

    __slots__ = (
        "cached_tokens", "call", "computed", "ends_at", "fetched_tokens", "gpu_ms", "has_spoken",
        "is_decoding", "is_gone", "is_prefill", "is_received", "joined_ms_each", "left_tokens",
        "lost_tokens", "order", "own_tokens", "preempted_ms", "prefix_tokens", "priority", "started_at",
        "target",
    )  # fmt: skip

    def __init__(self, call: Call, priority: float, order: int) -> None:
        step = call.step
        self.call = call
        self.priority = priority
        self.order = order
        self.target = step.prompt_tokens
        self.left_tokens = max(1, step.completion_tokens)
        self.computed = 0
        self.cached_tokens = -1
        # Tokens held by this call alone, and those of its shared prefix that it found kept.
        self.own_tokens = 0
        self.prefix_tokens = 0
        self.is_decoding = False
        self.is_gone = False
        self.has_spoken = False
        self.is_prefill = False
        self.is_received = False
        self.fetched_tokens = 0
        self.ends_at = 0
        self.started_at = 0
        self.joined_ms_each = 0.0
        self.gpu_ms = 0.0
        # Tokens whose KV was given up, to be computed again, and the time that took.
        self.lost_tokens = 0
        self.preempted_ms = 0.0


@dataclass(slots=True)
class Kept:
    """Tokens of a context, or of a shared prefix, that nobody uses now or that `pins` calls use."""

    tokens: int
    place: int = 0
    pins: int = 0


@dataclass(slots=True)
class Segment:
    """`steps` equal steps from `start_ms`. Step k ends at start + linear * k + square * k^2."""

    start_ms: float
    steps: int
    linear_ms: float
    square_ms: float
    decoding: int
    work: list[tuple[Running, int]]
    slowness: float

    def elapsed_ms(self, steps: float) -> float:
        return (self.linear_ms + self.square_ms * steps) * steps

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.elapsed_ms(self.steps)

    def steps_by(self, now_ms: float) -> float:
        """Steps, and the part of the next one, that are done at an instant."""
        elapsed_ms = now_ms - self.start_ms
        if elapsed_ms <= 0.0:
            return 0.0
        if self.square_ms <= 0.0:
            return elapsed_ms / self.linear_ms
        root = sqrt(self.linear_ms * self.linear_ms + 4.0 * self.square_ms * elapsed_ms)
        return (root - self.linear_ms) / (2.0 * self.square_ms)


@dataclass(slots=True)
class Happened:
    """Calls that got their first token, that ended, and whose prompt is computed for another engine, at the
    end of a segment.
    """

    first: list[Running] = field(default_factory=list)
    filled: list[Running] = field(default_factory=list)
    ended: list[Running] = field(default_factory=list)


class Engine:
    """Driven by the world: `add` and `cancel` between segments, `advance` at `ends_ms`. Of pairs also
    `receive`, `fetched` for what `take_fetching` told of, and `hand_over` on the other engine.

    INVARIANT: `pinned` + `cached` <= capacity; `pinned` is what calls hold, prefixes once.
    """

    def __init__(self, spec: EngineSpec) -> None:
        rates = spec.rates
        self.spec = spec
        self.capacity = spec.kv_tokens_capacity
        self.base_ms = rates.decode_ms_base
        self.per_token_ms = rates.decode_ms_per_seq
        self.per_kv_token_ms = rates.decode_ms_per_kv_token
        self.per_pair_ms = rates.prefill_ms_per_token_sq
        self.slowness_ratio = spec.slowness_ratio
        self.segment: Segment | None = None
        # Grows with every change of `ends_ms`, so that what was scheduled before is void.
        self.version = 0
        self.pinned = 0
        self.cached = 0
        self.prefill_tokens_waiting = 0
        self.preemptions = 0
        self.busy_ms = 0.0
        self.by_call: dict[str, Running] = {}
        self._order = 0
        self._odometer = 0
        self._ms_each = 0.0
        self._decoding = 0
        self._kv_read = 0
        self._endings: list[tuple[int, int, Running]] = []
        self._prefilling: list[Running] = []
        self._waiting: list[tuple[float, int, Running]] = []
        self._waiting_count = 0
        self._running: dict[int, Running] = {}
        self._leaving: list[Running] = []
        # Of pairs, by order: prompts held for another engine; those that are read from another one, and among
        # them those that are here and wait for a seat; those that the world has not heard of yet.
        self._held: dict[int, Running] = {}
        self._fetching: dict[int, Running] = {}
        self._fetched: list[Running] = []
        self._fetching_untold: list[Running] = []
        self._contexts: dict[Context, Kept] = {}
        self._prefixes: dict[str, Kept] = {}
        # What nobody uses, longest unused first: contexts by their chain's key, prefixes by name.
        self._unused: OrderedDict[Context | str, Kept] = OrderedDict()

    # ------------------------------------------------------------ gauges

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return self._waiting_count

    @property
    def is_holding(self) -> bool:
        """Whether another engine has still to read KV from here."""
        return bool(self._held)

    def is_held(self, running: Running) -> bool:
        """The prompt is computed, and another engine has still to read its KV."""
        return running.order in self._held

    @property
    def ends_ms(self) -> float:
        """When the present segment ends; infinite while there is nothing to do."""
        return float("inf") if self.segment is None else self.segment.end_ms

    def busy_ms_at(self, now_ms: float) -> float:
        """Milliseconds in which steps ran, up to an instant not after the present segment's end."""
        segment = self.segment
        return (
            self.busy_ms if segment is None else self.busy_ms + max(0.0, now_ms - segment.start_ms)
        )

    def kv_used_at(self, now_ms: float) -> int:
        segment = self.segment
        if segment is None:
            return self.pinned
        return min(self.capacity, self.pinned + int(segment.decoding * segment.steps_by(now_ms)))

    # ------------------------------------------------------------ the prefix cache

    def match(self, call: Call) -> int:
        """Tokens of the call's prompt that are cached, in whole blocks; at least one is not."""
        chain, place = call.chain, call.place
        steps = chain.steps
        most = steps[place].prompt_tokens - 1
        found = 0
        if chain.prefix:
            kept = self._prefixes.get(chain.prefix)
            found = 0 if kept is None else min(kept.tokens, chain.prefix_tokens)
            if found < chain.prefix_tokens:
                return min(found, most) // BLOCK_TOKENS * BLOCK_TOKENS
        context = self._contexts.get(chain.key)
        if context is not None:
            found += context.tokens
        # Each step since may have kept less of the context before it.
        begin = 0 if context is None else context.place + 1
        for later in range(begin, place + 1):
            found = min(found, steps[later].reusable_tokens)
        return max(0, min(found, most)) // BLOCK_TOKENS * BLOCK_TOKENS

    def forget(self) -> None:
        """Lose everything that nobody uses."""
        for key in list(self._unused):
            self._drop(key)

    # ------------------------------------------------------------ calls come and go

    def add(
        self, call: Call, priority: float, now_ms: float, *, is_prefill: bool = False
    ) -> Running:
        """Take a call; it joins at the next step that has room for it.

        `is_prefill`: its prompt is computed and held until `hand_over`, for another engine to go on with.
        """
        self._order += 1
        running = Running(call, priority, self._order)
        running.is_prefill = is_prefill
        self.prefill_tokens_waiting += running.target
        self._line_up(running, now_ms)
        return running

    def receive(self, call: Call, priority: float, cached_tokens: int, now_ms: float) -> Running:
        """Take a call whose prompt another engine holds, which found `cached_tokens` of it in its cache.

        When there is memory for the prompt `take_fetching` tells of it.
        """
        self._order += 1
        running = Running(call, priority, self._order)
        running.is_received = True
        running.cached_tokens = cached_tokens
        # All but the last token of the prompt comes over.
        self.prefill_tokens_waiting += 1
        self._line_up(running, now_ms)
        return running

    def take_fetching(self) -> list[Running]:
        """Calls that began to read their prompt's KV since this was last asked."""
        untold, self._fetching_untold = self._fetching_untold, []
        return untold

    def fetched(self, running: Running, now_ms: float) -> None:
        """The prompt's KV is here: the call joins at the next step that has a seat."""
        self._fetched.append(running)
        self._look_again(now_ms)

    def hand_over(self, call: Call, now_ms: float) -> None:
        """The other engine has read what was held for it; it stays cached while there is room."""
        running = self.by_call.pop(call.id)
        del self._held[running.order]
        self._give_up(running, running.own_tokens)
        self._look_again(now_ms)

    def _line_up(self, running: Running, now_ms: float) -> None:
        self.by_call[running.call.id] = running
        heapq.heappush(self._waiting, (running.priority, running.order, running))
        self._waiting_count += 1
        self._look_again(now_ms)

    def _look_again(self, now_ms: float) -> None:
        """Something came or was freed: the next step may be another one."""
        if self.segment is None:
            self._plan(now_ms)
        elif not self.segment.work and len(self._running) < self.spec.seats:
            self._cut(now_ms)

    def cancel(self, call: Call, now_ms: float) -> Running | None:
        """Take a call out; one that computes leaves at the end of the step that runs."""
        running = self.by_call.pop(call.id, None)
        if running is None:
            return None
        running.is_gone = True
        if running.order in self._held:
            del self._held[running.order]
            self._give_up(running, running.own_tokens)
            self._look_again(now_ms)
            return running
        if running.order in self._fetching:
            self._stop_fetching(running)
            # What was to come over is not there.
            missing = running.fetched_tokens - 1
            running.own_tokens -= missing
            self.pinned -= missing
            self._give_up(running, running.own_tokens)
            self.prefill_tokens_waiting -= 1
            self._look_again(now_ms)
            return running
        if running.order not in self._running:
            self._waiting_count -= 1
            self.prefill_tokens_waiting -= (
                1 if running.is_received else running.target - running.computed
            )
            return running
        self._settle_share(running)
        self._leaving.append(running)
        self._cut(now_ms)
        return running

    def die(self, now_ms: float) -> list[Running]:
        """End at once, in mid-step; the calls that were there, in order. Nothing of it is used after."""
        self.busy_ms = self.busy_ms_at(now_ms)
        self.segment = None
        lost = sorted(self.by_call.values(), key=lambda running: running.order)
        for running in lost:
            self._settle_share(running)
        return lost

    def slow_down(self, factor: float, now_ms: float) -> None:
        """Steps that begin from now on take `factor` times as long as the model says."""
        self.slowness_ratio = self.spec.slowness_ratio * factor
        self._cut(now_ms)

    def advance(self) -> Happened:
        """The present segment has ended: account for it and begin the next one."""
        happened = Happened()
        segment = self.segment
        if segment is None:
            return happened
        self._complete(segment, happened)
        self._plan(segment.end_ms)
        return happened

    # ------------------------------------------------------------ inside: steps

    def _cut(self, now_ms: float) -> None:
        """End the segment with the step that runs now."""
        segment = self.segment
        if segment is None or segment.steps <= 1:
            return
        steps = max(1, ceil(segment.steps_by(now_ms) - _EPSILON_STEPS))
        if steps < segment.steps:
            segment.steps = steps
            self.version += 1

    def _plan(self, now_ms: float) -> None:
        """Find out what the next steps compute, and for how many of them that stays so."""
        self.version += 1
        self.segment = None
        work: dict[Running, int] = {}
        preempted = self.preemptions
        while self._decoding and self.pinned + self._decoding > self.capacity:
            self._preempt()
        budget = self.spec.step_tokens_max - self._decoding
        for running in list(self._prefilling):
            tokens = min(running.target - running.computed, budget)
            while tokens > 0 and self.pinned + tokens + self._decoding > self.capacity:
                victim = self._preempt()
                if victim is running:
                    tokens = 0
                given_up = work.pop(victim, 0)
                self.pinned -= given_up
                budget += given_up
            if tokens > 0 and running.order in self._running:
                work[running] = tokens
                # Until the plan is made: what it will compute takes room as well.
                self.pinned += tokens
                budget -= tokens
        # Who was preempted comes back when something else has ended, or nothing is left.
        if self.preemptions == preempted or not (self._decoding or work):
            budget = self._admit(work, budget)
        planned = sum(work.values())
        self.pinned -= planned
        decoding = self._decoding
        if not decoding and not work:
            return
        steps = self._steps(work, budget)
        per_kv, per_pair = self.per_kv_token_ms, self.per_pair_ms
        linear = self.base_ms + (decoding + planned) * self.per_token_ms
        linear += per_kv * (self._kv_read - 0.5 * decoding)
        square = 0.5 * per_kv * decoding
        # Pairs of a new token and one before it: with t tokens after c others, t c + t^2 / 2.
        if steps == 1:
            linear += per_pair * sum(
                tokens * (running.computed + 0.5 * tokens) for running, tokens in work.items()
            )
        else:
            for running, tokens in work.items():
                linear += per_pair * tokens * running.computed
                square += 0.5 * per_pair * tokens * tokens
        slowness = self.slowness_ratio
        self.segment = Segment(
            now_ms,
            steps,
            linear * slowness,
            square * slowness,
            decoding,
            list(work.items()),
            slowness,
        )

    def _steps(self, work: dict[Running, int], budget: int) -> int:
        """How many steps are alike from now on."""
        decoding = self._decoding
        steps = SEGMENT_STEPS_MAX
        if decoding:
            endings = self._endings
            while endings and not self._is_current(endings[0]):
                heapq.heappop(endings)
            steps = endings[0][0] - self._odometer
        if not work:
            return max(1, min(steps, (self.capacity - self.pinned) // decoding))
        if len(work) > 1 or budget > 0:
            return 1
        running, tokens = next(iter(work.items()))
        full = (running.target - running.computed) // tokens
        room = (self.capacity - self.pinned) // (tokens + decoding)
        return max(1, min(steps, full, room))

    def _complete(self, segment: Segment, happened: Happened) -> None:
        steps, decoding, work = segment.steps, segment.decoding, segment.work
        duration_ms = segment.elapsed_ms(steps)
        self.busy_ms += duration_ms
        slowness = segment.slowness
        shared_ms = self.base_ms * steps * slowness / max(1, decoding + len(work))
        prefill_ms = 0.0
        for running, tokens in work:
            total = tokens * steps
            own_ms = slowness * (
                total * self.per_token_ms
                + self.per_pair_ms * total * (running.computed + 0.5 * total)
            )
            prefill_ms += own_ms + shared_ms
            running.gpu_ms += own_ms + shared_ms
            if running.lost_tokens > 0:
                part = min(1.0, running.lost_tokens / total)
                running.preempted_ms += part * (own_ms + shared_ms)
                running.lost_tokens = max(0, running.lost_tokens - total)
        if decoding:
            self._ms_each += (duration_ms - prefill_ms) / decoding
        self._odometer += steps
        self.pinned += decoding * steps
        self._kv_read += decoding * steps
        spoke: list[Running] = []
        for running, tokens in work:
            total = tokens * steps
            running.computed += total
            running.own_tokens += total
            self.pinned += total
            self.prefill_tokens_waiting -= total
            if running.computed >= running.target:
                spoke.append(running)
        self._make_room()
        endings = self._endings
        while endings and endings[0][0] <= self._odometer:
            entry = heapq.heappop(endings)
            if self._is_current(entry) and not entry[2].is_gone:
                self._finish(entry[2], happened)
        for running in spoke:
            self._prefilling.remove(running)
            self._speak(running, happened)
        if self._leaving:
            for running in self._leaving:
                if running.order in self._running:
                    self._leave(running)
            self._leaving.clear()

    def _speak(self, running: Running, happened: Happened) -> None:
        """The prompt is computed, and with it a token has come."""
        if running.is_prefill:
            self._publish_prefix(running)
            if not running.is_gone:
                del self._running[running.order]
                self._held[running.order] = running
                happened.filled.append(running)
            return
        running.left_tokens -= 1
        if not running.has_spoken:
            running.has_spoken = True
            if not running.is_gone:
                happened.first.append(running)
        self._publish_prefix(running)
        running.is_decoding = True
        running.started_at = self._odometer
        running.joined_ms_each = self._ms_each
        running.ends_at = self._odometer + running.left_tokens
        self._decoding += 1
        self._kv_read += running.computed
        if running.left_tokens <= 0 and not running.is_gone:
            self._finish(running, happened)
        else:
            heapq.heappush(self._endings, (running.ends_at, running.order, running))

    def _finish(self, running: Running, happened: Happened) -> None:
        self._settle_share(running)
        del self.by_call[running.call.id]
        running.left_tokens = 0
        self._leave(running)
        happened.ended.append(running)

    def _is_current(self, entry: tuple[int, int, Running]) -> bool:
        running = entry[2]
        return running.is_decoding and running.ends_at == entry[0]

    def _settle_share(self, running: Running) -> None:
        """Charge a call its part of the steps that it decoded in."""
        if running.is_decoding:
            running.gpu_ms += self._ms_each - running.joined_ms_each
            running.joined_ms_each = self._ms_each

    # ------------------------------------------------------------ inside: who computes

    def _admit(self, work: dict[Running, int], budget: int) -> int:
        """Let calls that wait join as long as step, seats and memory have room; the budget that is left."""
        while budget > 0 and self._fetched and len(self._running) < self.spec.seats:
            if self.pinned + 1 + self._decoding > self.capacity:
                break
            running = self._fetched[0]
            self._stop_fetching(running)
            running.is_received = False
            self._running[running.order] = running
            self._prefilling.append(running)
            work[running] = 1
            self.pinned += 1
            budget -= 1
        while budget > 0 and self._waiting and len(self._running) < self.spec.seats:
            running = self._waiting[0][2]
            if running.is_gone:
                heapq.heappop(self._waiting)
                continue
            matched = min(self.match(running.call), running.target - 1)
            tokens = min(running.target - matched, budget)
            if running.is_received:
                pins = self._pins_of(running.call, matched) + running.target - matched
                if self.pinned + pins + self._decoding > self.capacity:
                    break
                heapq.heappop(self._waiting)
                self._fetch(running, matched)
                continue
            pins = self._pins_of(running.call, matched) + tokens + self._decoding
            if self.pinned + pins > self.capacity:
                break
            heapq.heappop(self._waiting)
            self._waiting_count -= 1
            self._begin(running, matched)
            work[running] = tokens
            self.pinned += tokens
            budget -= tokens
        return budget

    def _pins_of(self, call: Call, matched: int) -> int:
        """Tokens that would be pinned in addition for a match."""
        prefix = call.chain.prefix
        kept = self._prefixes.get(prefix) if prefix and matched else None
        return matched if kept is None or not kept.pins else max(0, matched - kept.tokens)

    def _fetch(self, running: Running, matched: int) -> None:
        """Take memory for the prompt, without a seat; what is not cached is read from another engine."""
        self._hold(running, matched)
        missing = running.target - 1 - matched
        running.own_tokens += missing
        self.pinned += missing
        running.computed = running.target - 1
        running.fetched_tokens = running.target - matched
        self._fetching[running.order] = running
        self._fetching_untold.append(running)
        self._make_room()

    def _stop_fetching(self, running: Running) -> None:
        del self._fetching[running.order]
        if running in self._fetched:
            self._fetched.remove(running)
        self._waiting_count -= 1

    def _begin(self, running: Running, matched: int) -> None:
        """Hold what is cached of the prompt; the rest is computed."""
        self._running[running.order] = running
        self._prefilling.append(running)
        self._hold(running, matched)
        running.computed = matched
        self.prefill_tokens_waiting -= matched
        if running.cached_tokens < 0:
            running.cached_tokens = matched
        running.lost_tokens = max(0, running.lost_tokens - matched)
        self._make_room()

    def _hold(self, running: Running, matched: int) -> None:
        """Pin what is cached of the prompt."""
        chain = running.call.chain
        own = matched
        prefix = self._prefixes.get(chain.prefix) if chain.prefix and matched else None
        if prefix is not None:
            if not prefix.pins:
                self._unused.pop(chain.prefix, None)
                self.cached -= prefix.tokens
                self.pinned += prefix.tokens
            prefix.pins += 1
            running.prefix_tokens = prefix.tokens
            own = max(0, matched - prefix.tokens)
        if chain.key in self._contexts:
            self._drop(chain.key)
        running.own_tokens = own
        self.pinned += own

    def _publish_prefix(self, running: Running) -> None:
        """What this call has computed of its shared prefix can be found from now on."""
        chain = running.call.chain
        missing = chain.prefix_tokens - running.prefix_tokens
        if not chain.prefix or missing <= 0 or running.computed < chain.prefix_tokens:
            return
        known = self._prefixes.get(chain.prefix)
        if known is None:
            known = self._prefixes[chain.prefix] = Kept(0)
        elif running.prefix_tokens == 0 or known.tokens > running.prefix_tokens:
            # Another call was faster: this copy can not be found.
            return
        known.pins += running.prefix_tokens == 0
        known.tokens = running.prefix_tokens = chain.prefix_tokens
        running.own_tokens -= missing

    def _preempt(self) -> Running:
        """Take the memory of the call that matters least: its KV is given up and computed again."""
        victim = max(self._running.values(), key=lambda each: (each.priority, each.order))
        self.preemptions += 1
        self._settle_share(victim)
        computed = victim.computed
        if victim.is_decoding:
            done = self._odometer - victim.started_at
            victim.left_tokens -= done
            computed += done
            victim.target = computed + 1
        else:
            self.prefill_tokens_waiting -= victim.target - victim.computed
        if victim in self._prefilling:
            self._prefilling.remove(victim)
        self._leave(victim)
        victim.lost_tokens = computed
        victim.computed = 0
        if not victim.is_gone:
            heapq.heappush(self._waiting, (victim.priority, victim.order, victim))
            self._waiting_count += 1
            self.prefill_tokens_waiting += victim.target
        return victim

    def _leave(self, running: Running) -> None:
        """Give up a running call's place and memory; what it computed stays cached while there is room."""
        del self._running[running.order]
        own = running.own_tokens
        if running.is_decoding:
            done = self._odometer - running.started_at
            own += done
            self._decoding -= 1
            self._kv_read -= running.computed + done
            running.is_decoding = False
        elif running in self._prefilling:
            self._prefilling.remove(running)
            self.prefill_tokens_waiting -= running.target - running.computed
        self._give_up(running, own)

    def _give_up(self, running: Running, own: int) -> None:
        """Give up a call's memory, of which `own` tokens are its alone; it stays cached while there is room."""
        chain = running.call.chain
        self.pinned -= own
        running.own_tokens = 0
        prefix = self._prefixes.get(chain.prefix) if chain.prefix else None
        # A copy of the shared prefix, or of its tail, that another call has published is not kept.
        copied = chain.prefix_tokens - running.prefix_tokens if chain.prefix else 0
        if copied == 0 or (prefix is not None and prefix.tokens >= chain.prefix_tokens):
            self._keep(chain.key, own - copied, running.call.place)
        if running.prefix_tokens and prefix is not None:
            running.prefix_tokens = 0
            prefix.pins -= 1
            if not prefix.pins:
                # The head of a context is freed after its tail, and so is taken later.
                self._unused[chain.prefix] = prefix
                self.cached += prefix.tokens
                self.pinned -= prefix.tokens
        self._make_room()

    def _keep(self, context: Context, tokens: int, place: int) -> None:
        if tokens <= 0:
            return
        if context in self._contexts:
            self._drop(context)
        kept = self._contexts[context] = self._unused[context] = Kept(tokens, place)
        self.cached += kept.tokens

    # ------------------------------------------------------------ inside: memory

    def _make_room(self) -> None:
        """Take the memory of what was unused for longest, its tail first."""
        over = self.pinned + self.cached - self.capacity
        while over > 0 and self._unused:
            key, kept = next(iter(self._unused.items()))
            if kept.tokens <= over:
                over -= kept.tokens
                self._drop(key)
            else:
                kept.tokens -= over
                self.cached -= over
                over = 0

    def _drop(self, key: Context | str) -> None:
        kept = self._unused.pop(key, None)
        if kept is not None:
            self.cached -= kept.tokens
        if isinstance(key, str):
            del self._prefixes[key]
        else:
            del self._contexts[key]
