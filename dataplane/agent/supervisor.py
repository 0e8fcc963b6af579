"""The engines of one node: which are wanted, which run, and what commands change about that.

What is wanted is kept on disk, so that a restarted agent goes on where the last one was.
"""

import asyncio
from collections.abc import Callable

from dataplane.agent import log
from dataplane.agent.disk import AgentDisk, WantedEngine
from dataplane.agent.keeper import EngineKeeper, recorded_process
from dataplane.agent.probe import Probe
from dataplane.agent.settings import AgentSettings, SettingsError, check_spec
from dataplane.engines.base import EngineError
from dataplane.engines.kinds import kind_of
from dataplane.protocol.messages import EngineFacts, EngineSpec

ENGINES_MAX = 64


class Supervisor:
    def __init__(
        self,
        settings: AgentSettings,
        disk: AgentDisk,
        on_change: Callable[[EngineKeeper], None],
    ) -> None:
        self.keepers: dict[str, EngineKeeper] = {}
        self._settings = settings
        self._disk = disk
        self._on_change = on_change
        self._probe = Probe(settings.bind_address)
        self._wanted: dict[str, WantedEngine] = {}

    def facts(self) -> list[EngineFacts]:
        return [keeper.facts() for keeper in self.keepers.values()]

    async def start(self) -> None:
        """Adopt or start every wanted engine, and end the leftovers of engines that are not
        wanted.
        """
        self._wanted = merge_wanted(self._disk.wanted(), self._settings.engines)
        self._disk.save_wanted(self._wanted)
        await self._end_strays()
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

    async def leave(self) -> None:
        """Leave all engines running to the next agent."""
        await asyncio.gather(*(keeper.detach() for keeper in self.keepers.values()))
        self._probe.close()

    async def load(self, spec: EngineSpec) -> None:
        """Run `spec`; returns when it serves. Raises EngineError."""
        self._check_command(spec)
        keeper = self.keepers.get(spec.engine_id)
        if keeper is not None and keeper.is_kept and keeper.spec != spec:
            raise EngineError(
                f"engine `{spec.engine_id}` runs with another specification; unload it first"
            )
        if keeper is None and len(self.keepers) >= ENGINES_MAX:
            raise EngineError(f"the node has {ENGINES_MAX} engines, its limit; unload one first")
        self._want(spec, is_running=True)
        if keeper is None or not keeper.is_kept:
            keeper = self._make(spec)
            keeper.start()
        elif keeper.is_crash_looping:
            await keeper.stop()
            keeper = self._make(spec)
            keeper.start()
        await keeper.until_serving()

    async def unload(self, engine_id: str) -> None:
        """Stop the engine and forget it. Nothing happens when there is none."""
        keeper = self.keepers.get(engine_id)
        if keeper is None:
            return
        self._want(keeper.spec, is_running=False, is_forgotten=True)
        await keeper.stop()
        if self.keepers.get(engine_id) is keeper:
            del self.keepers[engine_id]
        self._on_change(keeper)

    async def stop(self, engine_id: str) -> None:
        """Stop the engine; it stays listed and can be loaded again. Raises EngineError when there
        is none.
        """
        keeper = self._get(engine_id)
        self._want(keeper.spec, is_running=False)
        await keeper.stop()

    async def drain(self, engine_id: str, deadline_s: float) -> None:
        """Stop the engine after its last call, at most `deadline_s` later. Raises EngineError
        when there is none.
        """
        keeper = self._get(engine_id)
        await keeper.drain(deadline_s)
        self._want(keeper.spec, is_running=False)

    def _get(self, engine_id: str) -> EngineKeeper:
        keeper = self.keepers.get(engine_id)
        if keeper is None:
            raise EngineError(f"there is no engine `{engine_id}` on this node")
        return keeper

    def _make(self, spec: EngineSpec) -> EngineKeeper:
        keeper = EngineKeeper(
            spec,
            kind_of(spec),
            host=self._settings.bind_address,
            disk=self._disk,
            probe=self._probe,
            stop_grace_s=self._settings.stop_grace_s,
            on_change=self._on_change,
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
            )
        self._disk.save_wanted(self._wanted)

    def _check_command(self, spec: EngineSpec) -> None:
        """A command may start what the node's own file allows: its executables, not any on the
        machine.
        """
        try:
            check_spec(spec)
        except SettingsError as error:
            raise EngineError(str(error)) from error
        for name in kind_of(spec).local_options & spec.options.keys():
            own = {
                engine.options.get(name)
                for engine in self._settings.engines
                if engine.kind == spec.kind
            }
            if spec.options[name] not in own:
                raise EngineError(
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
            )
        else:
            merged[spec.engine_id] = WantedEngine(spec=spec, is_running=True, is_from_file=True)
    return merged
