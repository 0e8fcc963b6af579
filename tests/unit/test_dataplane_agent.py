"""Parts of the agent that need no bus: settings, memory on disk, processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane.agent.disk import (
    AgentDisk,
    CommandMemory,
    CommandResult,
    DiskError,
    ProcessRecord,
    WantedEngine,
)
from dataplane.agent.keeper import recorded_process
from dataplane.agent.process import (
    EngineProcess,
    boot_id,
    engine_environment,
    find_launch,
    living,
    new_token,
    session_members,
    stat_of,
)
from dataplane.agent.settings import AgentSettings, SettingsError, read_engines, read_settings
from dataplane.agent.supervisor import merge_wanted
from dataplane.engines.base import EngineError, Launch
from dataplane.protocol.messages import CommandState, EngineSpec

ARGUMENTS = ("--node", "n1", "--nats-url", "nats://127.0.0.1:4222", "--data-dir", "state")


def spec(engine_id: str = "e1", **options: int) -> EngineSpec:
    return EngineSpec(
        engine_id=engine_id, kind="simulated", model="m", role="both", gpus=1, options=options
    )


def test_settings_come_from_arguments_or_the_environment(tmp_path: Path) -> None:
    engines = tmp_path / "engines.yaml"
    engines.write_text(
        "engines:\n- {engine_id: e1, kind: simulated, model: m, role: both, gpus: 1}\n"
    )
    environment = {
        "HEADWAY_NODE_ID": "n1",
        "NATS_URL": "nats://127.0.0.1:4222",
        "HEADWAY_AGENT_DATA": "state",
        "HEADWAY_AGENT_ENGINES": str(engines),
        "HEADWAY_AGENT_PASSWORD": "hidden",
    }
    settings = read_settings([], environment)
    assert settings.engines == (spec(),)
    assert settings.bind_address == "127.0.0.1"
    assert "hidden" not in repr(settings)
    secret = tmp_path / "password"
    secret.write_text("other\n")
    given = read_settings([*ARGUMENTS, "--password-file", str(secret), "--keep-engines"], {})
    assert (given.node_id, given.password, given.stops_engines) == ("n1", "other", False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"node_id": "a.b"}, "node id `a.b`"),
        ({"node_id": "*"}, "node id"),
        ({"bind_address": "0.0.0.0"}, "node's own address"),
        ({"engines": (spec(), spec())}, "declared twice"),
        ({"engines": (spec("../x"),)}, "engine id `../x`"),
        ({"engines": (spec(seats=1),)}, "no option `seats`"),
    ],
)
def test_bad_settings_are_refused_in_words(changes: dict, words: str, tmp_path: Path) -> None:
    good = {"node_id": "n1", "nats_url": "nats://x", "data_dir": tmp_path}
    with pytest.raises(SettingsError, match=words):
        AgentSettings(**{**good, **changes})


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(SettingsError, match="set NATS_URL"):
        read_settings(["--node", "n1"], {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "neither YAML nor JSON"),
        ("3", "must be a list"),
        ("- {engine_id: e1, seats: 4}", "no field `seats`"),
        ("- {engine_id: e1}", "missing required field"),
    ],
)
def test_a_bad_engine_file_is_refused_in_words(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        read_engines(path)
    with pytest.raises(SettingsError, match="can not be read"):
        read_engines(tmp_path / "none.yaml")


def test_what_an_agent_remembers_outlives_it(tmp_path: Path) -> None:
    disk = AgentDisk(tmp_path)
    assert disk.next_agent_epoch() == 1
    wanted = {"e1": WantedEngine(spec=spec(), is_running=False)}
    disk.save_wanted(wanted)
    result = CommandResult(command_id="c", state=CommandState.DONE, detail="")
    disk.save_commands(CommandMemory(epoch=7, results=[result]))
    with pytest.raises(DiskError, match=str(os.getpid())):
        AgentDisk(tmp_path)
    disk.close()
    again = AgentDisk(tmp_path)
    assert again.next_agent_epoch() == 2
    assert again.wanted() == wanted
    assert again.commands() == CommandMemory(epoch=7, results=[result])
    (tmp_path / "commands.json").write_text("{")
    with pytest.raises(DiskError, match="damaged"):
        again.commands()
    again.close()


def test_the_file_wins_unless_a_command_spoke_about_that_very_engine() -> None:
    stopped = WantedEngine(spec=spec(), is_running=False, is_from_file=True)
    assert not merge_wanted({"e1": stopped}, (spec(),))["e1"].is_running
    assert merge_wanted({"e1": stopped}, (spec(max_num_seqs=3),))["e1"].is_running
    assert merge_wanted({"e1": stopped}, ()) == {}
    loaded = WantedEngine(spec=spec("e2"), is_running=True)
    assert merge_wanted({"e2": loaded}, (spec(),))["e2"] == loaded


def test_an_engine_is_given_none_of_headways_secrets() -> None:
    inherited = {
        "PATH": "/bin",
        "HF_TOKEN": "t",
        "HEADWAY_AGENT_PASSWORD": "x",
        "NATS_URL": "x",
        "DATABASE_URL": "x",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    launch = Launch(argv=("x",), environment={"A": "1"})
    environment = engine_environment(inherited, launch, "token")
    assert environment == {
        "PATH": "/bin",
        "HF_TOKEN": "t",
        "A": "1",
        "HEADWAY_ENGINE_LAUNCH": "token",
        "SPT_NOENV": "1",
    }


# A leader that leaves a child which ignores SIGTERM, then waits.
FAMILY = """
import os, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"])
print("ready", flush=True)
time.sleep(100)
"""


def start_family(folder: Path, token: str) -> EngineProcess:
    launch = Launch(argv=(sys.executable, "-c", FAMILY))
    process = EngineProcess.start(launch, engine_environment(os.environ, launch, token), folder)
    while "ready" not in (folder / "engine.log").read_text():
        assert process.is_alive()
    return process


async def test_a_dead_leaders_children_are_ended(tmp_path: Path) -> None:
    process = start_family(tmp_path, new_token())
    members = session_members(process.pid, process.start_ticks)
    assert len(members) == 2
    os.kill(process.pid, 9)
    while process.is_alive():
        pass
    assert process.last_words() == "the process was ended by signal 9"
    assert len(session_members(process.pid, process.start_ticks)) == 1
    # An agent that was not its parent finds the same from the record alone.
    await EngineProcess(process.pid, process.start_ticks).kill()
    assert session_members(process.pid, process.start_ticks) == []


async def test_termination_leaves_nobody(tmp_path: Path) -> None:
    process = start_family(tmp_path, new_token())
    members = session_members(process.pid, process.start_ticks)
    await process.terminate(5.0)
    assert [pid for pid in members if (stat := stat_of(pid)) and stat.state not in "ZX"] == []


async def test_a_reused_pid_is_never_touched() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as bystander:
        stat = stat_of(bystander.pid)
        assert stat is not None
        assert living(bystander.pid, stat.start_ticks)
        assert not living(bystander.pid, stat.start_ticks - 1)
        await EngineProcess(bystander.pid, stat.start_ticks - 1).kill()
        assert bystander.poll() is None
        bystander.kill()


async def test_a_process_started_just_before_a_crash_is_found_by_its_token(tmp_path: Path) -> None:
    token = new_token()
    process = start_family(tmp_path, token)
    assert find_launch(token) == process.pid
    record = ProcessRecord(spec=spec(), ports=[1], token=token, boot_id=boot_id())
    found = recorded_process(record)
    assert found is not None
    assert (found.pid, found.start_ticks) == (process.pid, process.start_ticks)
    await process.kill()
    assert recorded_process(record) is None
    before = ProcessRecord(spec=spec(), ports=[1], token=token, boot_id="another", pid=1)
    assert recorded_process(before) is None


def test_what_can_not_be_executed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="can not be started"):
        EngineProcess.start(Launch(argv=(str(tmp_path / "none"),)), {}, tmp_path)
