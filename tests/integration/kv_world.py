"""A replica's view of prefix caches over a real bus: a fleet, its prefix index, and calls as a gateway makes them."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from controlplane.bus import Bus
from controlplane.domain.catalog import Catalog, GpuType, Model, Node
from controlplane.domain.ids import GpuTypeName, ModelName, NodeId, RegionName
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.kv_view import KvView
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from controlplane.telemetry.metrics import Metrics
from dataplane.protocol import subjects
from dataplane.protocol.messages import Hello, Telemetry, decode
from tests.integration.agent_world import NODE

SALT = 7
WAIT_S_MAX = 20.0
# Messages of telemetry, four a second, in which an agent has nothing more to tell: longer than it waits
# for growth to end, and counted by its own clock, however slow the machine.
QUIET_MESSAGES = 5


def catalog(model: str) -> Catalog:
    gpu = GpuTypeName("g")
    return Catalog(
        revision=1,
        regions=(RegionName("lab"),),
        gpu_types={
            gpu: GpuType(
                name=gpu, hbm_bytes=80 * 10**9, bandwidth_bytes_per_s=3.35e12, flops_per_s=9.89e14,
                price_micro_usd_per_hour=3_250_000, price_source="test", price_date="2026-11-01",
            )
        },
        models={
            ModelName(model): Model(
                name=ModelName(model), parameters=8 * 10**9, layers=32, hidden_size=4096,
                weights_bytes=16 * 10**9, kv_bytes_per_token=131_072, context_tokens_max=32_768,
                load_ms=1_000, price_prompt_micro_usd_per_mtok=1, price_cached_micro_usd_per_mtok=1,
                price_completion_micro_usd_per_mtok=1,
            )
        },
        slo_classes={},
        nodes={
            NodeId(NODE): Node(
                id=NodeId(NODE), region=RegionName("lab"), gpu_type=gpu, gpus=1,
                address="127.0.0.1", is_cordoned=False,
            )
        },
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Called:
    """Cached prompt tokens as predicted and as reported, and what was answered."""

    predicted: int
    reported: int
    prompt_tokens: int
    text: str


class Replica:
    """`loses` says which reports never arrive here."""

    def __init__(
        self,
        name: str,
        model: str,
        url: str,
        password: str,
        loses: Callable[[bytes], bool] = lambda _: False,
    ) -> None:
        self.model = model
        self.metrics = Metrics()
        self.prefixes = PrefixIndex()
        self.fleet = FleetState(self.prefixes, TickLog())
        self.fleet.use_catalog(catalog(model))
        self.loses = loses
        self.bus = Bus(url, user="control", password=password, name=name)
        self.view = KvView(self.bus, self.fleet, self.metrics)
        self._name = name
        self._calls = itertools.count(1)
        self._quiet_messages = 0
        self._seqs: dict[str, int] = {}
        take = self.view.on_report

        def lossy(subject: str, data: bytes) -> None:
            if not self.loses(data):
                take(subject, data)

        self.view.on_report = lossy  # type: ignore[method-assign]

    async def join(self) -> None:
        await self.bus.connect()
        await self.bus.subscribe(subjects.ALL_HELLOS, self._on_hello)
        await self.bus.subscribe(subjects.ALL_TELEMETRY, self._on_telemetry)
        await self.view.join()
        await self.bus.publish(subjects.ROLL_CALL, b"{}")

    def _on_hello(self, _subject: str, data: bytes) -> None:
        self.fleet.hello(decode(data, Hello), time.monotonic() * 1000)

    def _on_telemetry(self, _subject: str, data: bytes) -> None:
        message = decode(data, Telemetry)
        self.fleet.telemetry(message, time.monotonic() * 1000)
        self.view.on_telemetry(message)
        self._quiet_messages = self._quiet_messages + 1 if message.kv_seqs == self._seqs else 0
        self._seqs = message.kv_seqs

    async def until(self, is_so: Callable[[], bool], words: str = "") -> None:
        ends = time.monotonic() + WAIT_S_MAX
        while not is_so():
            assert time.monotonic() < ends, words or "it never came to be"
            await asyncio.sleep(0.02)

    async def following(self, engine_id: str = "e1") -> None:
        def is_followed() -> bool:
            entry = self.fleet.entry_of(engine_id)
            return entry is not None and self.prefixes._engines[entry.row.index].is_followed

        await self.until(is_followed, "the engine is not followed")

    async def quiet(self) -> None:
        """Until the agent has told what there is to tell: its reports have not gone on for a while."""
        self._quiet_messages = 0
        await self.until(
            lambda: self._quiet_messages >= QUIET_MESSAGES, "the agent goes on telling"
        )

    def index_of(self, engine_id: str = "e1") -> int:
        entry = self.fleet.entry_of(engine_id)
        assert entry is not None
        return entry.row.index

    def predict(self, messages: list[dict[str, str]], engine_id: str = "e1") -> int:
        """Prompt tokens that the engine is taken to hold of this conversation."""
        return self._asked(messages, engine_id)[0]

    async def call(
        self,
        messages: list[dict[str, str]],
        *,
        tokens: int = 24,
        engine_id: str = "e1",
        **members: Any,
    ) -> Called:
        """As a gateway does: predict, route, send, learn."""
        predicted, digests, prefix_tokens, prompt_tokens = self._asked(messages, engine_id)
        index = self.index_of(engine_id)
        session = f"req-{self._name}-{next(self._calls):x}"
        self.prefixes.routed(index, digests, prompt_tokens, prefix_tokens, session)
        entry = self.fleet.entry_of(engine_id)
        assert entry is not None
        host, port = entry.address
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            **members,
        }
        async with httpx2.AsyncClient(trust_env=False, timeout=60) as client:
            response = await client.post(
                f"http://{host}:{port}/v1/chat/completions",
                json=body,
                headers={"x-session-id": session},
            )
        answer = response.json()
        usage = answer["usage"]
        self.prefixes.measure(digests, usage["prompt_tokens"])
        reported = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        self.prefixes.served(
            index, session, usage["prompt_tokens"], usage["completion_tokens"], reported
        )
        return Called(
            predicted,
            reported,
            usage["prompt_tokens"],
            answer["choices"][0]["message"]["content"],
        )

    def _asked(
        self, messages: list[dict[str, str]], engine_id: str
    ) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
        raw = msgspec.json.encode(messages)[:-1]
        digests, boundaries = self.prefixes.chain(raw, SALT)
        prompt_tokens, prefix_tokens = self.prefixes.tokens_at(
            digests, boundaries, len(raw), len(raw) // 4
        )
        found = self.prefixes.cached(digests, prefix_tokens, prompt_tokens - 1)
        predicted = found.get(self.index_of(engine_id), 0)
        return predicted, digests, prefix_tokens, prompt_tokens


@contextlib.asynccontextmanager
async def replica(
    name: str, model: str, url: str, password: str, **more: Any
) -> AsyncIterator[Replica]:
    """A replica that listens."""
    made = Replica(name, model, url, password, **more)
    await made.join()
    try:
        yield made
    finally:
        await made.bus.close()


def user(words: str, times: int = 1) -> dict[str, str]:
    return {"role": "user", "content": words * times}
