"""Keeps one engine running: adopts or starts it, waits until it is ready, watches it, starts it
again.

A process that lives but does not answer is reported as failed, and started again when it stays
silent.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable

from dataplane.agent import log
from dataplane.agent.disk import AgentDisk, DiskError, ProcessRecord
from dataplane.agent.probe import Probe
from dataplane.agent.process import (
    EngineProcess,
    boot_id,
    cut_log,
    engine_environment,
    find_launch,
    free_ports,
    new_token,
    stat_of,
)
from dataplane.engines.base import EngineCapacity, EngineError, EngineKind
from dataplane.protocol.messages import EngineFacts, EngineSpec, EngineState, EngineTelemetry

SCRAPE_S = 0.25
HEALTH_S = 1.0
READY_POLL_S = 0.1
# Silence after which an engine is reported failed, and after which it is started again.
SILENT_S_FAILED = 3.0
SILENT_S_RESTART = 10.0
ADOPT_S_MAX = 3.0
PROBE_S_MIN = 0.25

BACKOFF_S_MIN = 0.2
BACKOFF_S_MAX = 30.0
# This many ends within the window are a crash loop; from then on it is tried once a while.
CRASHES_MAX = 5
CRASH_WINDOW_S = 120.0
CRASH_LOOP_RETRY_S = 60.0

# A drained engine has been idle for this long, for calls may be on their way when the drain is
# told.
DRAIN_SETTLE_S = 1.0


class EngineKeeper:
    """State of one engine and the task that keeps it. `on_change` is called after every change of
    state.
    """

    def __init__(
        self,
        spec: EngineSpec,
        kind: EngineKind,
        *,
        host: str,
        disk: AgentDisk,
        probe: Probe,
        stop_grace_s: float,
        on_change: Callable[["EngineKeeper"], None],
    ) -> None:
        self.spec = spec
        self.state = EngineState.STOPPED
        self.port = 0
        self.capacity: EngineCapacity | None = None
        self.telemetry: EngineTelemetry | None = None
        self.scrapes = 0
        self.started_ms = 0
        self.detail = ""
        # True from an adoption until the next start: work may run that nobody has credits for.
        self.is_adopted = False
        self.is_crash_looping = False
        self._kind = kind
        self._host = host
        self._disk = disk
        self._probe = probe
        self._stop_grace_s = stop_grace_s
        self._on_change = on_change
        self._stopping = asyncio.Event()
        self._is_draining = False
        self._crashes: deque[float] = deque(maxlen=CRASHES_MAX)
        self._task: asyncio.Task[None] | None = None

    def facts(self) -> EngineFacts:
        capacity = self.capacity
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
        )

    @property
    def is_kept(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Begin to keep the engine."""
        self._set(EngineState.STARTING)
        self._task = asyncio.create_task(self._keep(), name=f"keep {self.spec.engine_id}")

    async def stop(self) -> None:
        """End the engine: SIGTERM, then SIGKILL. Returns when nothing of it is left."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def detach(self) -> None:
        """Stop keeping the engine and leave it running."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def drain(self, deadline_s: float) -> None:
        """Take no more work, wait until there is none, at most `deadline_s`, then stop."""
        if not self.is_kept:
            return
        self._is_draining = True
        if self.state is EngineState.SERVING:
            self._set(EngineState.DRAINING)
        now_s = time.monotonic()
        ends_s = now_s + deadline_s
        idle_from_s = now_s
        seen = self.scrapes
        while self.is_kept and (now_s := time.monotonic()) < ends_s:
            if self.scrapes > seen:
                seen = self.scrapes
                busy = self.telemetry.running + self.telemetry.waiting if self.telemetry else 0
                if busy:
                    idle_from_s = now_s
                elif now_s - idle_from_s >= DRAIN_SETTLE_S:
                    break
            await asyncio.sleep(READY_POLL_S)
        await self.stop()

    async def until_serving(self) -> None:
        """Return when the engine serves. Raises EngineError when it is stopped or in a crash
        loop.
        """
        while self.state is not EngineState.SERVING:
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
                    process = self._launch()
                await self._until_ready(process)
                await self._watch(process)
            except (EngineError, DiskError, OSError) as error:
                if not self._stopping.is_set():
                    self.detail = str(error)
                    log.warning("engine failed", engine=self.spec.engine_id, detail=self.detail)
                    self._set(EngineState.FAILED)
            if process is not None:
                await self._end(process)
                process = None
            if self._stopping.is_set():
                self._set(EngineState.STOPPED)
                return
            await self._pause(self._backoff_s())

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

    def _backoff_s(self) -> float:
        """Pause before the next start: doubles with each end in the window."""
        now_s = time.monotonic()
        self._crashes.append(now_s)
        recent = sum(1 for at_s in self._crashes if now_s - at_s < CRASH_WINDOW_S)
        self.is_crash_looping = recent >= CRASHES_MAX
        if self.is_crash_looping:
            log.warning("engine in a crash loop", engine=self.spec.engine_id, detail=self.detail)
            return CRASH_LOOP_RETRY_S
        return float(min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** (recent - 1)))

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
            self.started_ms = record.started_ms
            if not record.was_ready or await self._answers():
                self.is_adopted = record.was_ready
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

    def _launch(self) -> EngineProcess:
        spec = self.spec
        if self.state is not EngineState.STARTING:
            self._set(EngineState.STARTING)
        try:
            ports = free_ports(self._host, self._kind.ports_needed(spec))
        except OSError as error:
            raise EngineError(f"no port on {self._host}: {error}") from error
        token = new_token()
        record = ProcessRecord(spec=spec, ports=ports, token=token, boot_id=boot_id())
        # Written before the start too, so that a crash in between leaves no unknown process.
        self._disk.save_process(spec.engine_id, record)
        launch = self._kind.launch(spec, self._host, ports)
        environment = engine_environment(os.environ, launch, token)
        process = EngineProcess.start(launch, environment, self._disk.engine_folder(spec.engine_id))
        self.port = ports[0]
        self.started_ms = int(time.time() * 1000)
        self.is_adopted = False
        self.telemetry = None
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
            except OSError as error:
                if time.monotonic() > ends_s:
                    raise EngineError(f"not ready in time: {error}") from error
                await self._pause(READY_POLL_S)
                continue
            record = self._disk.process(self.spec.engine_id)
            if record is not None:
                self._save(record, process, was_ready=True)
            self._answered()
            return

    async def _watch(self, process: EngineProcess) -> None:
        """Return when the engine is to be stopped. Raises EngineError when it died or fell silent
        for long.
        """
        answered_s = health_s = time.monotonic()
        while not self._stopping.is_set():
            now_s = time.monotonic()
            silent_s = now_s - answered_s
            # By the state and not by the time: a probe can give up a moment before the limit, and
            # the failure is told before the long wait for a restart begins.
            is_told = self.state is EngineState.FAILED
            limit_s = SILENT_S_RESTART if is_told else SILENT_S_FAILED
            timeout_s = max(PROBE_S_MIN, limit_s - silent_s)
            try:
                await self._scrape(timeout_s)
                if now_s - health_s >= HEALTH_S:
                    await self._probe.get(self.port, self._kind.health_path, timeout_s)
                    health_s = now_s
                    cut_log(self._disk.engine_folder(self.spec.engine_id))
                answered_s = time.monotonic()
                self._answered()
            except (OSError, EngineError) as error:
                if not process.is_alive():
                    raise EngineError(process.last_words()) from error
                self._silent(time.monotonic() - answered_s, error)
            await self._pause(SCRAPE_S)
            if not process.is_alive():
                raise EngineError(process.last_words())

    def _answered(self) -> None:
        state = EngineState.DRAINING if self._is_draining else EngineState.SERVING
        if self.state is not state and not self._stopping.is_set():
            self.detail = ""
            self.is_crash_looping = False
            self._set(state)

    def _silent(self, silent_s: float, error: Exception) -> None:
        if silent_s >= SILENT_S_RESTART:
            raise EngineError(f"no answer for {silent_s:.0f} s: {error}") from error
        if silent_s >= SILENT_S_FAILED and self.state is not EngineState.FAILED:
            self.detail = f"no answer for {silent_s:.0f} s: {error}"
            log.warning("engine silent", engine=self.spec.engine_id, detail=self.detail)
            self._set(EngineState.FAILED)

    async def _scrape(self, timeout_s: float) -> None:
        exposition = await self._probe.get(self.port, self._kind.metrics_path, timeout_s)
        self.telemetry = self._kind.telemetry(self.spec.engine_id, exposition)
        self.scrapes += 1

    async def _fetch(self, path: str) -> bytes:
        return await self._probe.get(self.port, path, SILENT_S_FAILED)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not into a stop."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

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
