"""Parts of supervision that need no bus: health by progress, ports, logs, load times."""

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dataplane.agent import engine_log, ports
from dataplane.agent.engine_log import LogFiles, clean
from dataplane.agent.load_time import file_system_of, learn, medium_of
from dataplane.agent.ports import lease_ports
from dataplane.agent.process import (
    EngineProcess,
    end_marked,
    engine_environment,
    marked_by,
    new_token,
    session_members,
)
from dataplane.agent.vitals import (
    CANARY_RETRY_S,
    CANARY_S,
    DEAD_S_RESTART,
    SILENT_S_FAILED,
    SILENT_S_RESTART,
    STUCK_S_FAILED,
    STUCK_S_RESTART,
    Health,
    Vitals,
)
from dataplane.engines.base import Launch
from dataplane.engines.load_log import LoadLog
from dataplane.protocol.messages import EngineSpec, EngineTelemetry, Medium, Phase


def scrape(running: int = 0, tokens: int = 0, kv: float = 0.0, waiting: int = 0) -> EngineTelemetry:
    return EngineTelemetry(
        engine_id="e", running=running, waiting=waiting, kv_used_ratio=kv, generation_tokens=tokens
    )


def healths(vitals: Vitals, *instants_s: float) -> list[Health]:
    return [vitals.verdict(at_s).health for at_s in instants_s]


def test_silence_fails_and_then_loses_an_engine() -> None:
    vitals = Vitals(0.0)
    vitals.unanswered("refused")
    assert healths(vitals, 2.9, SILENT_S_FAILED, SILENT_S_RESTART) == [
        Health.WELL, Health.FAILED, Health.LOST,
    ]  # fmt: skip
    vitals.answered(20.0)
    assert healths(vitals, 20.0) == [Health.WELL]


def test_steps_are_a_sign_of_life_where_tokens_are_counted_at_the_end() -> None:
    vitals = Vitals(0.0)
    for at_s in range(1, 10):
        vitals.answered(float(at_s))
        told = EngineTelemetry(
            engine_id="e", running=1, waiting=0, kv_used_ratio=None, steps=min(at_s, 4)
        )
        vitals.scraped(told, float(at_s))
    assert healths(vitals, 8.9, 4.0 + STUCK_S_FAILED) == [Health.WELL, Health.FAILED]


def test_calls_without_tokens_are_stuck_whatever_health_says() -> None:
    vitals = Vitals(0.0)
    vitals.scraped(scrape(running=3, tokens=10, kv=0.5), 1.0)
    for at_s in range(2, 6):
        vitals.answered(float(at_s))
        vitals.healthy()
        vitals.scraped(scrape(running=3, tokens=10, kv=0.5), float(at_s))
    assert healths(vitals, 5.9, 1.0 + STUCK_S_FAILED) == [Health.WELL, Health.FAILED]
    vitals.answered(31.0)
    assert vitals.verdict(1.0 + STUCK_S_RESTART).health is Health.LOST
    assert "3 calls run" in vitals.verdict(1.0 + STUCK_S_RESTART).why
    vitals.scraped(scrape(running=3, tokens=11, kv=0.5), 31.0)
    assert healths(vitals, 31.0) == [Health.WELL]


def test_a_slow_node_may_take_its_time() -> None:
    vitals = Vitals(0.0, 60.0)
    vitals.scraped(scrape(running=1), 0.0)
    vitals.answered(59.0)
    assert healths(vitals, 59.0, 60.0) == [Health.WELL, Health.FAILED]
    vitals.answered(360.0)
    assert healths(vitals, 359.0, 360.0) == [Health.FAILED, Health.LOST]


def test_chunks_of_a_long_prompt_are_progress() -> None:
    vitals = Vitals(0.0)
    for at_s in range(60):
        vitals.answered(float(at_s))
        vitals.scraped(scrape(running=1, kv=at_s / 100), float(at_s))
        assert vitals.verdict(float(at_s)).health is Health.WELL


def test_waiting_alone_is_not_stuck() -> None:
    vitals = Vitals(0.0)
    for at_s in range(60):
        vitals.answered(float(at_s))
        vitals.scraped(scrape(waiting=2), float(at_s))
    assert healths(vitals, 59.0) == [Health.WELL]


def test_an_idle_engine_is_asked_for_a_token_seldom_and_often_once_it_failed() -> None:
    vitals = Vitals(0.0)
    vitals.scraped(scrape(), 0.0)
    assert not vitals.wants_canary(CANARY_S - 1)
    assert vitals.wants_canary(CANARY_S)
    vitals.answered(100.0)
    vitals.canary("no answer", 100.0)
    assert healths(vitals, 100.0) == [Health.FAILED]
    assert vitals.wants_canary(100.0 + CANARY_RETRY_S)
    vitals.canary("no answer", 104.0)
    vitals.answered(131.0)
    assert healths(vitals, 100.0 + STUCK_S_RESTART) == [Health.LOST]
    vitals.canary("", 131.0)
    assert healths(vitals, 131.0) == [Health.WELL]
    assert not vitals.wants_canary(132.0)


def test_tokens_of_calls_make_a_canary_needless_and_a_busy_engine_gets_none() -> None:
    vitals = Vitals(0.0)
    vitals.scraped(scrape(tokens=1), 0.0)
    vitals.scraped(scrape(tokens=2), 50.0)
    assert not vitals.wants_canary(CANARY_S + 1)
    vitals.scraped(scrape(running=1, tokens=2), 60.0)
    assert not vitals.wants_canary(500.0)


def test_an_engine_that_says_it_is_dead_is_believed_at_once() -> None:
    vitals = Vitals(0.0)
    vitals.answered(1.0)
    vitals.dead("/health: status 503", 1.0)
    vitals.answered(1.2)
    vitals.dead("/health: status 503", 1.5)
    assert healths(vitals, 1.2, 1.0 + DEAD_S_RESTART) == [Health.FAILED, Health.LOST]
    vitals.healthy()
    vitals.answered(4.0)
    assert healths(vitals, 4.0) == [Health.WELL]


# ---------------------------------------------------------------- ports


def test_ports_are_held_by_whoever_inherits_them(tmp_path: Path) -> None:
    first = lease_ports("127.0.0.1", 2, "same", tmp_path)
    assert first.ports[1] == first.ports[0] + 1
    second = lease_ports("127.0.0.1", 2, "same", tmp_path)
    assert not set(first.ports) & set(second.ports)
    with subprocess.Popen(["sleep", "60"], pass_fds=first.locks) as engine:
        first.close()
        second.close()
        # The engine has not bound them, and the agent has let go of them.
        third = lease_ports("127.0.0.1", 2, "same", tmp_path)
        assert third.ports == second.ports
        third.close()
        engine.kill()
    again = lease_ports("127.0.0.1", 2, "same", tmp_path)
    assert again.ports == first.ports
    again.close()


def test_a_port_on_which_somebody_listens_is_passed_over(tmp_path: Path) -> None:
    lease = lease_ports("127.0.0.1", 1, "x", tmp_path)
    lease.close()
    with socket.create_server(("0.0.0.0", lease.ports[0])):
        other = lease_ports("127.0.0.1", 1, "x", tmp_path)
        assert other.ports != lease.ports
        other.close()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_each_port_of_a_row_is_looked_at_and_held(tmp_path: Path, at: int) -> None:
    """Ranks count up from the first port themselves: one that is taken in the middle is as bad as any."""
    row = lease_ports("127.0.0.1", 3, "row", tmp_path)
    row.close()
    assert row.ports == list(range(row.ports[0], row.ports[0] + 3))
    with socket.create_server(("127.0.0.1", row.ports[at])):
        other = lease_ports("127.0.0.1", 3, "row", tmp_path)
        assert row.ports[at] not in other.ports
        assert other.ports == list(range(other.ports[0], other.ports[0] + 3))
    for port in other.ports:
        with (tmp_path / str(port)).open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    other.close()


def test_ports_lie_outside_those_of_outgoing_connections() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not set(range(ports.PORT_FIRST, ports.PORT_LAST + 1)) & set(range(first, last + 1))


# ---------------------------------------------------------------- logs


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (b"token hf_AbCdEfGhIjKlMnOp used", b"used"),
        (b"non-default args: {'api_key': ['s3cr3t-of-mine'], 'port': 8000}", b"'port': 8000"),
        (b"Authorization: Bearer abc.def.ghi", b"Authorization"),
        (b'{"authorization":"Bearer qwertyuiop"}', b"authorization"),
        (b"curl -H 'bearer qwertyuiop' http://x", b"http://x"),
        (b"HF_TOKEN=qwertyuiop vllm serve", b"vllm serve"),
        (b"--api-key qwertyuiop --port 1", b"--port 1"),
        (b"password: qwertyuiop", b"password"),
        (b"sk-proj-0123456789abcdef", b""),
        (b"key value-of-the-environment!", b"key"),
    ],
)
def test_secrets_are_hidden(line: bytes, kept: bytes) -> None:
    found = clean(line + b"\n", [b"value-of-the-environment!"])
    assert engine_log.HIDDEN in found
    assert kept in found
    for secret in (b"AbCdEf", b"s3cr3t", b"def", b"qwerty", b"0123456789", b"of-the-env"):
        assert secret not in found.replace(b"non-default", b"")


@pytest.mark.parametrize(
    "line",
    [
        b"Avg generation throughput: 12.0 tokens/s, Running: 3 reqs\n",
        b"max_tokens: 4096, num_tokens=128, next token 5\n",
        b"Loading safetensors checkpoint shards:  50% Completed | 1/2\n",
        b"one token streamed for request cmpl-1\n",
        b"'tokenizer': '/models/tiny', 'api_key': None\n",
    ],
)
def test_ordinary_lines_stay_as_they_are(line: bytes) -> None:
    assert clean(line) == line


def test_logs_are_rotated_and_bounded(tmp_path: Path) -> None:
    engine_log.begin(tmp_path)
    files = LogFiles(tmp_path, file_bytes_max=1_000)
    for number in range(200):
        files.write(f"{number:05d} {'x' * 94}\n".encode())
    files.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["engine.log", "engine.log.1", "engine.log.2", "engine.log.3"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * 1_100
    assert "00199" in (tmp_path / "engine.log").read_text()


NOISY = """
import os, sys, time
print("token is", os.environ["MY_API_KEY"], flush=True)
print("half a line", end="", flush=True)
time.sleep(60)
"""


async def test_the_log_outlives_whoever_started_the_engine_and_has_its_last_words(
    tmp_path: Path,
) -> None:
    launch = Launch(argv=(sys.executable, "-c", NOISY), environment={"MY_API_KEY": "opensesame99"})
    process = EngineProcess.start(
        launch, engine_environment(os.environ, launch, new_token()), tmp_path
    )
    log = tmp_path / "engine.log"
    while "token is" not in log.read_text():
        await asyncio.sleep(0.01)
    assert session_members(process.pid, process.start_ticks) == [process.pid]
    await process.kill()
    while "half a line" not in log.read_text():
        await asyncio.sleep(0.01)
    assert "opensesame" not in log.read_text()
    assert log.stat().st_mode & 0o077 == 0


# ---------------------------------------------------------------- orphans


async def test_orphans_are_found_by_their_mark_in_whatever_session(tmp_path: Path) -> None:
    owner, token = new_token(), new_token()
    child = "import os, time; os.setsid(); print('left', flush=True); time.sleep(60)"
    parent = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "time.sleep(60)\n"
    )
    launch = Launch(argv=(sys.executable, "-c", parent))
    environment = engine_environment(os.environ, launch, token, owner)
    process = EngineProcess.start(launch, environment, tmp_path)
    while "left" not in (tmp_path / "engine.log").read_text():
        await asyncio.sleep(0.01)
    assert {one.token for one in marked_by(owner)} == {token}
    await process.kill()
    (orphan,) = marked_by(owner)
    assert orphan.session == orphan.pid
    assert marked_by(new_token()) == []
    end_marked(orphan)
    while marked_by(owner):
        await asyncio.sleep(0.01)


HANGS = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
def stop(*_):
    child.kill()
    child.wait()
    time.sleep(60)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""


async def test_a_server_that_hangs_alone_after_sigterm_is_not_waited_for(tmp_path: Path) -> None:
    launch = Launch(argv=(sys.executable, "-c", HANGS))
    process = EngineProcess.start(
        launch, engine_environment(os.environ, launch, new_token()), tmp_path
    )
    while "ready" not in (tmp_path / "engine.log").read_text():
        await asyncio.sleep(0.01)
    async with asyncio.timeout(30):
        await process.terminate(50.0)
    assert session_members(process.pid, process.start_ticks) == []


# ---------------------------------------------------------------- loads

VLLM_LOG = """
(APIServer pid=1) INFO [model.py:733] Resolved architecture: LlamaForCausalLM
(Worker pid=3) INFO [cpu_model_runner.py:68] Starting to load model /m/tiny...
\rLoading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]
\rLoading safetensors checkpoint shards:  75% Completed | 3/4 [00:00<00:00, 255.07it/s]
"""


def test_phases_are_read_from_the_log_as_far_as_it_tells(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    log = LoadLog(path)
    log.read()
    assert (log.phase, log.done_ratio) == (Phase.STARTING, None)
    path.write_text(VLLM_LOG)
    log.read()
    assert (log.phase, log.done_ratio) == (Phase.LOADING, 0.75)
    with path.open("a") as file:
        file.write(
            "(Worker pid=3) INFO [default_loader.py:501] Loading weights took 3.01 seconds\n"
        )
        file.write("(Worker pid=4) INFO [cpu_model_runner.py:68] Starting to load model /m/tiny\n")
    log.read()
    # Another rank that is behind does not take it back.
    assert (log.phase, log.done_ratio) == (Phase.WARMING, None)
    with path.open("a") as file:
        file.write("Capturing CUDA graphs (decode, FULL):  40%|####      | 14/35\n")
    log.read()
    assert (log.phase, log.done_ratio) == (Phase.WARMING, 0.4)
    assert not log.was_downloaded


def spec_of(path: str) -> EngineSpec:
    return EngineSpec(
        engine_id="e", kind="vllm", model="m", role="both", gpus=1, options={"model_path": path}
    )


def test_the_medium_is_told_where_it_can_be_known(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100_000)
    log = LoadLog(tmp_path / "none")
    assert medium_of(spec_of("meta/llama"), log, [os.getpid()]) is Medium.UNKNOWN
    with subprocess.Popen(["sleep", "60"]) as engine:
        time.sleep(0.1)
        assert medium_of(spec_of(str(tmp_path)), log, [engine.pid]) in {
            Medium.PAGE_CACHE, Medium.DISK,
        }  # fmt: skip
        (tmp_path / "b.safetensors").write_bytes(b"")
        os.truncate(tmp_path / "b.safetensors", 10**12)
        assert medium_of(spec_of(str(tmp_path)), log, [engine.pid]) is Medium.PAGE_CACHE
        engine.kill()
    log.was_downloaded = True
    assert medium_of(spec_of(str(tmp_path)), log, [os.getpid()]) is Medium.NETWORK
    mounts = (
        "/dev/a / ext4 rw 0 0\nhost:/m /models nfs4 rw 0 0\nb /models/local\\040disk xfs rw 0 0\n"
    )
    assert file_system_of(Path("/models/x"), mounts) == "nfs4"
    assert file_system_of(Path("/models/local disk/x"), mounts) == "xfs"
    assert file_system_of(Path("/modelsx"), mounts) == "ext4"


def test_what_starts_took_is_smoothed() -> None:
    times = learn({}, spec_of("/m"), 1_000)
    assert list(times.values()) == [1_000]
    assert list(learn(times, spec_of("/m"), 2_000).values()) == [1_500]
