"""CPU time per request of the gateway, in its own process between a load client and two mock engines.

With HEADWAY_BENCH_HARNESS naming a folder that has `src/mockd.c` and `src/loadc.c`, engines and client
are those (compiled here), which cost little beside the gateway; else small Python ones, whose
own slowness bounds the rate but not the CPU time that is counted.
"""

import asyncio
import contextlib
import gc
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

HARNESS_VARIABLE = "HEADWAY_BENCH_HARNESS"
ROOT = Path(__file__).resolve().parents[2]
READY_S_MAX = 20.0
ROUNDS = 3


class Scenario(NamedTuple):
    """`itl_us`: pause of the engine between tokens; `seconds`: length of one round."""

    name: str
    body: str
    connections: int
    seconds: float
    itl_us: int


SCENARIOS = (
    Scenario("c1", "small", 1, 2.0, 0),
    Scenario("c64", "small", 64, 3.0, 0),
    Scenario("s64", "stream", 64, 4.0, 20_000),
    Scenario("s64_fast", "stream", 64, 2.0, 0),
    Scenario("32k", "32k", 16, 2.0, 0),
    Scenario("512k", "512k", 8, 2.0, 0),
)
STREAM_TOKENS = 50

_SENTENCE = (
    'The quick brown fox jumps over the lazy dog near the river bank, said "nobody" in 1984.\n'
)
_SMALL = "Say hello to the world, please."
# glibc gives large buffers back to the kernel after each request unless it is told to keep them.
MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": str(512 * 1024 * 1024),
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024 * 1024),
}


def run() -> dict[str, float]:
    """Measure the gateway with a gate that only places round robin: its cost without decisions."""
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder)) as bench:
        command = [sys.executable, "-m", "tests.benchmarks.relay", "serve", *bench.engine_ports]
        with bench.gateway(command) as (process, port):
            return bench.measure(process, port, "hw-tenant-test")


class Bench:
    """Mock engines and load client, kept for as long as the block lasts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        harness = os.environ.get(HARNESS_VARIABLE)
        self._source = None if harness is None else Path(harness) / "src"
        self._engines: list[subprocess.Popen[bytes]] = []
        self._ports = [_free_port(), _free_port()]
        self.engine_ports = [str(port) for port in self._ports]

    def __enter__(self) -> Self:
        for name, content, members in (
            ("small", _SMALL, {"max_tokens": 8}),
            ("stream", _SMALL, {"max_tokens": STREAM_TOKENS, "stream": True}),
            ("32k", _long(32 * 1024), {"max_tokens": 8}),
            ("512k", _long(512 * 1024), {"max_tokens": 8}),
        ):
            messages = [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": content},
            ]
            body = {"model": "mock", "messages": messages, "temperature": 0, **members}
            text = json.dumps(body, separators=(",", ":"))
            (self.folder / f"{name}.json").write_text(text)
        if self._source is not None:
            for name in ("mockd", "loadc"):
                subprocess.run(
                    ["cc", "-O2", "-w", "-o", self.folder / name, self._source / f"{name}.c"],
                    check=True,
                )
        for port in self.engine_ports:
            command = (
                [str(self.folder / "mockd"), port]
                if self._source is not None
                else [sys.executable, "-m", "tests.benchmarks.relay", "engine", port]
            )
            self._engines.append(subprocess.Popen(command, cwd=ROOT))
        for port in self._ports:
            _wait_for(port)
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines:
            engine.kill()
            engine.wait()

    @contextlib.contextmanager
    def gateway(self, command: Sequence[str]) -> Iterator[tuple[psutil.Process, int]]:
        """Run `command`, a gateway that listens on the port of its last argument."""
        port = _free_port()
        started = subprocess.Popen([*command, str(port)], cwd=ROOT, env={**os.environ, **MALLOC})
        try:
            _wait_for(port)
            yield psutil.Process(started.pid), port
        finally:
            started.kill()
            started.wait()

    def measure(
        self, process: psutil.Process, port: int, key: str, *, scale: float = 1.0
    ) -> dict[str, float]:
        """All scenarios, the rounds interleaved; medians. `scale` shortens or lengthens them."""
        found: dict[str, list[float]] = {}
        for round_number in range(ROUNDS):
            for scenario in SCENARIOS:
                self._configure(scenario)
                if round_number == 0:
                    self._load(scenario, port, key, 0.5)
                cpu_s = _cpu_s(process)
                load = self._load(scenario, port, key, scenario.seconds * scale)
                cpu_us = (_cpu_s(process) - cpu_s) * 1e6
                if load["errors"]:
                    raise RuntimeError(f"{scenario.name}: {load['errors']} errors: {load['error']}")
                name = f"relay_{scenario.name}"
                found.setdefault(f"{name}_cpu_us", []).append(cpu_us / load["done"])
                found.setdefault(f"{name}_rps", []).append(load["done"] / load["secs"])
                found.setdefault(f"{name}_p50_us", []).append(load["p50"])
                found.setdefault(f"{name}_p99_us", []).append(load["p99"])
                if scenario.body == "stream":
                    per_token = cpu_us / load["done"] / STREAM_TOKENS
                    found.setdefault(f"{name}_cpu_us_per_token", []).append(per_token)
        return {name: round(statistics.median(values), 1) for name, values in found.items()}

    def _configure(self, scenario: Scenario) -> None:
        for port in self._ports:
            url = f"http://127.0.0.1:{port}/mock/config?tokens={STREAM_TOKENS}"
            request = urllib.request.Request(f"{url}&itl_us={scenario.itl_us}&ttft_us=0", b"")
            urllib.request.urlopen(request, timeout=5).read()

    def _load(self, scenario: Scenario, port: int, key: str, seconds: float) -> dict[str, Any]:
        body = str(self.folder / f"{scenario.body}.json")
        count = str(scenario.connections)
        if self._source is None:
            command = [sys.executable, "-m", "tests.benchmarks.relay", "load"]
            command += [str(port), body, count, str(seconds), key]
        else:
            spread_ms = "1000" if scenario.itl_us else "0"
            command = [str(self.folder / "loadc"), "-p", str(port), "-c", count, "-d", str(seconds)]
            command += ["-b", body, "-a", key, "-j", spread_ms]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        report: dict[str, Any] = json.loads(done.stdout)
        return {**report, "p50": report["lat"]["p50"], "p99": report["lat"]["p99"]}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _long(size: int) -> str:
    return (_SENTENCE * (size // len(_SENTENCE) + 1))[:size]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_for(port: int) -> None:
    until = time.monotonic() + READY_S_MAX
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nothing listens on port {port}")


# ---------------------------------------------------------------- roles of child processes


def _serve(engine_ports: Sequence[int], port: int) -> None:
    """The gateway of `run`: everything but decisions, money and the journal."""
    import uvloop

    from controlplane.gateway.hot_path import HotPath
    from controlplane.gateway.server import make_server
    from controlplane.gateway.sweeper import Sweeper
    from controlplane.gateway.upstream import Upstream
    from controlplane.telemetry.metrics import Metrics
    from tests.gateway_world import RoundRobinGate

    async def fallback(*_: object) -> None:
        raise RuntimeError("nothing else is served here")

    async def main() -> None:
        metrics, sweeper = Metrics(), Sweeper()
        gate = RoundRobinGate([("127.0.0.1", number) for number in engine_ports], keeps=False)
        hot_path = HotPath(gate, Upstream(sweeper), metrics, fallback)  # type: ignore[arg-type]
        server = make_server(
            hot_path, sweeper, metrics, new_id=gate.new_id, host="127.0.0.1", port=port
        )
        gc.collect()
        gc.freeze()
        async with asyncio.TaskGroup() as group:
            group.create_task(sweeper.run())
            group.create_task(server.serve())

    uvloop.run(main())


def _engine(port: int) -> None:
    """A mock engine in Python: fixed answers, tokens at a pace."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s\r\n\r\n"
    choice = (
        b'"choices":[{"index":0,"delta":{"content":" tok"},"finish_reason":null,"token_ids":%s}]'
    )
    prompt = b'"choices":[{"index":0,"delta":{"role":"assistant"}}],"prompt_token_ids":[1,2,3]'
    token = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"mock",%s}\n\n'
    last = token % b'"choices":[{"index":0,"delta":{"content":""},"finish_reason":"length"}]'
    usage = b'"usage":{"prompt_tokens":16,"completion_tokens":%d,"total_tokens":66}'
    whole = (
        b'{"id":"c","object":"chat.completion","created":1,"model":"mock","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":" tok"},"finish_reason":"stop"}],%s}'
        % (usage % 8)
    )
    pace = {"itl_us": 0}

    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(data), data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
                lengths = [line[16:] for line in lines if line.startswith(b"content-length: ")]
                body = await reader.readexactly(int(lengths[0]) if lengths else 0)
                if b"itl_us=" in lines[0]:
                    pace["itl_us"] = int(lines[0].split(b"itl_us=")[1].split(b"&")[0])
                if b'"stream":true' not in body:
                    length = b"content-length: %d" % len(whole)
                    writer.write(head % (b"application/json", length) + whole)
                    await writer.drain()
                    continue
                writer.write(head % (b"text/event-stream", b"transfer-encoding: chunked"))
                has_ids = b'"return_token_ids":true' in body
                if has_ids:
                    writer.write(chunk(token % prompt))
                piece = chunk(token % (choice % (b"[4069]" if has_ids else b"null")))
                for _ in range(STREAM_TOKENS):
                    writer.write(piece)
                    await asyncio.sleep(pace["itl_us"] / 1e6)
                final = token % (b'"choices":[],' + usage % STREAM_TOKENS)
                writer.write(chunk(last) + chunk(final) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
                await writer.drain()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(main())


def _load(port: int, body_path: str, connections: int, seconds: float, key: str) -> None:
    """A closed-loop load client in Python; prints what loadc prints, as far as it is read."""
    body = Path(body_path).read_bytes()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    request = head.encode() + body
    latencies: list[float] = []
    errors: list[str] = []

    async def connection(until: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < until:
            started = time.monotonic()
            writer.write(request)
            answer_head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b"transfer-encoding: chunked" in answer_head:
                while (await reader.readuntil(b"\r\n")) != b"0\r\n":
                    pass
                await reader.readexactly(2)
            else:
                length = answer_head.split(b"content-length: ")[1].split(b"\r\n")[0]
                await reader.readexactly(int(length))
            latencies.append(time.monotonic() - started)
            if b" 200 " not in answer_head:
                errors.append(answer_head.decode())
        writer.close()

    async def main() -> float:
        started = time.monotonic()
        until = started + seconds
        await asyncio.gather(*(connection(until) for _ in range(connections)))
        return time.monotonic() - started

    elapsed = asyncio.run(main())
    ordered = sorted(latencies)
    quantiles = {
        "p50": ordered[len(ordered) // 2] * 1e6,
        "p99": ordered[int((len(ordered) - 1) * 0.99)] * 1e6,
    }
    report = {"done": len(latencies), "errors": len(errors), "error": errors[:1], "secs": elapsed}
    print(json.dumps({**report, "lat": quantiles}))


def _main(arguments: Sequence[str]) -> None:
    match list(arguments):
        case ["serve", *ports]:
            numbers = [int(port) for port in ports]
            _serve(numbers[:-1], numbers[-1])
        case ["engine", port]:
            _engine(int(port))
        case ["load", port, body, connections, seconds, key]:
            _load(int(port), body, int(connections), float(seconds), key)
        case _:
            if os.environ.get(HARNESS_VARIABLE) and shutil.which("cc") is None:
                raise SystemExit("the harness needs a C compiler (`cc`)")
            print(json.dumps(run(), indent=1))


if __name__ == "__main__":
    _main(sys.argv[1:])
