"""A real vLLM that is hurt under its agent: found by its tokens and its marks, not by `/health`."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import httpx2
import msgspec
import pytest

from dataplane.agent.process import marked_by
from dataplane.agent.settings import AgentSettings
from dataplane.agent.supervisor import owner_mark
from dataplane.protocol.messages import (
    Command,
    CommandKind,
    CommandState,
    EngineState,
    Phase,
    Progress,
)
from tests.engine.environment import READY_S_MAX, cpu_environment, tiny_engine
from tests.engine.test_vllm_engine import complete, until_dead
from tests.integration.agent_world import NODE, Control, agent_world

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LONG = {"prompt": "count for ever", "max_tokens": 3_500, "ignore_eos": True, "temperature": 0}


def core_of(pids: list[int]) -> int:
    [core] = [pid for pid in pids if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return core


async def cached(port: int) -> int:
    answer = await complete(port, {"prompt": "the same words again " * 40, "max_tokens": 1})
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def tell(control: Control, name: str, kind: CommandKind, level: int = 0) -> tuple[str, str]:
    await control.command(
        Command(command_id=name, epoch=1, kind=kind, engine_id="v1", sleep_level=level)
    )
    outcome = await control.outcome(name)
    return outcome.state, outcome.detail


async def test_a_hurt_engine_is_known_by_its_tokens_and_leaves_no_orphan(
    vllm: Path, model: Path, tmp_path: Path
) -> None:
    plain = tiny_engine("v1", "both", vllm, model)
    spec = msgspec.structs.replace(plain, options={**plain.options, "dev_mode": True})
    async with agent_world(tmp_path, spec) as (bus, control, agent):
        agent.environment = {**cpu_environment(), "HF_TOKEN": "hf_abcdefghijklmnopqrst"}
        await control.make_queue()
        await agent.start()
        facts = await control.engine("v1", EngineState.SERVING, seconds=READY_S_MAX)

        # The start was told as far as the log tells it, and measured.
        seen = {one.phase for one in control.all(Progress) if one.engine_id == "v1"}
        assert Phase.STARTING in seen
        assert seen & {Phase.LOADING, Phase.WARMING}
        assert facts.load_ms > 1_000
        assert facts.load_medium in {"page_cache", "disk"}
        print(f"loaded in {facts.load_ms} ms from {facts.load_medium}; phases {sorted(seen)}")
        assert facts.capabilities == ["reset_cache"]

        await cached(facts.port)
        assert await cached(facts.port) > 0
        assert await tell(control, "r", CommandKind.RESET_CACHE) == (CommandState.DONE, "")
        assert await cached(facts.port) == 0
        state, detail = await tell(control, "s", CommandKind.SLEEP, 1)
        assert (state, "no `sleep`" in detail) == (CommandState.REFUSED, True)

        # A stopped engine core: `/health` says 200, and no token comes.
        owner = owner_mark(
            AgentSettings(node_id=NODE, nats_url=bus.url, data_dir=tmp_path / "agent" / "data")
        )
        members = [one.pid for one in marked_by(owner)]
        core = core_of(members)
        call = asyncio.create_task(complete(facts.port, LONG))
        await asyncio.sleep(1.0)
        before = len(control.heard)
        os.kill(core, signal.SIGSTOP)
        await control.engine("v1", EngineState.FAILED, since=before, seconds=60)
        async with httpx2.AsyncClient(trust_env=False) as http:
            health = await http.get(f"http://127.0.0.1:{facts.port}/health", timeout=5)
        assert health.status_code == 200
        before = len(control.heard)
        os.kill(core, signal.SIGCONT)
        again = await control.engine("v1", EngineState.SERVING, since=before, seconds=60)
        assert again.started_ms == facts.started_ms
        assert (await call)["usage"]["completion_tokens"] == 3_500

        # The API server dies while no agent looks, and its record is lost: the core is left.
        await agent.kill()
        record = agent.record("v1")
        os.kill(record.pid, signal.SIGKILL)
        (tmp_path / "agent/data/engines/v1/process.json").unlink()
        await asyncio.sleep(1.0)
        assert core in {one.pid for one in marked_by(owner)}, "vLLM cleans up by itself now"
        before = len(control.heard)
        await agent.start()
        await until_dead([pid for pid in members if pid != record.pid])
        renewed = await control.engine("v1", EngineState.SERVING, since=before, seconds=READY_S_MAX)
        assert renewed.port != facts.port

        # The core dies, and the server says so: failed at once, and started anew.
        members = [one.pid for one in marked_by(owner)]
        before = len(control.heard)
        call = asyncio.create_task(complete(renewed.port, LONG))
        await asyncio.sleep(0.5)
        os.kill(core_of(members), signal.SIGKILL)
        await control.engine("v1", EngineState.FAILED, since=before, seconds=60)
        await control.engine("v1", EngineState.STARTING, since=before, seconds=60)
        await until_dead(members)
        with contextlib.suppress(httpx2.HTTPError, AssertionError):
            await call
        log = (tmp_path / "agent/data/engines/v1").glob("engine.log*")
        assert b"abcdefghijklmnopqrst" not in b"".join(path.read_bytes() for path in log)
        left = [one.pid for one in marked_by(owner)]
        assert await agent.stop() == 0
        await until_dead(left)
