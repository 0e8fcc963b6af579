"""The engine's heart: runs the batcher in steps that end on a precise modelled clock, and wakes
the answers.

The clock of the steps is absolute: a wake-up that comes late is caught up with by running the
steps that have ended meanwhile, and their tokens are delivered together. So short steps cost few
wake-ups.
"""

import asyncio
import time
from functools import partial

from dataplane.engines.simulated.batching import Batcher, Finish, Sequence, Step
from dataplane.engines.simulated.faults import Death, Faults, initial_faults
from dataplane.engines.simulated.kv_events import KvPublisher
from dataplane.engines.simulated.kv_pool import KvPool
from dataplane.engines.simulated.metrics import EngineMetrics, Exposition
from dataplane.engines.simulated.options import BLOCK_TOKENS, SimulatedOptions, kv_blocks
from dataplane.engines.simulated.roofline import step_times
from dataplane.engines.simulated.transfer import (
    Leases,
    Pulled,
    PullReply,
    PullRequest,
    Remote,
    keep_renewed,
    pull,
)

# Deliveries come at most this often; a real step takes longer than this without a speed-up.
WAKE_S_MIN = 0.002
# Time that a stalled process does not try to make up for.
LAG_S_MAX = 0.25
STEPS_PER_WAKE_MAX = 200
HANG_POLL_S = 0.02


class Answer:
    """One request: `choices` sequences for each of its prompts, and whoever waits for their
    tokens.
    """

    __slots__ = (
        "_is_awake",
        "_waiter",
        "choices",
        "is_cancelled",
        "remote",
        "request_id",
        "sequences",
    )

    def __init__(
        self, request_id: str, sequences: list[Sequence], choices: int, remote: Remote | None
    ) -> None:
        self.request_id = request_id
        self.sequences = sequences
        self.choices = choices
        self.remote = remote
        self.is_cancelled = False
        self._is_awake = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_done(self) -> bool:
        return all(sequence.finish is not None for sequence in self.sequences)

    @property
    def generated(self) -> int:
        return sum(sequence.generated for sequence in self.sequences)

    def wake(self) -> None:
        self._is_awake = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return when there is something since the last wait. One waiter."""
        if not self._is_awake:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._is_awake = False


class Engine:
    def __init__(
        self,
        options: SimulatedOptions,
        *,
        gpus: int,
        model: str,
        kv_publisher: KvPublisher | None = None,
    ) -> None:
        self.options = options
        self._kv_publisher = kv_publisher
        self.model = model
        self.gpus = gpus
        self.faults = initial_faults(options)
        self.sleep_level = 0
        self.metrics = EngineMetrics()
        self.blocks = kv_blocks(options, gpus)
        self.batcher = Batcher(
            KvPool(self.blocks),
            seats=options.max_num_seqs,
            step_tokens_max=options.max_num_batched_tokens,
            has_prefix_cache=options.enable_prefix_caching,
            kv_log=None if kv_publisher is None else kv_publisher.log,
        )
        self._times = step_times(options, gpus)
        self._owner: dict[Sequence, Answer] = {}
        self.leases = Leases(options.kv_lease_s, self.batcher.pool)
        self._renewals: dict[Sequence, asyncio.Task[None]] = {}
        # How the engine has died, and the count of generated tokens at which it is to.
        self.death = Death.NONE
        self._dies_at = 0
        self._wake = asyncio.Event()
        self._pulls: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        return self.batcher.in_flight

    def use_faults(self, faults: Faults) -> None:
        """Have these faults from now on, and no other; who was dead lives again."""
        self.faults = faults
        self.death = Death.NONE
        self._dies_at = self.metrics.generation_tokens + faults.death_after_tokens
        if faults.death is not Death.NONE and not faults.death_after_tokens:
            self._die()

    def _die(self) -> None:
        """Compute nothing any more, and let every answer end as this death has it."""
        self.death = self.faults.death
        for answer in set(self._owner.values()):
            answer.wake()

    def submit(self, answer: Answer) -> None:
        now = time.perf_counter()
        for sequence in answer.sequences:
            sequence.arrival_s = now
            self._owner[sequence] = answer
            self.batcher.add(sequence)
            if sequence.is_remote and answer.remote is not None:
                self._renewals[sequence] = asyncio.ensure_future(
                    keep_renewed(answer.remote, self.options.kv_lease_s)
                )
        self._wake.set()

    def cancel(self, answer: Answer) -> None:
        """End an answer that nobody waits for, and free its blocks at once."""
        answer.is_cancelled = True
        self._end(answer, Finish.ABORT)

    def abort(self, answer: Answer) -> None:
        """End an answer with what it has."""
        self._end(answer, Finish.ABORT)

    def abort_all(self) -> None:
        for answer in set(self._owner.values()):
            self._end(answer, Finish.ABORT)

    def _end(self, answer: Answer, finish: Finish) -> None:
        for sequence in answer.sequences:
            if sequence.finish is None:
                self.batcher.remove(sequence)
                sequence.finish = finish
                self._owner.pop(sequence, None)
                self._stop_renewing(sequence)
        answer.wake()
        self._wake.set()

    def hand_over(self, asked: PullRequest) -> PullReply:
        """What lies in the blocks that a prefill left for another engine; they are free now."""
        reply = self.leases.hand_over(asked, time.perf_counter())
        self._wake.set()
        return reply

    def _stop_renewing(self, sequence: Sequence) -> None:
        task = self._renewals.pop(sequence, None)
        if task is not None:
            task.cancel()

    async def run(self) -> None:
        """Compute for ever."""
        try:
            await self._run()
        finally:
            for task in (*self._pulls, *self._renewals.values()):
                task.cancel()

    async def _run(self) -> None:
        clock = time.perf_counter
        step: Step | None = None
        ends_s = 0.0
        while True:
            if step is None:
                self._wake.clear()
                step = self._plan(clock())
                if step is None:
                    await self._idle()
                    continue
                ends_s = clock() + self._duration_s(step)
            await asyncio.sleep(max(ends_s - clock(), WAKE_S_MIN))
            while self.faults.hang or self.sleep_level or self.death is not Death.NONE:
                await asyncio.sleep(HANG_POLL_S)
            now_s = clock()
            ends_s = max(ends_s, now_s - LAG_S_MAX)
            step, ends_s = self._advance(step, ends_s, now_s)

    def _advance(self, step: Step, ends_s: float, now_s: float) -> tuple[Step | None, float]:
        """Complete every step that has ended by `now_s`; the step under way and its end."""
        spoke: set[Answer] = set()
        current: Step | None = step
        for _ in range(STEPS_PER_WAKE_MAX):
            if current is None or ends_s > now_s or self.death is not Death.NONE:
                break
            self._complete(current, ends_s, spoke)
            current = self._plan(ends_s)
            if current is not None:
                ends_s += self._duration_s(current)
        for answer in spoke:
            answer.wake()
        return current, ends_s

    async def _idle(self) -> None:
        """Wait for work, or for the next lease on pinned blocks to end."""
        if not self.leases:
            await self._wake.wait()
            return
        try:
            async with asyncio.timeout(max(0.0, self.leases.expires_s - time.perf_counter())):
                await self._wake.wait()
        except TimeoutError:
            self.leases.expire(time.perf_counter())

    def _duration_s(self, step: Step) -> float:
        modelled_s = self._times.step_s(step.tokens, step.kv_tokens, step.attention_pairs)
        return modelled_s * self.faults.slow_factor

    def _plan(self, now_s: float) -> Step | None:
        if self.leases:
            self.leases.expire(time.perf_counter())
        step, pulls = self.batcher.plan()
        for sequence in pulls:
            task = asyncio.ensure_future(self._pull(sequence))
            self._pulls.add(task)
            task.add_done_callback(self._pulls.discard)
        if step is not None:
            for sequence in step.admitted:
                if not sequence.first_step_s:
                    sequence.first_step_s = now_s
        return step

    async def _pull(self, sequence: Sequence) -> None:
        """Fetch the prompt's KV: the modelled time of the bytes, then the other engine frees its
        blocks.
        """
        answer = self._owner.get(sequence)
        remote = answer.remote if answer else None
        result = Pulled.NOTHING
        if remote is not None:
            missing = max(0, sequence.total - sequence.computed)
            size = missing * self.options.kv_bytes_per_token
            transfer_s = (
                self.options.transfer_latency_ms / 1000 + size / self.options.transfer_bytes_per_s
            )
            await asyncio.sleep(transfer_s / self.options.speedup)
            full = sequence.prompt_tokens // BLOCK_TOKENS
            result = await pull(remote, sequence.digests[:full], self.options.kv_handshake_s)
        self._stop_renewing(sequence)
        if result is Pulled.NOTHING:
            self.metrics.kv_pull_failures += 1
            if self.options.kv_load_failure_policy == "fail" and answer is not None:
                self._end(answer, Finish.ERROR)
                return
        self.batcher.pulled(sequence, result)
        self._wake.set()

    def _complete(self, step: Step, ended_s: float, spoke: set[Answer]) -> None:
        metrics = self.metrics
        spoken = self.batcher.complete(step)
        if self._kv_publisher is not None:
            self._kv_publisher.flush(self.faults)
        for sequence in spoken:
            answer = self._owner[sequence]
            spoke.add(answer)
            metrics.generation_tokens += 1
            if sequence.generated == 1:
                sequence.first_token_s = max(ended_s, sequence.arrival_s)
                metrics.prompt_tokens += sequence.prompt_tokens
                metrics.ttft.observe(sequence.first_token_s - sequence.arrival_s)
            else:
                metrics.itl.observe(ended_s - sequence.last_token_s)
            sequence.last_token_s = ended_s
            if sequence.finish is not None:
                self._finished(sequence, answer)
        if self.faults.death is not Death.NONE and metrics.generation_tokens >= self._dies_at:
            self._die()

    def _finished(self, sequence: Sequence, answer: Answer) -> None:
        del self._owner[sequence]
        metrics = self.metrics
        metrics.finished[str(sequence.finish)] += 1
        last_s = max(sequence.last_token_s, sequence.first_token_s)
        metrics.e2e.observe(last_s - sequence.arrival_s)
        metrics.queue.observe(max(0.0, sequence.first_step_s - sequence.arrival_s))
        metrics.prefill.observe(max(0.0, sequence.first_token_s - sequence.first_step_s))
        metrics.decode.observe(last_s - sequence.first_token_s)
        if sequence.generated > 1:
            metrics.tpot.observe((last_s - sequence.first_token_s) / (sequence.generated - 1))
        if sequence.is_pinned:
            full = sequence.prompt_tokens // BLOCK_TOKENS
            self.leases.hold(
                answer.request_id,
                sequence.blocks,
                sequence.digests[:full],
                time.perf_counter(),
            )

    def exposition(self) -> bytes:
        """One scrape of `/metrics`."""
        self.leases.expire(time.perf_counter())
        metrics = self.metrics
        batcher = self.batcher
        text = Exposition(self.model)
        waiting = len(batcher.waiting) + len(batcher.pulling)
        text.sample("gauge", "num_requests_running", len(batcher.running))
        text.sample("gauge", "num_requests_waiting", waiting)
        text.sample("gauge", "kv_cache_usage_perc", batcher.pool.used_ratio)
        text.sample("counter", "prefix_cache_queries_total", batcher.counters.prefix_queries)
        text.sample("counter", "prefix_cache_hits_total", batcher.counters.prefix_hits)
        counters = batcher.counters
        unfound = counters.prefix_queries - counters.prefix_hits
        text.sample("counter", "external_prefix_cache_queries_total", unfound)
        text.sample("counter", "external_prefix_cache_hits_total", counters.prompt_pulled)
        computed = max(0, metrics.prompt_tokens - counters.prefix_hits - counters.prompt_pulled)
        sources = {
            "local_compute": computed,
            "local_cache_hit": counters.prefix_hits,
            "external_kv_transfer": counters.prompt_pulled,
        }
        for at, (source, tokens) in enumerate(sources.items()):
            add = text.another if at else partial(text.sample, "counter")
            add("prompt_tokens_by_source_total", tokens, f'source="{source}"')
        text.sample("counter", "num_preemptions_total", batcher.counters.preemptions)
        text.sample("counter", "prompt_tokens_total", metrics.prompt_tokens)
        text.sample("counter", "generation_tokens_total", metrics.generation_tokens)
        reason = 'reason="max_num_queued_reqs"'
        text.sample("counter", "admission_rejections_total", metrics.rejections, reason)
        text.sample("counter", "nixl_num_kv_expired_reqs_total", self.leases.expired)
        text.sample("counter", "nixl_num_failed_transfers_total", metrics.kv_pull_failures)
        for at, (finish, count) in enumerate(metrics.finished.items()):
            add = text.another if at else partial(text.sample, "counter")
            add("request_success_total", count, f'finished_reason="{finish}"')
        text.histogram("time_to_first_token_seconds", metrics.ttft)
        text.histogram("inter_token_latency_seconds", metrics.itl)
        text.histogram("request_time_per_output_token_seconds", metrics.tpot)
        text.histogram("e2e_request_latency_seconds", metrics.e2e)
        text.histogram("request_queue_time_seconds", metrics.queue)
        text.histogram("request_prefill_time_seconds", metrics.prefill)
        text.histogram("request_decode_time_seconds", metrics.decode)
        caching = self.options.enable_prefix_caching
        text.sample(
            "gauge",
            "cache_config_info",
            1.0,
            f'block_size="{BLOCK_TOKENS}",num_gpu_blocks="{self.blocks}",'
            f'kv_cache_size_tokens="{self.blocks * BLOCK_TOKENS}",'
            f'enable_prefix_caching="{caching}"',
        )
        return text.text()
