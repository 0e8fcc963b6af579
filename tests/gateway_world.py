"""Around the gateway: a small honest gate, engines that follow a script byte for byte, and a running server."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import uvicorn

from controlplane.domain.catalog import Limits, Model, Principal, Role, Tenant
from controlplane.domain.decision import Placement, Reason, Refuse
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import (
    EngineId,
    GpuTypeName,
    KeyId,
    ModelName,
    NodeId,
    RegionName,
    RequestId,
    SloClassName,
    TenantId,
)
from controlplane.domain.outcome import AttemptOutcome, RequestState, Usage
from controlplane.domain.transfer import Connector, KvSource
from controlplane.gateway.hot_path import HotPath
from controlplane.gateway.server import make_server
from controlplane.gateway.sweeper import Sweeper
from controlplane.gateway.upstream import Address, Upstream
from controlplane.runtime.call import Call, monotonic_ms
from controlplane.runtime.idempotency import Idempotency
from controlplane.telemetry.metrics import Metrics
from controlplane.telemetry.tracing import Tracing
from policies.evaluate import Terms

KEY = "hw-tenant-test"
MODEL = Model(
    name=ModelName("mock"),
    parameters=1,
    layers=1,
    hidden_size=1,
    weights_bytes=1,
    kv_bytes_per_token=1,
    context_tokens_max=131_072,
    load_ms=0,
    price_prompt_micro_usd_per_mtok=0,
    price_cached_micro_usd_per_mtok=0,
    price_completion_micro_usd_per_mtok=0,
)
PRINCIPAL = Principal(
    key_id=KeyId("k1"),
    tenant=Tenant(
        id=TenantId("t1"),
        name="one",
        tenant_class="gold",
        slo_class=SloClassName("standard"),
        is_disabled=False,
        cache_salt="salt-t1",
    ),
)


def engine_row(index: int, role: Role = Role.BOTH) -> EngineRow:
    return EngineRow(
        index=index,
        engine_id=EngineId(f"e{index}"),
        node_id=NodeId("n"),
        region=RegionName("r"),
        region_bit=1,
        gpu_type=GpuTypeName("g"),
        gpu_bit=1,
        model=ModelName("mock"),
        role=role,
        context_tokens_max=131_072,
        kv_tokens_capacity=1_000_000,
        seats_capacity=64,
        micro_usd_per_ms=1.0,
        prefill_base_ms=1.0,
        prefill_ms_per_token=0.1,
        prefill_ms_per_token_sq=0.0,
        decode_ms_base=1.0,
        decode_ms_per_seq=0.1,
        decode_ms_per_kv_token=0.0,
        kv_price_micro_usd_per_token_s=0.0,
        load_ms=0,
    )


@dataclass(frozen=True)
class RequestView:
    """The part of a request that the gateway reads."""

    id: RequestId
    prompt_tokens: int


class TicketView:
    """A ticket as the gateway sees it."""

    def __init__(self, call: Call, request_id: str) -> None:
        self.id = request_id
        self.call = call
        self.request = RequestView(RequestId(self.id), max(1, call.prompt_bytes // 4))
        self.model = MODEL
        self.n = call.n
        self.completion_tokens_max = min(call.completion_tokens_max or 256, 1_024)
        self.cache_salt = call.principal.tenant.cache_salt
        self.prefill_url: Address | None = None
        self.kv_source: KvSource | None = None
        self.decode_url: Address = ("", 0)
        self.placement: Placement
        self.attempt = 0
        self.resumes = 0
        self.left: set[int] = set()
        self.decided_ms = 0.0
        self.queue_ms = 0.0
        self.tokens_check_at = 0
        self.rate_headers: tuple[tuple[bytes, bytes], ...] = ()
        self.warnings: tuple[str, ...] = ()


TERMS = Terms(
    is_allowed=True,
    denied_by="",
    region_names=None,
    gpu_type_names=None,
    weight=1.0,
    completion_tokens_default=256,
    completion_tokens_max=1_024,
    fan_out_max=1,
    steps_max=1,
    step_gap_ms=0,
    reserve_ratio=1.0,
    slo_class=None,
    may_disaggregate=True,
    priority=5,
    over_budget_cuts=True,
    limits=Limits(),
    cache_ttl_s=0,
    cache_price_ratio=1.0,
)
SECOND_KEY = "hw-tenant-second"
SECOND_PRINCIPAL = replace(PRINCIPAL, tenant=replace(PRINCIPAL.tenant, id=TenantId("t2")))


@dataclass(frozen=True)
class Settlement:
    ticket_id: str
    state: RequestState
    usage: Usage
    reason: str | None
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float


@dataclass
class RoundRobinGate:
    """Admits everything, each attempt on the next engine (or pair); remembers all that it is told.

    `gate_open` can be closed to keep calls waiting. `retries_max` bounds retries per call. With `keeps`
    false it only counts, for benchmarks. An answer of more than `budget_tokens` is cut there, asked for
    every `check_tokens`. When a prefill engine fails, its place is taken by the next of `other_prefills`.
    `lacks` are the features that an engine, by its number, does not have.
    """

    engines: list[Address] = field(default_factory=list)
    pairs: list[tuple[Address, Address]] = field(default_factory=list)
    kv_source: KvSource = KvSource(Connector.NIXL)  # noqa: RUF009  (frozen)
    other_prefills: list[Address] = field(default_factory=list)
    keeps_kv: bool = True
    refusal: Refuse | None = None
    keeps: bool = True
    retries_max: int = 2
    calls: list[Call] = field(default_factory=list)
    refusals: list[Refuse] = field(default_factory=list)
    settlements: list[Settlement] = field(default_factory=list)
    attempts: list[tuple[str, str, AttemptOutcome, str]] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    waiting_cancelled: int = 0
    terms: Terms | Refuse = TERMS
    cached_refusal: Refuse | None = None
    limits_told: tuple[tuple[bytes, bytes], ...] = ()
    warnings: tuple[str, ...] = ()
    queue_ms: float = 0.0
    budget_tokens: int | None = None
    check_tokens: int = 1
    may_come_back: bool = True
    resumes_max: int = 8
    moved: list[str] = field(default_factory=list)
    hands_over: bool = False
    held_left: set[str] = field(default_factory=set)
    model: Model = MODEL
    checks: list[int] = field(default_factory=list)
    cached_usages: list[Usage] = field(default_factory=list)
    lacks: dict[int, frozenset[str]] = field(default_factory=dict)
    gate_open: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate_open.set()
        self._next = 0
        self.admitted = 0
        self._ids = 0
        self._rows = [engine_row(index) for index in range(len(self.engines))]
        for index, lacks in self.lacks.items():
            self._rows[index].lacks = lacks

    def new_id(self) -> RequestId:
        self._ids += 1
        return RequestId(f"req-{self._ids}")

    def rate_headers(self, call: Call) -> tuple[tuple[bytes, bytes], ...]:
        assert call.model
        return self.limits_told

    def cache_terms(self, call: Call) -> Terms | Refuse:
        assert call.n == 1
        return self.terms

    async def admit_cached(self, call: Call, usage: Usage) -> TicketView | Refuse:
        self.cached_usages.append(usage)
        if self.cached_refusal is not None:
            return self.cached_refusal
        return self._ticket(call, call.request_id or f"hit-{len(self.cached_usages)}")

    def leave_out(self, ticket: TicketView, feature: str) -> None:
        ticket.left |= {row.index for row in self._rows if feature in row.lacks}

    def elsewhere(self, ticket: TicketView, left: EngineRow) -> Placement | None:
        assert left is ticket.placement.decode
        if ticket.resumes >= self.resumes_max:
            return None
        ticket.left.add(left.index)
        return ticket.placement

    def move(self, ticket: TicketView, placement: Placement, *, keeps_left: bool = False) -> None:
        assert placement is ticket.placement
        if keeps_left:
            self.held_left.add(ticket.id)
        ticket.resumes += 1
        ticket.attempt += 1
        self._place(ticket)

    async def resume(self, ticket: TicketView, left: EngineRow) -> bool:
        placement = self.elsewhere(ticket, left)
        if placement is not None:
            self.move(ticket, placement)
        return placement is not None

    def goes_on(self, ticket: TicketView) -> None:
        self.moved.append(ticket.id)
        self.held_left.discard(ticket.id)

    def let_go(self, ticket: TicketView) -> None:
        self.held_left.discard(ticket.id)

    def hand_over_source(self, left: EngineRow, to: EngineRow) -> KvSource | None:
        assert left in self._rows
        assert to in self._rows
        return self.kv_source if self.hands_over else None

    def may_return(self, ticket: TicketView) -> bool:
        assert ticket.id
        return self.may_come_back

    def may_continue(self, ticket: TicketView, completion_tokens: int) -> Refuse | None:
        self.checks.append(completion_tokens)
        assert self.budget_tokens is not None
        if completion_tokens >= self.budget_tokens:
            return Refuse(Reason.INSUFFICIENT_QUOTA, "the tenant's budget is spent")
        ticket.tokens_check_at = completion_tokens + self.check_tokens
        return None

    async def dry_run(self, call: Call) -> dict[str, Any]:
        return {"verdict": "admit", "model": call.model, "engine": "e0"}

    def knows_model(self, name: str) -> Model | None:
        return MODEL if name == MODEL.name else None

    def models(self, principal: Principal) -> list[Model]:
        assert principal is PRINCIPAL
        return [MODEL]

    async def authenticate(self, plain_key: bytes) -> Principal | None:
        if plain_key == SECOND_KEY.encode():
            return SECOND_PRINCIPAL
        return PRINCIPAL if plain_key == KEY.encode() else None

    async def admit(self, call: Call) -> TicketView | Refuse:
        self.admitted += 1
        if self.keeps:
            self.calls.append(call)
        if not self.gate_open.is_set():
            try:
                await self.gate_open.wait()
            except asyncio.CancelledError:
                self.waiting_cancelled += 1
                raise
        if self.refusal is not None:
            return self.refusal
        ticket = self._ticket(call, call.request_id or self.new_id())
        self._place(ticket)
        return ticket

    def _ticket(self, call: Call, request_id: str) -> TicketView:
        ticket = TicketView(call, request_id)
        ticket.model = self.model
        ticket.rate_headers, ticket.warnings = self.limits_told, self.warnings
        ticket.queue_ms = self.queue_ms
        ticket.tokens_check_at = 0 if self.budget_tokens is None else self.check_tokens
        return ticket

    def retry(
        self, ticket: TicketView, failed: EngineRow, outcome: AttemptOutcome, detail: str
    ) -> bool:
        assert failed is ticket.placement.decode
        if ticket.attempt >= self.retries_max:
            return False
        ticket.attempt += 1
        ticket.left.add(failed.index)
        self._place(ticket)
        return True

    def prefill_failed(
        self, ticket: TicketView, failed: EngineRow, outcome: AttemptOutcome
    ) -> None:
        assert failed is ticket.placement.prefill
        assert outcome is not AttemptOutcome.OK
        ticket.prefill_url = self.other_prefills.pop(0) if self.other_prefills else None
        ticket.attempt += ticket.prefill_url is not None

    def prefill_kept(self, ticket: TicketView, holder: EngineRow) -> bool:
        assert holder.role is Role.PREFILL
        if self.keeps_kv:
            ticket.prefill_url = None
        return self.keeps_kv

    def attempted(
        self,
        ticket: TicketView,
        row: EngineRow,
        leg: str,
        outcome: AttemptOutcome,
        detail: str = "",
        retry_after_ms: int | None = None,
    ) -> None:
        del retry_after_ms
        if self.keeps:
            self.attempts.append((str(row.engine_id), leg, outcome, detail))

    def first_token(self, ticket: TicketView, ttft_ms: float) -> None:
        if self.keeps:
            self.first_tokens.append(ttft_ms)

    def settle(
        self,
        ticket: TicketView,
        state: RequestState,
        usage: Usage,
        reason: str | None,
        ttft_ms: float | None,
        tpot_ms: float | None,
        e2e_ms: float,
    ) -> None:
        if not self.keeps:
            return
        self.settlements.append(
            Settlement(ticket.id, state, usage, reason, ttft_ms, tpot_ms, e2e_ms)
        )
        self.settled.set()

    def refused(self, call: Call | None, refuse: Refuse) -> str:
        self.refusals.append(refuse)
        return refuse.decision or f"dec-{len(self.refusals)}"

    def _place(self, ticket: TicketView) -> None:
        number = self._next
        self._next += 1
        ticket.decided_ms = monotonic_ms()
        if self.pairs:
            prefill, decode = self.pairs[number % len(self.pairs)]
            ticket.prefill_url, ticket.decode_url = prefill, decode
            ticket.kv_source = self.kv_source
            rows = engine_row(100 + number, Role.DECODE), engine_row(200 + number, Role.PREFILL)
            ticket.placement = Placement(rows[0], rows[1], 0, 0, 0.0, 0.0, 0.0)
            return
        index = number % len(self.engines)
        if len(ticket.left) < len(self.engines):
            while index in ticket.left:
                index = (index + 1) % len(self.engines)
        ticket.decode_url = self.engines[index]
        ticket.placement = Placement(self._rows[index], None, 0, 0, 0.0, 0.0, 0.0)


# ---------------------------------------------------------------- engines that follow a script


@dataclass
class Seen:
    """One request as it arrived at an engine."""

    head: str
    body: dict[str, Any]
    raw: bytes
    hung_up: asyncio.Event

    def header(self, name: str) -> str | None:
        for line in self.head.split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip()
        return None


Script = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]


class ScriptedEngine:
    """A raw TCP server: each request is given to the next script, the last script to all further ones."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.seen: list[Seen] = []
        self.connections = 0
        self.address: Address = ("", 0)
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = self._server.sockets[0].getsockname()[:2]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                seen = Seen(head, {}, b"", asyncio.Event())
                seen.raw = await reader.readexactly(int(seen.header("content-length") or 0))
                seen.body = json.loads(seen.raw)
                script = self.scripts[min(len(self.seen), len(self.scripts) - 1)]
                self.seen.append(seen)
                answering = asyncio.ensure_future(script(seen, writer))
                watching = asyncio.ensure_future(_watch(reader, seen))
                await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    answering.cancel()
                    return
                watching.cancel()
                await asyncio.wait({watching})
                answering.result()
        writer.close()


async def _watch(reader: asyncio.StreamReader, seen: Seen) -> None:
    """Notice that the client hung up while it is answered; it sends nothing meanwhile."""
    while not reader.at_eof() and reader.exception() is None:
        await asyncio.sleep(0.005)
    seen.hung_up.set()


def sends(*pieces: bytes | float) -> Script:
    """Write the pieces, each in a TCP segment of its own; a number is a pause in seconds."""

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
                continue
            writer.write(piece)
            await writer.drain()
            if len(pieces) > 1:
                await asyncio.sleep(0.002)

    return script


def resets_after(data: bytes) -> Script:
    """Write these bytes, then reset the connection."""

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        if data:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.02)
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    return script


def hangs(after: bytes = b"") -> Script:
    """Write these bytes, then nothing for ever."""

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(after)
        await writer.drain()
        await asyncio.Event().wait()

    return script


def whole(status: int, body: object, *headers: str) -> Script:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = "".join(f"{header}\r\n" for header in headers)
    head = (
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nserver: uvicorn\r\n"
        f"{lines}content-length: {len(data)}\r\n\r\n"
    )
    return sends(head.encode() + data)


# ---------------------------------------------------------------- what vLLM sends

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _chunk(choices: list[object], **more: object) -> bytes:
    return event(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "mock",
            "choices": choices,
            **more,
        }
    )


def role(**more: object) -> bytes:
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return _chunk([choice], **more)


def token(text: str = " tok", **more: object) -> bytes:
    choice = {
        "index": 0,
        "delta": {"content": text},
        "logprobs": None,
        "finish_reason": None,
        "token_ids": None,
    }
    return _chunk([choice], **more)


def finish(reason: str = "stop", **more: object) -> bytes:
    choice = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": reason}
    return _chunk([choice], **more)


def used(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    return _chunk(
        [],
        usage={
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": details,
        },
    )


def answer(
    text: str = "hello", prompt: int = 16, completion: int = 8, **more: object
) -> dict[str, object]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "mock",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None,
        },
        "kv_transfer_params": None,
        **more,
    }


def stream(*events: bytes) -> bytes:
    """A whole stream, one HTTP chunk per event."""
    return STREAM_HEAD + b"".join(chunked(one) for one in events) + END


# ---------------------------------------------------------------- a running gateway


@dataclass
class World:
    gate: RoundRobinGate
    metrics: Metrics
    sweeper: Sweeper
    upstream: Upstream
    port: int
    server: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def dial(self) -> "Client":
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        return Client(reader, writer)

    @contextlib.asynccontextmanager
    async def dialled(self) -> "AsyncIterator[Client]":
        client = await self.dial()
        try:
            yield client
        finally:
            client.writer.close()

    async def post(
        self, body: object, path: str = "/v1/chat/completions", **headers: str
    ) -> "Answer":
        """One call on a connection of its own."""
        client = await self.dial()
        try:
            await client.send(body, path, **headers)
            return await client.answer()
        finally:
            client.writer.close()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """A raw HTTP/1.1 client that can misbehave."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, body: object, path: str = "/v1/chat/completions", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {
            "host": "gateway",
            "authorization": f"Bearer {KEY}",
            "content-type": "application/json",
            "content-length": str(len(data)),
        }
        lines.update({name.replace("_", "-"): value for name, value in headers.items()})
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        self.writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.partition(":") for line in lines[1:] if line)
        return int(lines[0].split()[1]), {key.lower(): value.strip() for key, _, value in pairs}

    async def chunk(self) -> bytes:
        """One HTTP chunk; empty at the end."""
        size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def answer(self) -> Answer:
        status, headers = await self.head()
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
            return Answer(status, headers, body, is_whole=True)
        pieces = []
        try:
            while piece := await self.chunk():
                pieces.append(piece)
        except (asyncio.IncompleteReadError, ConnectionError):
            return Answer(status, headers, b"".join(pieces), is_whole=False)
        return Answer(status, headers, b"".join(pieces), is_whole=True)


async def _fallback(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    assert scope["type"] == "http"
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]}
    )
    await send({"type": "http.response.body", "body": b"fallback"})


@contextlib.asynccontextmanager
async def running(
    gate: RoundRobinGate,
    *,
    period_s: float = 1.0,
    tracing: Tracing | None = None,
    idempotency: Idempotency | None = None,
) -> AsyncIterator[World]:
    """The gateway with `gate`, served by uvicorn in this loop."""
    metrics = Metrics()
    sweeper = Sweeper(period_s)
    upstream = Upstream(sweeper)
    hot_path = HotPath(
        gate,  # type: ignore[arg-type]
        upstream,
        metrics,
        _fallback,
        tracing=tracing,
        idempotency=idempotency,
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = make_server(hot_path, sweeper, metrics, new_id=gate.new_id, host="127.0.0.1", port=0)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    sweeping = asyncio.ensure_future(sweeper.run())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield World(gate, metrics, sweeper, upstream, listener.getsockname()[1], server)
    finally:
        for link in tuple(server.server_state.connections):
            link.transport.abort()
        server.should_exit = True
        await serving
        sweeping.cancel()
        await asyncio.wait({sweeping})
        upstream.close()


async def until(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    """Wait for a condition that something else brings about, and fail when it does not."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
