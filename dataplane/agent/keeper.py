"""Keeps one engine running: adopts or starts it, waits until it is ready, watches it, starts it
again, and takes it out of work before it is touched.

A process that lives but does not do its work is reported as failed, and started again when that
lasts. One that ends again and again is cordoned and left alone.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from dataplane.agent import log
from dataplane.agent.disk import AgentDisk, DiskError, ProcessRecord
from dataplane.agent.load_time import alike, learn, medium_of
from dataplane.agent.ports import PortLease, lease_ports
from dataplane.agent.probe import BadStatus, Probe
from dataplane.agent.process import (
    EngineProcess,
    boot_id,
    engine_environment,
    find_launch,
    new_token,
    session_members,
    stat_of,
)
from dataplane.agent.vitals import (
    CANARY_S_MAX,
    SILENT_S_FAILED,
    SILENT_S_RESTART,
    Health,
    Vitals,
)
from dataplane.engines.base import EngineCapacity, EngineError, EngineKind
from dataplane.engines.controls import Call, Controls
from dataplane.engines.kv_connectors import transfer_of
from dataplane.engines.kv_wire import KvEndpoints, PublishesKv
from dataplane.engines.load_log import LoadLog
from dataplane.protocol.messages import (
    RANK_SEPARATOR,
    Capability,
    EngineFacts,
    EngineSpec,
    EngineState,
    EngineTelemetry,
    Feature,
    Medium,
    Phase,
)

SCRAPE_S = 0.25
HEALTH_S = 1.0
READY_POLL_S = 0.1
ADOPT_S_MAX = 3.0
PROBE_S_MIN = 0.25

BACKOFF_S_MIN = 0.2
BACKOFF_S_MAX = 30.0
# This many ends within the window are a crash loop.
CRASHES_MAX = 5
CRASH_WINDOW_S = 120.0
CRASH_LOOP: Final = "crash loop"

# An engine whose work no replica has claimed is drained when it has been idle for this long, for
# calls may be on their way when the drain is told.
DRAIN_SETTLE_S = 1.0
# An engine that is to stop at once is not kept from it for longer by a replica that does not answer.
STOP_WITHDRAW_S_MAX = 2.0
# Weights come back over PCIe or from disk; a call to sleep or wake has this long.
SLEEP_S_MAX = 600.0
ANSWER_CHARACTERS_MAX: Final = 500
SERVER_ERROR: Final = 500
CONTROL_S_MAX = 60.0


class Lent(Protocol):
    """What replicas may still do with an engine."""

    def __call__(self, engine_id: str) -> tuple[bool, int]:
        """Whether all of them know that it takes nothing new, and the seats of their calls there."""


class Refusal(EngineError):
    """A command that can not be right. Nothing was done."""


class EngineKeeper:
    """State of one engine and the task that keeps it. `on_change` is called after every change of
    state, `on_crash_loop` when it is given up.
    """

    def __init__(
        self,
        spec: EngineSpec,
        kind: EngineKind,
        controls: Controls,
        *,
        host: str,
        owner: str,
        disk: AgentDisk,
        probe: Probe,
        stop_grace_s: float,
        lent: Lent,
        stuck_s: float,
        on_change: Callable[["EngineKeeper"], None],
        on_crash_loop: Callable[["EngineKeeper", str], None],
        cordon: str = "",
    ) -> None:
        self.spec = spec
        self.state = EngineState.STOPPED
        self.port = 0
        self._ports: list[int] = []
        self.capacity: EngineCapacity | None = None
        self.telemetry: EngineTelemetry | None = None
        # Of each data-parallel rank, where requests name one.
        self.rank_telemetry: list[EngineTelemetry] = []
        self.scrapes = 0
        self.adapters: frozenset[str] = frozenset()
        self.started_ms = 0
        self.detail = ""
        # True from an adoption until the next start: work may run that nobody has credits for.
        self.is_adopted = False
        self.is_crash_looping = False
        self.cordon = cordon
        self.sleep_level = 0
        self.wake_ms = 0
        self.load_ms = 0
        self.load_medium = ""
        # The way that it is on, and since when, in seconds of the monotonic clock.
        self.phase = Phase.SERVING
        self.phase_since_s = 0.0
        self.calls_left = 0
        self._kind = kind
        self._controls = controls
        self._can = controls.capabilities(spec)
        self._owner = owner
        self._lent = lent
        self._stuck_s = stuck_s
        self._on_crash_loop = on_crash_loop
        self._load_log = LoadLog(disk.engine_folder(spec.engine_id) / "engine.log")
        self._uncordoned = asyncio.Event()
        self._process: EngineProcess | None = None
        self._host = host
        self._disk = disk
        self._probe = probe
        self._stop_grace_s = stop_grace_s
        self._on_change = on_change
        self._stopping = asyncio.Event()
        self._is_draining = False
        self._is_leaving = False
        self._crashes: deque[float] = deque(maxlen=CRASHES_MAX)
        self._task: asyncio.Task[None] | None = None

    def facts(self) -> EngineFacts:
        """The engine as a whole, whatever its ranks."""
        capacity = self.capacity
        traits = self._kind.traits(self.spec)
        return EngineFacts(
            engine_id=self.spec.engine_id,
            model=self.spec.model,
            role=self.spec.role,
            port=self.port,
            kind=self.spec.kind,
            state=self.state,
            gpus=self.spec.gpus,
            seats=capacity.seats if capacity else 0,
            kv_tokens=capacity.kv_tokens if capacity else 0,
            block_tokens=capacity.block_tokens if capacity else 0,
            context_tokens_max=capacity.context_tokens_max if capacity else 0,
            started_ms=self.started_ms,
            speedup=float(self.spec.options.get("speedup", 1.0)),
            transfer=transfer_of(self._kind, self.spec, self._ports),
            cordon=self.cordon,
            sleep_level=self.sleep_level,
            wake_ms=self.wake_ms,
            load_ms=self.load_ms,
            load_medium=self.load_medium,
            capabilities=sorted(self._can),
            lacks=sorted(traits.lacks),
            profile=self.spec.profile,
            pipeline=traits.pipeline,
            expert_gpus=traits.expert_gpus,
            speculative_tokens=traits.speculative_tokens,
            kv_host_bytes=traits.kv_host_bytes,
            adapter_slots=traits.adapter_slots,
            adapters=sorted(self.adapters),
        )

    def progress(self) -> tuple[Phase, float | None]:
        """The phase that it is in, and which part of that is done where something tells it."""
        if self.state is EngineState.STARTING:
            self._load_log.read()
            return self._load_log.phase, self._load_log.done_ratio
        return self.phase, None

    def expected_ms(self) -> int:
        """What the way that it is on took before, 0 when that is not known."""
        if self.state is EngineState.STARTING:
            return self._disk.load_times().get(alike(self.spec), 0)
        return self.wake_ms if self.phase is Phase.WAKING else 0

    def kv_endpoints(self) -> KvEndpoints | None:
        """Where the engine publishes its KV events; None when it does not, or does not run."""
        if self.state is EngineState.STOPPED or not isinstance(self._kind, PublishesKv):
            return None
        return self._kind.kv_endpoints(self.spec, self._host, self.port) if self.port else None

    def declared(self) -> list[EngineFacts]:
        """The engine as the control plane routes to it: once, or once for each data-parallel rank.

        Of the ranks, the first one's KV events are followed.
        """
        whole, traits = self.facts(), self._kind.traits(self.spec)
        if not traits.has_ranks:
            return [whole]
        return [
            msgspec.structs.replace(
                whole,
                engine_id=name,
                rank=rank,
                gpus=traits.gpus,
                seats=whole.seats // traits.ranks,
                kv_tokens=whole.kv_tokens // traits.ranks,
                lacks=whole.lacks if rank == 0 else sorted({*traits.lacks, Feature.KV_EVENTS}),
            )
            for rank, name in enumerate(self.names())
        ]

    def names(self) -> list[str]:
        """The ids under which the engine is declared."""
        traits = self._kind.traits(self.spec)
        engine_id = self.spec.engine_id
        if not traits.has_ranks:
            return [engine_id]
        return [f"{engine_id}{RANK_SEPARATOR}{rank}" for rank in range(traits.ranks)]

    def reports(self) -> list[EngineTelemetry]:
        """The latest numbers, of each id under which the engine is declared."""
        if self.rank_telemetry:
            return self.rank_telemetry
        return [self.telemetry] if self.telemetry is not None else []

    @property
    def is_kept(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Begin to keep the engine."""
        self._set(EngineState.STARTING)
        self._task = asyncio.create_task(self._keep(), name=f"keep {self.spec.engine_id}")

    async def stop(self) -> None:
        """End the engine: SIGTERM, then SIGKILL. Returns when nothing of it is left.

        Whoever could send to it is to know before that it takes nothing: see `close`.
        """
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def detach(self) -> None:
        """Stop keeping the engine and leave it running."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    # ------------------------------------------------------------ out of work

    async def close(self, deadline_s: float) -> bool:
        """Take no more work, and wait until every replica knows that and the last call has ended.

        False when `deadline_s` was over before that.

        INVARIANT: a replica that has not said that it knows still holds the seats that it was lent,
        until their term ends; one that has holds those of its running calls. So no seat held means
        that all know, and that nothing runs.
        """
        self._is_draining = True
        if self.state in (EngineState.SERVING, EngineState.SLEEPING):
            self._set(EngineState.DRAINING)
        self._enter(Phase.CLOSING)
        now_s = time.monotonic()
        ends_s, idle_from_s, seen = now_s + deadline_s, now_s, self.scrapes
        while self.is_kept:
            now_s = time.monotonic()
            is_withdrawn, calls = self._lent_now()
            busy = self.telemetry.running + self.telemetry.waiting if self.telemetry else 0
            # Work that no replica has lent itself is seen in the engine's own numbers only.
            self.calls_left = max(calls, busy)
            if is_withdrawn and self.phase is Phase.CLOSING:
                self._enter(Phase.DRAINING)
            if busy:
                idle_from_s = now_s
            # One that does not answer, or never has, can not be seen idle.
            is_idle = self.state is not EngineState.DRAINING or (
                self.scrapes > seen and now_s - idle_from_s >= DRAIN_SETTLE_S
            )
            if is_idle and not calls:
                return True
            if now_s >= ends_s:
                return False
            await asyncio.sleep(READY_POLL_S)
        return True

    async def withdraw(self, withdraw_s_max: float) -> None:
        """Take no more work, and wait until every replica knows that, at most so long."""
        self._is_draining = self._is_leaving = True
        if self.state in (EngineState.SERVING, EngineState.SLEEPING):
            self._set(EngineState.DRAINING)
        self._enter(Phase.CLOSING)
        ends_s = time.monotonic() + withdraw_s_max
        while self.is_kept and time.monotonic() < ends_s:
            is_withdrawn, self.calls_left = self._lent_now()
            if is_withdrawn:
                return
            await asyncio.sleep(READY_POLL_S)

    def _lent_now(self) -> tuple[bool, int]:
        """What replicas may still do with the engine, all its ranks together."""
        lent = [self._lent(name) for name in self.names()]
        return all(is_withdrawn for is_withdrawn, _ in lent), sum(calls for _, calls in lent)

    def reopen(self) -> None:
        """Take work again, unless it is being ended by now."""
        if self._is_leaving or self._stopping.is_set():
            return
        self._is_draining = False
        self.calls_left = 0
        self._enter(Phase.SERVING)
        # One that has failed meanwhile says itself when it is well again.
        if self.state in (EngineState.DRAINING, EngineState.SLEEPING):
            self._set(EngineState.SLEEPING if self.sleep_level else EngineState.SERVING)

    async def drain(self, deadline_s: float) -> None:
        """Take no more work, wait until there is none, at most `deadline_s`, then stop."""
        if not self.is_kept:
            return
        # One that ends by itself from now on is not started again.
        self._is_leaving = True
        await self.close(deadline_s)
        self._enter(Phase.STOPPING)
        await self.stop()

    # ------------------------------------------------------------ sleep, cache, adapters

    def check_can(self, capability: Capability) -> None:
        """Raise Refusal when the engine can not do this, or is not in a state to do it."""
        if capability not in self._can:
            raise Refusal(
                f"engine `{self.spec.engine_id}` has no `{capability}`: its kind lacks it, or its"
                " options do not switch it on"
            )
        if self.state not in (EngineState.SERVING, EngineState.SLEEPING):
            raise Refusal(f"engine `{self.spec.engine_id}` is {self.state}")

    async def sleep(self, level: int, deadline_s: float) -> None:
        """Let its calls end, then give its memory back: level 1 keeps the weights in host memory.

        Raises EngineError; the engine serves then as before.
        """
        self.check_can(Capability.SLEEP)
        if self.sleep_level == level:
            return
        if self.sleep_level:
            raise Refusal(
                f"engine `{self.spec.engine_id}` sleeps at level {self.sleep_level}; wake it first"
            )
        if not await self.close(deadline_s):
            calls = self.calls_left
            self.reopen()
            raise EngineError(f"{calls} calls still ran after {deadline_s:.0f} s; it stays awake")
        self._enter(Phase.FALLING_ASLEEP)
        try:
            await self._call(self._controls.sleep(level), SLEEP_S_MAX)
            await self._check_asleep()
        except (EngineError, OSError):
            self.reopen()
            raise
        self.sleep_level = level
        self._note_sleep()
        self.reopen()

    async def wake(self) -> None:
        """Bring its weights back; returns when it has completed a token. Raises EngineError."""
        self.check_can(Capability.SLEEP)
        if not self.sleep_level:
            return
        self._enter(Phase.WAKING)
        began_s = time.monotonic()
        try:
            await self._call(self._controls.wake(), SLEEP_S_MAX)
            await self._check_awake()
        except EngineError:
            self._enter(Phase.SERVING)
            raise
        self.wake_ms = int((time.monotonic() - began_s) * 1000)
        self.sleep_level = 0
        self._note_sleep()
        self.reopen()

    async def reset_cache(self) -> None:
        """Forget every prompt prefix. Raises EngineError, as when blocks are in use."""
        self.check_can(Capability.RESET_CACHE)
        answer = await self._call(self._controls.reset_cache(), CONTROL_S_MAX)
        if not self._controls.is_reset(answer):
            raise EngineError("the cache was not reset: running calls use its blocks")

    async def load_adapter(self, name: str, path: str) -> None:
        self.check_can(Capability.LORA)
        await self._call(self._controls.load_adapter(name, path), SLEEP_S_MAX)
        await self._look_again()

    async def unload_adapter(self, name: str) -> None:
        self.check_can(Capability.LORA)
        await self._call(self._controls.unload_adapter(name), CONTROL_S_MAX)
        await self._look_again()

    async def _look_again(self) -> None:
        """Tell what the engine has now, before a command that changed it is done."""
        try:
            await self._note_adapters()
        except OSError as error:
            raise EngineError(str(error)) from error

    async def _call(self, call: Call, timeout_s: float) -> bytes:
        try:
            return await self._probe.call(self.port, call, timeout_s)
        except BadStatus as error:
            words = error.body.decode(errors="replace")[:ANSWER_CHARACTERS_MAX]
            raise EngineError(f"{error}: {words}") from error
        except OSError as error:
            raise EngineError(str(error)) from error

    async def _check_asleep(self) -> None:
        if not await self._is_asleep():
            raise EngineError("it was told to sleep and says that it is awake")

    async def _check_awake(self) -> None:
        if await self._is_asleep():
            raise EngineError("it was told to wake and says that it sleeps")
        canary = self._controls.canary(self.spec)
        if canary is not None:
            await self._call(canary, CONTROL_S_MAX)

    async def _is_asleep(self) -> bool:
        answer = await self._call(self._controls.asleep(), CONTROL_S_MAX)
        try:
            return self._controls.is_asleep(answer)
        except ValueError as error:
            raise EngineError(f"it does not say whether it sleeps: {error}") from error

    def _note_sleep(self) -> None:
        record, process = self._disk.process(self.spec.engine_id), self._process
        if record is not None and process is not None:
            self._save(record, process, was_ready=True)

    # ------------------------------------------------------------ cordon

    def set_cordon(self, why: str) -> None:
        """Take nothing new, for this reason; empty: take work again, and start what was given up."""
        if why == self.cordon:
            return
        self.cordon = why
        if not why:
            self._crashes.clear()
            self._uncordoned.set()
        self._on_change(self)

    async def until_serving(self) -> None:
        """Return when the engine serves. Raises EngineError when it is stopped or in a crash
        loop.
        """
        while self.state not in (EngineState.SERVING, EngineState.SLEEPING):
            if not self.is_kept or self._is_draining:
                raise EngineError(f"engine `{self.spec.engine_id}` was stopped before it served")
            if self.is_crash_looping:
                raise EngineError(f"engine `{self.spec.engine_id}` does not start: {self.detail}")
            await asyncio.sleep(READY_POLL_S)

    async def _keep(self) -> None:
        process: EngineProcess | None = None
        may_adopt = True
        while True:
            try:
                if may_adopt:
                    may_adopt = False
                    process = await self._adopt()
                if process is None:
                    process = await self._launch()
                self._process = process
                await self._until_ready(process)
                await self._watch(process)
            except (EngineError, DiskError, OSError) as error:
                if not self._stopping.is_set():
                    self.detail = str(error)
                    log.warning("engine failed", engine=self.spec.engine_id, detail=self.detail)
                    self._set(EngineState.FAILED)
            if process is not None:
                await self._end(process)
                process = self._process = None
            self.sleep_level = 0
            if self._stopping.is_set() or self._is_leaving:
                self._set(EngineState.STOPPED)
                return
            await self._back_off()

    async def _end(self, process: EngineProcess) -> None:
        self._probe.forget(self.port)
        try:
            if self._stopping.is_set():
                await process.terminate(self._stop_grace_s)
            else:
                await process.kill()
            self._disk.forget_process(self.spec.engine_id)
        except (EngineError, OSError) as error:
            log.warning("engine not ended", engine=self.spec.engine_id, detail=str(error))

    async def _back_off(self) -> None:
        """Pause before the next start: it doubles with each end in the window, and one end too many
        ends the starts until somebody says otherwise.
        """
        now_s = time.monotonic()
        self._crashes.append(now_s)
        recent = sum(1 for at_s in self._crashes if now_s - at_s < CRASH_WINDOW_S)
        if recent < CRASHES_MAX:
            await self._pause(min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** (recent - 1)))
            return
        self.is_crash_looping = True
        why = f"{CRASH_LOOP}: it ended {recent} times in {CRASH_WINDOW_S:.0f} s; {self.detail}"
        log.warning("engine in a crash loop", engine=self.spec.engine_id, detail=self.detail)
        self._uncordoned.clear()
        self._on_crash_loop(self, why)
        waits = (
            asyncio.ensure_future(self._uncordoned.wait()),
            asyncio.ensure_future(self._stopping.wait()),
        )
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self.is_crash_looping = False

    async def _adopt(self) -> EngineProcess | None:
        """The engine that an earlier agent has left running, when it is the same and answers;
        else its end.
        """
        record = self._disk.process(self.spec.engine_id)
        if record is None:
            return None
        process = recorded_process(record)
        if process is None:
            self._disk.forget_process(self.spec.engine_id)
            return None
        if process.is_alive() and record.spec == self.spec:
            self.port = record.ports[0]
            self._ports = record.ports
            self.started_ms = record.started_ms
            if not record.was_ready or await self._answers():
                self.is_adopted = record.was_ready
                self.load_ms, self.load_medium = record.load_ms, record.load_medium
                self.sleep_level = record.sleep_level
                if self.sleep_level and await self._has_woken():
                    self.sleep_level = 0
                log.info("engine adopted", engine=self.spec.engine_id, pid=process.pid)
                return process
        log.info("engine left over is ended", engine=self.spec.engine_id, pid=process.pid)
        await self._end(process)
        return None

    async def _answers(self) -> bool:
        try:
            await self._probe.get(self.port, self._kind.health_path, ADOPT_S_MAX)
        except OSError:
            return False
        return True

    async def _has_woken(self) -> bool:
        """Whether somebody else has woken it; one that does not say so sleeps on."""
        try:
            return not await self._is_asleep()
        except EngineError:
            return False

    async def _launch(self) -> EngineProcess:
        spec = self.spec
        if self.state is not EngineState.STARTING:
            self._set(EngineState.STARTING)
        token = new_token()
        try:
            ports = self._kind.ports_given(spec, self._host)
            # Ten thousand ports at worst; not a matter for the event loop.
            lease = (
                PortLease(ports, [])
                if ports
                else await asyncio.to_thread(
                    lease_ports, self._host, self._kind.ports_needed(spec), token
                )
            )
        except OSError as error:
            raise EngineError(f"no port on {self._host}: {error}") from error
        try:
            ports = lease.ports
            record = ProcessRecord(spec=spec, ports=ports, token=token, boot_id=boot_id())
            # Written before the start too, so that a crash in between leaves no unknown process.
            self._disk.save_process(spec.engine_id, record)
            launch = self._kind.launch(spec, self._host, ports)
            environment = engine_environment(os.environ, launch, token, self._owner)
            folder = self._disk.engine_folder(spec.engine_id)
            process = EngineProcess.start(launch, environment, folder, lease.locks)
        finally:
            lease.close()
        self.port = ports[0]
        self._ports = ports
        self.started_ms = int(time.time() * 1000)
        self.is_adopted = False
        self.telemetry = None
        self.load_ms, self.load_medium = 0, ""
        self._load_log = LoadLog(folder / "engine.log")
        self._enter(Phase.STARTING)
        self.rank_telemetry = []
        self.adapters = frozenset()
        self._save(record, process, was_ready=False)
        log.info("engine started", engine=spec.engine_id, pid=process.pid, port=self.port)
        return process

    def _save(self, record: ProcessRecord, process: EngineProcess, *, was_ready: bool) -> None:
        self._disk.save_process(
            self.spec.engine_id,
            ProcessRecord(
                spec=record.spec,
                ports=record.ports,
                token=record.token,
                boot_id=record.boot_id,
                pid=process.pid,
                start_ticks=process.start_ticks,
                started_ms=self.started_ms,
                was_ready=was_ready,
                sleep_level=self.sleep_level,
                load_ms=self.load_ms,
                load_medium=self.load_medium,
            ),
        )

    async def _until_ready(self, process: EngineProcess) -> None:
        """Return when the engine serves, or when it is to be stopped. Raises EngineError."""
        ends_s = time.monotonic() + self._kind.startup_s_max(self.spec)
        while not self._stopping.is_set():
            if not process.is_alive():
                raise EngineError(f"{process.last_words()} before it was ready")
            try:
                await self._probe.get(self.port, self._kind.health_path, SILENT_S_FAILED)
                self.capacity = await self._kind.capacity(self.spec, self._fetch)
                await self._scrape(SILENT_S_FAILED)
                await self._look_for_adapters()
            except OSError as error:
                if time.monotonic() > ends_s:
                    raise EngineError(f"not ready in time: {error}") from error
                await self._pause(READY_POLL_S)
                continue
            record = self._disk.process(self.spec.engine_id)
            if record is not None:
                if not record.was_ready:
                    self._measure_load(process)
                self._save(record, process, was_ready=True)
            self._well()
            return

    def _measure_load(self, process: EngineProcess) -> None:
        """The start is over: how long it took, and where the weights came from."""
        self._load_log.read()
        pids = session_members(process.pid, process.start_ticks)
        self.load_ms = max(1, int(time.time() * 1000) - self.started_ms)
        try:
            self.load_medium = str(medium_of(self.spec, self._load_log, pids))
        except OSError:
            self.load_medium = str(Medium.UNKNOWN)
        self._disk.save_load_times(learn(self._disk.load_times(), self.spec, self.load_ms))
        log.info(
            "engine loaded",
            engine=self.spec.engine_id,
            load_ms=self.load_ms,
            medium=self.load_medium,
        )

    async def _watch(self, process: EngineProcess) -> None:
        """Return when the engine is to be stopped. Raises EngineError when it died or is lost."""
        health_s = time.monotonic()
        vitals = Vitals(health_s, self._stuck_s)
        canary: asyncio.Task[str] | None = None
        try:
            while not self._stopping.is_set():
                now_s = time.monotonic()
                # By the state and not by the time: a probe can give up a moment before the limit, and
                # the failure is told before the long wait for a restart begins.
                is_told = self.state is EngineState.FAILED
                limit_s = SILENT_S_RESTART if is_told else SILENT_S_FAILED
                timeout_s = max(PROBE_S_MIN, limit_s - vitals.silent_s(now_s))
                try:
                    await self._scrape(timeout_s)
                    if self.telemetry is not None:
                        vitals.scraped(self.telemetry, time.monotonic())
                    if now_s - health_s >= HEALTH_S:
                        await self._probe.get(self.port, self._kind.health_path, timeout_s)
                        health_s = now_s
                        vitals.healthy()
                        await self._note_adapters()
                    vitals.answered(time.monotonic())
                except BadStatus as error:
                    if error.status >= SERVER_ERROR:
                        vitals.dead(str(error), time.monotonic())
                    vitals.unanswered(str(error))
                except (OSError, EngineError) as error:
                    vitals.unanswered(str(error))
                if not process.is_alive():
                    raise EngineError(process.last_words())
                if canary is not None and canary.done():
                    vitals.canary(canary.result(), time.monotonic())
                    canary = None
                elif canary is None and self._may_ask() and vitals.wants_canary(now_s):
                    canary = asyncio.create_task(self._canary())
                self._heed(vitals, time.monotonic())
                await self._pause(SCRAPE_S)
        finally:
            if canary is not None:
                canary.cancel()

    def _may_ask(self) -> bool:
        """A canary would stand in the way of an engine that falls asleep or is emptied."""
        if self._is_draining or self.sleep_level:
            return False
        return self._controls.canary(self.spec) is not None

    async def _canary(self) -> str:
        """Why one token could not be computed; empty when it was."""
        call = self._controls.canary(self.spec)
        if call is None:
            return ""
        try:
            await self._probe.call(self.port, call, CANARY_S_MAX)
        except BadStatus as error:
            # What it refuses it has understood; that it computes is not known.
            return "" if error.status < SERVER_ERROR else str(error)
        except OSError as error:
            return str(error)
        return ""

    def _heed(self, vitals: Vitals, now_s: float) -> None:
        verdict = vitals.verdict(now_s)
        match verdict.health:
            case Health.WELL:
                self._well()
            case Health.FAILED:
                if self.state is not EngineState.FAILED:
                    self.detail = verdict.why
                    log.warning("engine unwell", engine=self.spec.engine_id, detail=self.detail)
                    self._set(EngineState.FAILED)
            case Health.LOST:
                raise EngineError(verdict.why)

    def _well(self) -> None:
        state = EngineState.SERVING
        if self._is_draining:
            state = EngineState.DRAINING
        elif self.sleep_level:
            state = EngineState.SLEEPING
        if self.state is not state and not self._stopping.is_set():
            self.detail = ""
            if self.phase is Phase.STARTING:
                self._enter(Phase.SERVING)
            self._set(state)

    async def _scrape(self, timeout_s: float) -> None:
        exposition = await self._probe.get(self.port, self._kind.metrics_path, timeout_s)
        self.telemetry = self._kind.telemetry(self.spec.engine_id, exposition)
        names = self.names()
        if len(names) > 1:
            self.rank_telemetry = [
                self._kind.telemetry(name, exposition, rank) for rank, name in enumerate(names)
            ]
        self.scrapes += 1

    async def _look_for_adapters(self) -> bool:
        """Whether others are loaded than were at the last look; whoever loaded them."""
        if not self._kind.traits(self.spec).adapter_slots:
            return False
        before = self.adapters
        self.adapters = await self._kind.loaded_adapters(self.spec, self._fetch)
        return self.adapters != before

    async def _note_adapters(self) -> None:
        if await self._look_for_adapters():
            self._on_change(self)

    async def _fetch(self, path: str) -> bytes:
        return await self._probe.get(self.port, path, SILENT_S_FAILED)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not into a stop."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    def _enter(self, phase: Phase) -> None:
        if phase is not Phase.DRAINING or self.phase is not Phase.CLOSING:
            self.phase_since_s = time.monotonic()
        self.phase = phase

    def _set(self, state: EngineState) -> None:
        self.state = state
        self._on_change(self)


def recorded_process(record: ProcessRecord) -> EngineProcess | None:
    """The process of a record, alive or dead with its session perhaps alive; None when nothing
    can be left.
    """
    if record.boot_id != boot_id():
        return None
    if record.pid:
        return EngineProcess(record.pid, record.start_ticks)
    pid = find_launch(record.token)
    stat = stat_of(pid) if pid is not None else None
    if pid is None or stat is None:
        return None
    return EngineProcess(pid, stat.start_ticks)
