"""The overload laboratory in small: its caller against the real SDK, and a few seconds of overload and of faults.

The bounds are generous: the figures that matter are those of a whole run of `tests.benchmarks.overload`.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice, pairwise
from random import Random

import pytest
from openai import APIError, AsyncOpenAI

from dataplane.engines.simulated.text import text_tokens, token_count
from tests.benchmarks.overload.fleet import MODEL, LabCluster, engine_times, running
from tests.benchmarks.overload.measure import Call, after_refusals, at_home_ratio, jain, quantile
from tests.benchmarks.overload.play import Fate, Player
from tests.benchmarks.overload.report import as_json
from tests.benchmarks.overload.scenarios import Settings, failing_run, open_run
from tests.benchmarks.overload.sdk import Caller, Try
from tests.benchmarks.overload.workload import (
    TENANTS,
    DeadlineModel,
    Plan,
    alone_s,
    plans,
    prefill_s,
    stream,
    text,
)

pytestmark = [pytest.mark.timeout(180)]


# Settings.rate is the load of the whole fleet; a smoke has few arrivals, so its shares are coarse.
SMOKE = Settings(seconds=10.0, warm_up_s=5.0)
ANSWER = b'{"choices":[{"message":{"role":"assistant","content":"fine"}}]}'
PAUSE_TOLERANCE_S = 0.3


@dataclass(slots=True)
class Case:
    """What a server answers first, time after time: a status, headers, or a closed connection (status 0)."""

    name: str
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    failures: int = 9


CASES = (
    Case("rate_limit", 429),
    Case("server_error", 500, failures=1),
    Case("conflict", 409, failures=1),
    Case("timeout_status", 408, failures=1),
    Case("bad_request", 400),
    Case("quota", 429, {"x-should-retry": "false"}),
    Case("asked_again", 400, {"x-should-retry": "true", "retry-after-ms": "100"}, failures=2),
    Case("milliseconds", 429, {"retry-after-ms": "250", "retry-after": "1"}, failures=1),
    Case("seconds", 503, {"retry-after": "1"}, failures=1),
    Case("too_long", 503, {"retry-after": "121"}),
    Case("too_long_whatever", 503, {"retry-after-ms": "121000", "x-should-retry": "true"}),
    Case("zero", 429, {"retry-after-ms": "0"}, failures=1),
    Case("nonsense", 429, {"retry-after-ms": "soon", "retry-after": "0.2"}, failures=1),
    Case("dropped", 0, failures=1),
)  # fmt: skip


@dataclass(slots=True)
class Seen:
    """One request as the server saw it."""

    at_s: float
    retry_count: str
    read_timeout: str


class Scripted:
    """Answers by the case that the path names, and remembers what it was sent."""

    def __init__(self) -> None:
        self._cases = {case.name: case for case in CASES}
        self.seen: defaultdict[tuple[str, str], list[Seen]] = defaultdict(list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        await reader.readexactly(int(headers["content-length"]))
        # POST /<who>/<case>/chat/completions
        _, who, name, *_ = head[0].split(" ")[1].split("/")
        case, seen = self._cases[name], self.seen[who, name]
        seen.append(
            Seen(
                at_s=time.monotonic(),
                retry_count=headers["x-stainless-retry-count"],
                read_timeout=headers["x-stainless-read-timeout"],
            )
        )
        status, extra, body = 200, {}, ANSWER
        if len(seen) <= case.failures:
            if not case.status:
                return False
            status, extra, body = case.status, case.headers, b'{"error":{"message":"no"}}'
        lines = [f"HTTP/1.1 {status} Said", f"content-length: {len(body)}"]
        lines += ["content-type: application/json", *(f"{n}: {v}" for n, v in extra.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        return True


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[Scripted, str]]:
    script = Scripted()
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield script, f"http://127.0.0.1:{port}"
    finally:
        server.close()


@pytest.mark.anyio
async def test_caller_behaves_as_the_official_sdk() -> None:
    messages = [{"role": "user", "content": "hello"}]

    async def official(url: str, case: Case) -> bool:
        async with AsyncOpenAI(base_url=f"{url}/sdk/{case.name}", api_key="key") as client:
            try:
                await client.chat.completions.create(model=MODEL, messages=messages)
            except APIError:
                return False
            return True

    async def ours(url: str, case: Case) -> bool:
        caller = Caller(f"{url}/lab/{case.name}")
        try:
            body = {"model": MODEL, "messages": messages}
            return (await caller.post("/chat/completions", body, "key")).is_ok
        finally:
            await caller.close()

    async with scripted() as (script, url):
        outcomes = await asyncio.gather(
            *(caller(url, case) for case in CASES for caller in (official, ours))
        )
    for case, theirs, own in zip(CASES, outcomes[::2], outcomes[1::2], strict=True):
        assert theirs == own, case
        sdk, lab = script.seen["sdk", case.name], script.seen["lab", case.name]
        assert [each.retry_count for each in sdk] == [each.retry_count for each in lab], case
        assert {float(each.read_timeout) for each in (*sdk, *lab)} == {600.0}, case
        for one, other in zip(pauses_s(sdk), pauses_s(lab), strict=True):
            assert one == pytest.approx(other, abs=PAUSE_TOLERANCE_S), case


def pauses_s(seen: list[Seen]) -> list[float]:
    return [then.at_s - now.at_s for now, then in pairwise(seen)]


@pytest.fixture(scope="module")
async def laboratory(anyio_backend: str) -> AsyncIterator[LabCluster]:
    async with running(TENANTS) as cluster:
        yield cluster


@pytest.mark.anyio
async def test_a_workflow_alone_takes_the_time_that_its_deadline_is_made_of(
    laboratory: LabCluster,
) -> None:
    times = engine_times()
    player = Player(laboratory, seed=7)
    try:
        for plan in islice(stream(seed=7, times=times, deadlines=DeadlineModel.OWN), 2):
            ended = await player.workflow(plan)
            took_s = ended.ended_s - ended.began_s
            # Its prefix is not cached yet: that much longer than alone.
            prefix_s = prefill_s(plan.kind.prefix_tokens, 0, times)
            alone = alone_s(plan.kind.prefix_tokens, plan.steps, times) + prefix_s
            assert ended.fate is Fate.SUCCEEDED, ended
            assert 0.8 * alone < took_s < 4.0 * alone, (took_s, alone)
    finally:
        await player.close()


@pytest.mark.anyio
async def test_what_has_begun_is_finished_at_twice_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its own cluster, warm at once: what other calls taught of sizes would count for as long as it takes.
    for name in ("HEADWAY_ENGINE_RAMP_S", "HEADWAY_POOL_RAMP_S"):
        monkeypatch.setenv(name, "0")
    async with running(TENANTS) as cluster:
        run = await open_run(cluster, SMOKE, name="smoke", load=2.0)
    told = json.dumps(as_json(run), indent=1)
    assert run.arrived > 50, told
    # Far from what a quiet machine shows, and far from the collapse without admission.
    assert run.high_succeeded_ratio >= 0.6, told
    assert run.goodput >= 0.3 * SMOKE.rate, told
    assert run.wasted_ratio <= 0.5, told
    assert run.late_kill_ratio <= 0.5, told
    assert run.attempts_per_request <= 1.15, told


@pytest.mark.anyio
async def test_retries_stay_within_budget_when_half_of_all_attempts_fail(
    laboratory: LabCluster,
) -> None:
    result = await failing_run(laboratory, Settings(seconds=8.0))
    told = json.dumps(as_json(result), indent=1)
    assert result.calls > 100, told
    assert result.attempts_per_request <= 1.25, told
    assert result.tries_per_call <= 1.35, told


def test_plans_repeat_and_three_of_ten_are_of_high_priority() -> None:
    def planned(seed: int) -> list[Plan]:
        return plans(
            seed=seed, times=engine_times(), rate=5.0, until_s=60.0, deadlines=DeadlineModel.KIND
        )

    one, same, other = planned(1), planned(1), planned(2)
    assert one == same
    assert one != other
    assert sum(plan.tier.is_high for plan in one) == pytest.approx(0.3 * len(one), abs=1.0)
    assert len(one) == pytest.approx(300, abs=60)
    assert [plan.arrival_s for plan in one] == sorted(plan.arrival_s for plan in one)


def test_only_tries_after_a_pause_that_was_asked_for_count() -> None:
    def attempt(status: int, asked_s: float | None = None, *, is_refused: bool = False) -> Try:
        return Try(status=status, reason="", retry_after_s=asked_s, at_s=0.0, is_refused=is_refused)

    tries = [
        [attempt(429, 1.0), attempt(200)],
        [attempt(429, 1.0), attempt(429, 2.0), attempt(200, is_refused=True)],
        [attempt(500), attempt(200)],
        [attempt(503, 1.0)],
    ]
    assert after_refusals(tries) == [True, False, False]


def test_a_step_is_at_home_where_the_step_before_it_ran() -> None:
    def call(workflow: str | None, step: int, engine: str | None) -> Call:
        return Call(
            id=f"{workflow}-{step}", workflow=workflow, step=step, engine=engine, tenant="t",
            state="succeeded", reason=None, prompt_tokens=9, cached_tokens=0, completion_tokens=1,
            queue_ms=0.0, attempts=1,
        )  # fmt: skip

    calls = [call("w", 1, "a"), call("w", 0, "a"), call("w", 2, "b"), call("v", 0, "a")]
    assert at_home_ratio([*calls, call("v", 1, None), call(None, 0, "b")]) == 0.5
    assert at_home_ratio([]) == 1.0


def test_fairness_and_quantiles() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert [quantile([4.0, 1.0, 3.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 3.0, 4.0]
    assert quantile([], 0.5) == 0.0


def test_text_has_the_tokens_that_were_asked_for() -> None:
    words = text(Random(1), 37)
    assert token_count(text_tokens(words)) == 37
