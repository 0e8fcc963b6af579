"""Calls with a name of the tenant's: each runs once, and sending it again brings the same answer.

PostgreSQL knows who has a name. Answers are kept in this replica's memory only, within a limit of
bytes; after that, and on other replicas, a finished call is known but can not be replayed.
"""

import asyncio
from collections import OrderedDict
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.errors import StateUnavailable
from controlplane.domain.ids import ReplicaId, RequestId, TenantId
from controlplane.runtime.call import monotonic_ms
from controlplane.store import idempotency

ANSWER_BYTES_MAX = 1024 * 1024
ANSWERS_BYTES_MAX = 64 * 1024 * 1024
# What an entry costs besides its bytes.
ANSWER_BYTES_EXTRA = 1_024
# Ends that PostgreSQL was not told yet. Beyond this the oldest stay open until their replica ends.
UNWRITTEN_MAX = 10_000
RETRY_S = 1.0
IN_PROGRESS_RETRY_MS = 1_000


class Answer(NamedTuple):
    """What the tenant was sent: names of headers in lower case, the body whole."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Fresh(NamedTuple):
    """The key is this request's. It must be ended by `finish` or by `release`."""

    tenant: TenantId
    key: str
    digest: bytes
    request_id: RequestId


class InProgress(NamedTuple):
    request_id: RequestId
    retry_after_ms: int


class Done(NamedTuple):
    """The call succeeded before. `answer` is None where it is not kept."""

    request_id: RequestId
    answer: Answer | None


class Mismatch(NamedTuple):
    """The key belongs to a call with another body."""

    request_id: RequestId


class _Kept(NamedTuple):
    digest: bytes
    request_id: RequestId
    answer: Answer
    expires_ms: float


class Idempotency:
    """Belongs to one event loop. `finish` and `release` are synchronous; writing happens behind them."""

    def __init__(
        self, engine: AsyncEngine, replica_id: ReplicaId, bytes_max: int = ANSWERS_BYTES_MAX
    ) -> None:
        self._engine = engine
        self._replica_id = replica_id
        self._bytes_max = bytes_max
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self.bytes = 0
        # By key, whether its request succeeded.
        self._unwritten: OrderedDict[Fresh, bool] = OrderedDict()
        self._writer: asyncio.Task[None] | None = None

    async def begin(
        self, tenant: TenantId, key: str, digest: bytes, request_id: RequestId
    ) -> Fresh | InProgress | Done | Mismatch:
        """Take the key for this request, or say what became of the one that has it.

        Raises StateUnavailable; whether the key was taken then is not known, and the request must not
        run.
        """
        kept = self._recall(tenant, key)
        if kept is not None:
            if kept.digest != digest:
                return Mismatch(kept.request_id)
            return Done(kept.request_id, kept.answer)
        held = await idempotency.claim(
            self._engine,
            tenant_id=tenant,
            key=key,
            body_digest=digest,
            request_id=request_id,
            replica_id=self._replica_id,
        )
        if held is None:
            return Fresh(tenant, key, digest, request_id)
        if held.body_digest != digest:
            return Mismatch(held.request_id)
        is_done = held.is_done or self._unwritten.get(
            Fresh(tenant, key, digest, held.request_id), False
        )
        if not is_done:
            return InProgress(held.request_id, IN_PROGRESS_RETRY_MS)
        # It may have ended here while PostgreSQL was asked.
        kept = self._recall(tenant, key)
        return Done(held.request_id, None if kept is None else kept.answer)

    def finish(self, fresh: Fresh, answer: Answer | None) -> None:
        """The request succeeded with this answer; None: it is not to be kept."""
        if answer is not None and len(answer.body) <= ANSWER_BYTES_MAX:
            self._keep(fresh, answer)
        self._end(fresh, is_done=True)

    def release(self, fresh: Fresh) -> None:
        """The request was refused, failed or was cancelled: the next one with the key runs."""
        self._end(fresh, is_done=False)

    async def drain(self, timeout_s: float) -> int:
        """Wait for what is to be written; how many ends were not."""
        writer = self._writer
        if writer is not None:
            await asyncio.wait({writer}, timeout=timeout_s)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        return len(self._unwritten)

    # ------------------------------------------------------------ inside

    def _recall(self, tenant: TenantId, key: str) -> _Kept | None:
        kept = self._kept.get((tenant, key))
        if kept is None:
            return None
        if kept.expires_ms <= monotonic_ms():
            self._forget(tenant, key)
            return None
        self._kept.move_to_end((tenant, key))
        return kept

    def _keep(self, fresh: Fresh, answer: Answer) -> None:
        self._forget(fresh.tenant, fresh.key)
        expires_ms = monotonic_ms() + idempotency.KEPT_S * 1000.0
        self._kept[fresh.tenant, fresh.key] = _Kept(
            fresh.digest, fresh.request_id, answer, expires_ms
        )
        self.bytes += _size(answer)
        while self.bytes > self._bytes_max:
            self._forget(*next(iter(self._kept)))

    def _forget(self, tenant: str, key: str) -> None:
        kept = self._kept.pop((tenant, key), None)
        if kept is not None:
            self.bytes -= _size(kept.answer)

    def _end(self, fresh: Fresh, *, is_done: bool) -> None:
        self._unwritten[fresh] = is_done
        if len(self._unwritten) > UNWRITTEN_MAX:
            self._unwritten.popitem(last=False)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    async def _write(self) -> None:
        try:
            while self._unwritten:
                fresh, is_done = next(iter(self._unwritten.items()))
                end = idempotency.finish if is_done else idempotency.free
                try:
                    await end(self._engine, fresh.tenant, fresh.key, fresh.request_id)
                except StateUnavailable:
                    await asyncio.sleep(RETRY_S)
                else:
                    self._unwritten.pop(fresh, None)
        finally:
            self._writer = None


def _size(answer: Answer) -> int:
    headers = sum(len(name) + len(value) for name, value in answer.headers)
    return len(answer.body) + headers + ANSWER_BYTES_EXTRA
