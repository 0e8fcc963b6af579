"""An engine of a whole Headway is killed under many streams of the official SDK: each goes on elsewhere, is said
once, and is paid once.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import AsyncOpenAI
from sqlalchemy import text

from cli.processes import LocalCluster
from controlplane.store.session import make_engine

from .conftest import check_invariants, client_of, engines

pytestmark = [pytest.mark.fault, pytest.mark.anyio, pytest.mark.timeout(180)]

STREAMS = 16
TOKENS = 1000
RECOVERY_S_MAX = 30.0


@dataclass
class Heard:
    engine: str = ""
    text: str = ""
    reasons: list[str] = field(default_factory=list)
    usage: tuple[int, int] = (0, 0)
    request_id: str = ""


def calls() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for number in range(STREAMS):
        body: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0}
        words = f"question {number} " + "word " * (40 + 10 * number)
        if number % 2:
            body["messages"] = [{"role": "user", "content": words}]
        else:
            body["prompt"] = words
        if number % 5 == 0:
            body |= {"temperature": 1, "seed": number + 1}
        body["extra_body"] = {"ignore_eos": True}
        made.append(body)
    return made


async def listen(
    client: AsyncOpenAI, body: dict[str, Any], on_piece: Callable[[Heard], None]
) -> Heard:
    create = client.chat.completions if "messages" in body else client.completions
    answer = await create.with_raw_response.create(  # type: ignore[attr-defined]
        model="small", stream=True, stream_options={"include_usage": True}, **body
    )
    got = Heard(answer.headers["x-headway-engine"], request_id=answer.headers["x-request-id"])
    async for chunk in answer.parse():
        if chunk.usage:
            got.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            got.text += (choice.text if delta is None else delta.content) or ""
            if choice.finish_reason:
                got.reasons.append(choice.finish_reason)
        on_piece(got)
    return got


async def test_streams_outlive_their_engine(cluster: LocalCluster) -> None:
    bodies = calls()
    ended: list[str] = []
    heard: dict[str, int] = {}

    def on_piece(got: Heard) -> None:
        heard[got.engine] = heard.get(got.engine, 0) + 1
        if not ended and heard[got.engine] > 60 and got.engine.startswith("n1"):
            ended.append(got.engine)
            os.kill(cluster.engine_pids()[got.engine], signal.SIGKILL)

    async with client_of(cluster, "acme", retries=0) as client:
        want = [await listen(client, body, lambda _: None) for body in bodies]
        got = await asyncio.gather(*(listen(client, body, on_piece) for body in bodies))
    assert ended
    for have, whole, body in zip(got, want, bodies, strict=True):
        assert (have.text, have.reasons, have.usage) == (whole.text, ["length"], whole.usage), body
    await check_invariants(cluster)
    legs = await attempts(cluster, [one.request_id for one in got if one.engine == ended[0]])
    assert {"continue", "replay"} <= {leg for leg, _ in legs}
    assert sum(outcome == "broken_stream" for _, outcome in legs) >= 2
    tokens = await charged(cluster, [one.request_id for one in got])
    assert tokens == sorted(one.usage for one in got)
    async with asyncio.timeout(RECOVERY_S_MAX):
        while not all(row["is_accepting"] for row in await engines(cluster)):
            await asyncio.sleep(0.2)


async def attempts(cluster: LocalCluster, ids: list[str]) -> list[tuple[str, str]]:
    asked = "SELECT leg, outcome FROM attempts WHERE request_id = ANY(:ids) ORDER BY number"
    return await rows(cluster, asked, ids)


async def charged(cluster: LocalCluster, ids: list[str]) -> list[tuple[int, int]]:
    asked = (
        "SELECT prompt_tokens, completion_tokens FROM requests WHERE id = ANY(:ids) ORDER BY 1, 2"
    )
    return await rows(cluster, asked, ids)


async def rows(cluster: LocalCluster, asked: str, ids: list[str]) -> list[Any]:
    engine = make_engine(cluster.database_url)
    try:
        async with engine.connect() as connection:
            return [tuple(row) for row in await connection.execute(text(asked), {"ids": ids})]
    finally:
        await engine.dispose()
