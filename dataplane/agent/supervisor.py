"""The engines of one node: which are wanted, which run, and what commands change about that.

What is wanted is kept on disk, so that a restarted agent goes on where the last one was.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence

import msgspec

from dataplane.agent import log
from dataplane.agent.disk import AgentDisk, WantedEngine
from dataplane.agent.gpu_facts import cordon_of
from dataplane.agent.keeper import (
    CRASH_LOOP,
    STOP_WITHDRAW_S_MAX,
    EngineKeeper,
    Lent,
    Refusal,
    recorded_process,
)
from dataplane.agent.probe import Probe
from dataplane.agent.process import end_marked, marked_by
from dataplane.agent.settings import AgentSettings, SettingsError, check_spec
from dataplane.engines.base import EngineError
from dataplane.engines.controls import SLEEP_LEVELS, controls_of
from dataplane.engines.kinds import kind_of, with_profile
from dataplane.protocol.messages import EngineFacts, EngineSpec, GpuTelemetry, engine_of

ENGINES_MAX = 64
ORPHANS_S = 5.0
# An operator's cordon and one for a GPU at fault say so.
GPU_AT_FAULT = "GPU at fault"
BY_COMMAND = "by command"
REASON_CHARACTERS_MAX = 200
ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")


class Supervisor:
    def __init__(
        self,
        settings: AgentSettings,
        disk: AgentDisk,
        on_change: Callable[[EngineKeeper], None],
        lent: Lent = lambda _: (True, 0),
    ) -> None:
        """`lent` tells what replicas may still do with an engine."""
        self.keepers: dict[str, EngineKeeper] = {}
        self._settings = settings
        self._disk = disk
        self._on_change = on_change
        self._lent = lent
        self._probe = Probe(settings.bind_address)
        self._wanted: dict[str, WantedEngine] = {}
        # Commands that change one engine for long go one after the other.
        self._busy: dict[str, asyncio.Lock] = {}
        self._owner = owner_mark(settings)
        self._gpus = 0
        self._gpu_faults: Sequence[GpuTelemetry] = ()
        # Told of an engine whose prefix cache a command has emptied.
        self.on_emptied: Callable[[str], None] = lambda _: None

    def facts(self) -> list[EngineFacts]:
        return [facts for keeper in self.keepers.values() for facts in keeper.declared()]

    async def start(self) -> None:
        """Adopt or start every wanted engine, and end the leftovers of engines that are not
        wanted.
        """
        self._wanted = merge_wanted(self._disk.wanted(), self._settings.engines)
        self._disk.save_wanted(self._wanted)
        await self._end_strays()
        await self.end_orphans()
        for wanted in self._wanted.values():
            if wanted.is_forgotten:
                continue
            try:
                check_spec(wanted.spec)
            except SettingsError as error:
                # Loaded by a command once; what changed since then must not stop the other engines.
                log.warning("engine unusable", engine=wanted.spec.engine_id, detail=str(error))
                continue
            keeper = self._make(wanted.spec)
            if wanted.is_running:
                keeper.start()

    async def close(self) -> None:
        """Stop all engines, or leave them to the next agent, as the settings say."""
        if not self._settings.stops_engines:
            await self.leave()
            return
        await asyncio.gather(*(keeper.stop() for keeper in self.keepers.values()))
        self._probe.close()

    async def withdraw(self) -> None:
        """Let no replica send anything more to the engines that are to be ended with the agent."""
        if self._settings.stops_engines:
            kept = [keeper for keeper in self.keepers.values() if keeper.is_kept]
            await asyncio.gather(*(keeper.withdraw(STOP_WITHDRAW_S_MAX) for keeper in kept))

    async def leave(self) -> None:
        """Leave all engines running to the next agent."""
        await asyncio.gather(*(keeper.detach() for keeper in self.keepers.values()))
        self._probe.close()

    # ------------------------------------------------------------ commands

    async def load(self, spec: EngineSpec) -> None:
        """Run `spec`; returns when it serves. Raises EngineError, Refusal when it can not be right."""
        self._check_command(spec)
        # What a command loads keeps the flags that its profile had then.
        spec = with_profile(spec, self._settings.profiles)
        keeper = self.keepers.get(spec.engine_id)
        if keeper is not None and keeper.is_kept and keeper.spec != spec:
            raise Refusal(
                f"engine `{spec.engine_id}` runs with another specification; unload it first"
            )
        if keeper is None and len(self.keepers) >= ENGINES_MAX:
            raise Refusal(f"the node has {ENGINES_MAX} engines, its limit; unload one first")
        self._check_gpus(spec)
        self._want(spec, is_running=True)
        if keeper is None or not keeper.is_kept:
            keeper = self._make(spec)
            keeper.start()
        elif keeper.is_crash_looping:
            await keeper.stop()
            keeper = self._make(spec)
            keeper.start()
        if keeper.cordon.startswith(CRASH_LOOP):
            # Whoever loads it again has seen to it.
            self.set_cordon(spec.engine_id, "")
        await keeper.until_serving()

    async def unload(self, engine_id: str, deadline_s: float) -> None:
        """Drain the engine, stop it and forget it. Nothing happens when there is none."""
        keeper = self.keepers.get(engine_id)
        if keeper is None:
            return
        await keeper.drain(deadline_s)
        if self.keepers.get(engine_id) is not keeper:
            return
        self._want(keeper.spec, is_running=False, is_forgotten=True)
        del self.keepers[engine_id]
        self._on_change(keeper)

    async def stop(self, engine_id: str) -> None:
        """Stop the engine, whatever runs there; it stays listed and can be loaded again. Replicas
        know before. Raises Refusal when there is none.
        """
        keeper = self._get(engine_id)
        self._want(keeper.spec, is_running=False)
        if keeper.is_kept:
            await keeper.withdraw(STOP_WITHDRAW_S_MAX)
        await keeper.stop()

    async def drain(self, engine_id: str, deadline_s: float) -> None:
        """Stop the engine after its last call, at most `deadline_s` later. Raises Refusal when
        there is none.
        """
        keeper = self._get(engine_id)
        await keeper.drain(deadline_s)
        # Not before: the next agent must not end an engine whose calls still run.
        self._want(keeper.spec, is_running=False)

    async def restart(self, engine_id: str, deadline_s: float) -> None:
        """Drain the engine and start it anew; returns when it serves. Raises EngineError."""
        await self._renew(self._get(engine_id).spec, deadline_s)

    async def set_role(self, engine_id: str, role: str, deadline_s: float) -> None:
        """Start the engine anew in another role. Raises EngineError, Refusal when its kind lacks
        the role.
        """
        spec = msgspec.structs.replace(self._get(engine_id).spec, role=role)
        self._check_command(spec)
        keeper = self.keepers[engine_id]
        if keeper.spec.role == role and keeper.is_kept:
            return
        await self._renew(spec, deadline_s)

    async def _renew(self, spec: EngineSpec, deadline_s: float) -> None:
        async with self._lock(spec.engine_id):
            self._check_gpus(spec)
            await self.keepers[spec.engine_id].drain(deadline_s)
            self._want(spec, is_running=True)
            keeper = self._make(spec)
            keeper.start()
            if keeper.cordon.startswith(CRASH_LOOP):
                self.set_cordon(spec.engine_id, "")
            await keeper.until_serving()

    async def sleep(self, engine_id: str, level: int, deadline_s: float) -> None:
        """Put the engine to sleep when its calls have ended. Raises EngineError."""
        if level not in SLEEP_LEVELS:
            raise Refusal(f"there is no sleep level {level}; there are 1 and 2")
        async with self._lock(engine_id):
            await self._get(engine_id).sleep(level, deadline_s)
            self.on_emptied(engine_id)

    async def wake(self, engine_id: str) -> None:
        """Returns when the engine serves again. Raises EngineError."""
        async with self._lock(engine_id):
            keeper = self._get(engine_id)
            if keeper.sleep_level:
                self._check_gpus(keeper.spec)
            await keeper.wake()

    async def reset_cache(self, engine_id: str) -> None:
        await self._get(engine_id).reset_cache()
        self.on_emptied(engine_id)

    async def load_adapter(self, engine_id: str, name: str, path: str) -> None:
        _check_adapter(name)
        if not path:
            raise Refusal(f"where is adapter `{name}`? A path is needed")
        await self._get(engine_id).load_adapter(name, path)

    async def unload_adapter(self, engine_id: str, name: str) -> None:
        _check_adapter(name)
        await self._get(engine_id).unload_adapter(name)

    def cordon(self, engine_id: str, reason: str) -> None:
        """Let the engine take nothing new, for a reason that an operator gives."""
        self._get(engine_id)
        words = " ".join(reason.split())[:REASON_CHARACTERS_MAX]
        self.set_cordon(engine_id, f"{BY_COMMAND}: {words}" if words else BY_COMMAND)

    def uncordon(self, engine_id: str) -> EngineSpec:
        """Let the engine take work, whatever stood in the way; one that was given up is started."""
        keeper = self._get(engine_id)
        self.set_cordon(engine_id, "")
        return keeper.spec

    def set_cordon(self, engine_id: str, why: str) -> None:
        """Keep an engine from new work, and remember it; empty `why` ends that."""
        keeper, wanted = self.keepers.get(engine_id), self._wanted.get(engine_id)
        if wanted is not None and wanted.cordon != why:
            self._wanted[engine_id] = msgspec.structs.replace(wanted, cordon=why)
            self._disk.save_wanted(self._wanted)
        if keeper is not None:
            keeper.set_cordon(why)

    # ------------------------------------------------------------ GPUs

    def use_gpus(self, gpus: int, faults: Sequence[GpuTelemetry]) -> None:
        """Take what is known of the node's GPUs: engines on one at fault take nothing new."""
        self._gpus = gpus
        self._gpu_faults = tuple(faults)
        for engine_id, keeper in self.keepers.items():
            why = cordon_of(keeper.spec, faults)
            if why and not keeper.cordon:
                self.set_cordon(engine_id, f"{GPU_AT_FAULT}: {why}")

    def _check_gpus(self, spec: EngineSpec) -> None:
        if why := cordon_of(spec, self._gpu_faults):
            raise Refusal(f"{GPU_AT_FAULT}: {why}; `uncordon` an engine there when it is mended")
        if not self._gpus:
            return
        taken = sum(
            keeper.spec.gpus
            for name, keeper in self.keepers.items()
            # One that sleeps has given its memory back.
            if name != spec.engine_id and keeper.is_kept and not keeper.sleep_level
        )
        if taken + spec.gpus > self._gpus:
            raise Refusal(
                f"engine `{spec.engine_id}` needs {spec.gpus} GPUs; of the node's {self._gpus},"
                f" {taken} are taken"
            )

    # ------------------------------------------------------------ orphans

    async def end_orphans(self) -> int:
        """End every process that this agent or one before it has started and that belongs to no
        engine that is kept now, as what a killed API server leaves. The number of them.
        """
        marked = await asyncio.to_thread(marked_by, self._owner)
        # Read after the look at the processes: the record of a launch is there before its process.
        known = {
            record.token
            for name in self._disk.recorded_processes()
            if (record := self._disk.process(name)) is not None
        }
        ended = 0
        for process in marked:
            if process.token not in known:
                log.warning("orphan is ended", pid=process.pid)
                end_marked(process)
                ended += 1
        return ended

    async def watch_orphans(self) -> None:
        while True:
            await asyncio.sleep(ORPHANS_S)
            await self.end_orphans()

    # ------------------------------------------------------------ inside

    def _lock(self, engine_id: str) -> asyncio.Lock:
        self._get(engine_id)
        return self._busy.setdefault(engine_id, asyncio.Lock())

    def _get(self, engine_id: str) -> EngineKeeper:
        keeper = self.keepers.get(engine_id)
        if keeper is None:
            whole = engine_of(engine_id)
            if whole in self.keepers:
                raise Refusal(f"`{engine_id}` is one rank of `{whole}`; name the engine")
            raise Refusal(f"there is no engine `{engine_id}` on this node")
        return keeper

    def _make(self, spec: EngineSpec) -> EngineKeeper:
        wanted = self._wanted.get(spec.engine_id)
        keeper = EngineKeeper(
            spec,
            kind_of(spec),
            controls_of(spec),
            host=self._settings.bind_address,
            owner=self._owner,
            disk=self._disk,
            probe=self._probe,
            stop_grace_s=self._settings.stop_grace_s,
            lent=self._lent,
            stuck_s=self._settings.stuck_s,
            on_change=self._on_change,
            on_crash_loop=lambda lost, why: self.set_cordon(
                lost.spec.engine_id, lost.cordon or why
            ),
            cordon="" if wanted is None else wanted.cordon,
        )
        self.keepers[spec.engine_id] = keeper
        return keeper

    def _want(self, spec: EngineSpec, *, is_running: bool, is_forgotten: bool = False) -> None:
        before = self._wanted.get(spec.engine_id)
        is_from_file = before is not None and before.is_from_file
        if is_forgotten and not is_from_file:
            self._wanted.pop(spec.engine_id, None)
        else:
            self._wanted[spec.engine_id] = WantedEngine(
                spec=spec,
                is_running=is_running,
                is_forgotten=is_forgotten,
                is_from_file=is_from_file,
                cordon="" if before is None or is_forgotten else before.cordon,
            )
        self._disk.save_wanted(self._wanted)

    def _check_command(self, spec: EngineSpec) -> None:
        """A command may start what the node's own files allow: their executables, not any on the
        machine.
        """
        bare = msgspec.structs.replace(spec, options={})
        try:
            of_profile = with_profile(bare, self._settings.profiles).options
            check_spec(with_profile(spec, self._settings.profiles))
        except (SettingsError, EngineError) as error:
            raise Refusal(str(error)) from error
        for name in kind_of(spec).local_options & spec.options.keys():
            own = {
                engine.options.get(name)
                for engine in self._settings.engines
                if engine.kind == spec.kind
            }
            own.add(of_profile.get(name))
            if spec.options[name] not in own:
                raise Refusal(
                    f"engine `{spec.engine_id}`: a command can not set option `{name}` to a value"
                    " that the node's own engine file does not name"
                )

    async def _end_strays(self) -> None:
        for engine_id in self._disk.recorded_processes():
            wanted = self._wanted.get(engine_id)
            if wanted is not None and wanted.is_running:
                continue
            record = self._disk.process(engine_id)
            process = recorded_process(record) if record else None
            if process is not None:
                log.info("stray engine is ended", engine=engine_id, pid=process.pid)
                await process.kill()
            self._disk.forget_process(engine_id)


def owner_mark(settings: AgentSettings) -> str:
    """Tells the processes of this agent and its predecessors from those of others on the host."""
    home = str(settings.data_dir.resolve())
    return hashlib.sha256(f"{settings.node_id} {home}".encode()).hexdigest()[:32]


def _check_adapter(name: str) -> None:
    if not ADAPTER.fullmatch(name):
        raise Refusal(
            f"adapter `{name}` must be letters, digits, `.`, `-`, `_` and `/`, at most 255"
        )


def merge_wanted(
    remembered: dict[str, WantedEngine], declared: tuple[EngineSpec, ...]
) -> dict[str, WantedEngine]:
    """What should run: the node's file, unless a command has stopped or changed that very engine
    since.
    """
    merged = {name: wanted for name, wanted in remembered.items() if not wanted.is_from_file}
    for spec in declared:
        before = remembered.get(spec.engine_id)
        if before is not None and before.spec == spec:
            merged[spec.engine_id] = WantedEngine(
                spec=spec,
                is_running=before.is_running,
                is_forgotten=before.is_forgotten,
                is_from_file=True,
                cordon=before.cordon,
            )
        else:
            merged[spec.engine_id] = WantedEngine(spec=spec, is_running=True, is_from_file=True)
    return merged
