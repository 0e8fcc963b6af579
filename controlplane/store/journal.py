"""Group commit of what happens on the request path. Appending costs a list append; one task writes.

A flush is one transaction and may be repeated: rows are inserted once by their keys, and a
settlement moves money only for a request that its own UPDATE took out of 'open'. So after a lost
connection, when nobody knows whether the commit happened, the same entries are simply written
again.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from typing import Any, LiteralString, NamedTuple

import msgspec
import psycopg

from controlplane.store.replicas import FIRST_GENERATION
from controlplane.store.session import connect_arguments, libpq_url

log = logging.getLogger(__name__)

# Above this the gate admits nothing more; what was admitted is still taken in.
ENTRIES_MAX = 50_000
FLUSH_AT_ENTRIES = 200
FLUSH_AFTER_S = 0.05
# Bounds the time for which building one flush holds the event loop: about a millisecond.
FLUSH_ENTRIES_MAX = 1_000
FLUSH_S_MAX = 10.0
RETRY_S_MIN = 0.1
RETRY_S_MAX = 2.0


class OpenedRow(NamedTuple):
    """An accepted request."""

    id: str
    tenant_id: str
    key_id: str
    replica_id: str
    workflow_id: str | None
    step: int
    model: str
    endpoint: str
    is_stream: bool
    reserved_micro_usd: int
    opened_at: datetime


class DecisionRow(NamedTuple):
    """A decision; `record` is its full record in members of JSON, or None.

    `facts` are what the policy's rules read, in members of JSON; `rule` is the one that decided, and
    `sample_weight` the number of decisions that this row stands for.
    """

    request_id: str
    number: int
    replica_id: str
    verdict: str
    reason: str | None
    decode_engine_id: str | None
    prefill_engine_id: str | None
    cost_micro_usd: float | None
    ttft_ms_predicted: float | None
    cached_tokens_predicted: int | None
    policy_revision: str
    decided_at: datetime
    record: dict[str, Any] | None
    tenant_id: str | None = None
    model: str | None = None
    rule: str | None = None
    facts: dict[str, Any] | None = None
    sample_weight: int = 1


class AttemptRow(NamedTuple):
    """How one leg of one attempt of a request ended on one engine."""

    request_id: str
    number: int
    leg: str
    engine_id: str
    outcome: str
    detail: str


class Charge(NamedTuple):
    """What an account is charged, in its unit, and the life of the replica that held the money."""

    budget_id: str
    amount: int
    generation: int = FIRST_GENERATION


class SettledRow(NamedTuple):
    """The end of a request. `charges` says what each account is charged, in the account's unit;
    `settled_micro_usd` is what the ledger says that the call cost.
    """

    id: str
    state: str
    reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    is_usage_estimated: bool
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    queue_ms: float | None
    settled_micro_usd: int
    ended_at: datetime
    tenant_id: str
    workflow_id: str | None
    step: int
    replica_id: str
    charges: tuple[Charge, ...]


Entry = OpenedRow | DecisionRow | AttemptRow | SettledRow

_OPEN: LiteralString = """
INSERT INTO requests (id, tenant_id, key_id, replica_id, workflow_id, step, model, endpoint,
                      is_stream, reserved_micro_usd, opened_at)
SELECT id, tenant_id, key_id, replica_id, workflow_id, step, model, endpoint,
       is_stream, reserved_micro_usd, opened_at
FROM unnest(%t::text[], %t::text[], %t::text[], %t::text[], %t::text[], %t::int4[], %t::text[],
            %t::text[], %t::bool[], %t::int8[], %t::timestamptz[])
     AS given (id, tenant_id, key_id, replica_id, workflow_id, step, model, endpoint,
               is_stream, reserved_micro_usd, opened_at)
ON CONFLICT (id) DO NOTHING
"""

_DECIDE: LiteralString = """
INSERT INTO decisions (request_id, number, replica_id, verdict, reason, decode_engine_id,
                       prefill_engine_id, cost_micro_usd, ttft_ms_predicted,
                       cached_tokens_predicted, policy_revision, decided_at, record,
                       tenant_id, model, rule, facts, sample_weight)
SELECT request_id, number, replica_id, verdict, reason, decode_engine_id,
       prefill_engine_id, cost_micro_usd, ttft_ms_predicted,
       cached_tokens_predicted, policy_revision, decided_at, record::jsonb,
       tenant_id, model, rule, facts::jsonb, sample_weight
FROM unnest(%t::text[], %t::int2[], %t::text[], %t::text[], %t::text[], %t::text[], %t::text[],
            %t::float8[], %t::float8[], %t::int4[], %t::text[], %t::timestamptz[], %t::text[],
            %t::text[], %t::text[], %t::text[], %t::text[], %t::int4[])
     AS given (request_id, number, replica_id, verdict, reason, decode_engine_id,
               prefill_engine_id, cost_micro_usd, ttft_ms_predicted,
               cached_tokens_predicted, policy_revision, decided_at, record,
               tenant_id, model, rule, facts, sample_weight)
ON CONFLICT (request_id, number) DO NOTHING
"""

_ATTEMPT: LiteralString = """
INSERT INTO attempts (request_id, number, leg, engine_id, outcome, detail)
SELECT request_id, number, leg, engine_id, outcome, detail
FROM unnest(%t::text[], %t::int2[], %t::text[], %t::text[], %t::text[], %t::text[])
     AS given (request_id, number, leg, engine_id, outcome, detail)
ON CONFLICT (request_id, number, leg) DO NOTHING
"""

# Accounts are locked in the order of their ids, before anything else of the settlement: whoever
# moves money does, so no two wait in a ring, and the next statement reads leases that no one is
# changing.
_LOCK: LiteralString = """
SELECT id FROM budgets WHERE id = ANY (%t::text[]) ORDER BY id FOR NO KEY UPDATE
"""

# A charge is taken from the slice of the replica's life that held the money; should there be too little
# of it, because the replica was reaped while it was cut off, the rest is taken from the account if its
# limit still allows that.
_SETTLE: LiteralString = """
WITH given AS (
    SELECT * FROM unnest(%t::text[], %t::text[], %t::text[], %t::int4[], %t::int4[], %t::int4[],
                         %t::bool[], %t::float8[], %t::float8[], %t::float8[], %t::float8[],
                         %t::int8[], %t::timestamptz[])
         AS given (id, state, reason, prompt_tokens, cached_tokens, completion_tokens,
                   is_usage_estimated, ttft_ms, tpot_ms, e2e_ms, queue_ms,
                   settled_micro_usd, ended_at)
), charged AS (
    SELECT * FROM unnest(%t::text[], %t::text[], %t::int8[], %t::int8[])
         AS charged (id, budget_id, amount, generation)
), ended AS (
    UPDATE requests SET
        state = given.state, reason = given.reason, prompt_tokens = given.prompt_tokens,
        cached_tokens = given.cached_tokens, completion_tokens = given.completion_tokens,
        is_usage_estimated = given.is_usage_estimated, ttft_ms = given.ttft_ms,
        tpot_ms = given.tpot_ms, e2e_ms = given.e2e_ms, queue_ms = given.queue_ms,
        settled_micro_usd = given.settled_micro_usd, ended_at = given.ended_at
    FROM given
    WHERE requests.id = given.id AND requests.state = 'open'
    RETURNING requests.id, requests.tenant_id, requests.workflow_id, requests.step,
              requests.replica_id, requests.settled_micro_usd AS amount,
              (requests.state = 'succeeded')::int AS succeeded
), recorded AS (
    INSERT INTO ledger (request_id, tenant_id, workflow_id, amount_micro_usd, charges)
    SELECT id, tenant_id, workflow_id, amount, COALESCE(listed.charges, '{}')
    FROM ended LEFT JOIN (
        SELECT id, jsonb_object_agg(budget_id, amount) AS charges FROM charged GROUP BY id
    ) AS listed USING (id)
), stepped AS (
    INSERT INTO workflow_steps AS done (workflow_id, step, calls, calls_succeeded, spent_micro_usd)
    SELECT workflow_id, step, count(*), sum(succeeded), sum(amount)
    FROM ended WHERE workflow_id IS NOT NULL GROUP BY workflow_id, step ORDER BY workflow_id, step
    ON CONFLICT (workflow_id, step) DO UPDATE SET
        calls = done.calls + excluded.calls,
        calls_succeeded = done.calls_succeeded + excluded.calls_succeeded,
        spent_micro_usd = done.spent_micro_usd + excluded.spent_micro_usd
), charges AS (
    SELECT budget_id, replica_id, generation, sum(charged.amount)::int8 AS amount
    FROM ended JOIN charged USING (id) GROUP BY budget_id, replica_id, generation
), taken AS (
    SELECT charges.budget_id, charges.replica_id, charges.generation, charges.amount,
           LEAST(charges.amount, COALESCE(lease.amount, 0)) AS leased
    FROM charges LEFT JOIN budget_leases AS lease
         ON lease.budget_id = charges.budget_id AND lease.replica_id = charges.replica_id
            AND lease.generation = charges.generation
), slices AS (
    UPDATE budget_leases AS lease SET amount = lease.amount - taken.leased
    FROM taken
    WHERE lease.budget_id = taken.budget_id AND lease.replica_id = taken.replica_id
          AND lease.generation = taken.generation
), accounts AS (
    UPDATE budgets SET spent = spent + total.amount, reserved = reserved - total.leased
    FROM (
        SELECT budget_id, sum(amount)::int8 AS amount, sum(leased)::int8 AS leased
        FROM taken GROUP BY budget_id
    ) AS total
    WHERE budgets.id = total.budget_id
)
SELECT count(*) FROM ended
"""

# What says that a row can never be written, however often it is tried.
_PERMANENT = (psycopg.DataError, psycopg.IntegrityError, UnicodeError, TypeError, ValueError)


class Journal:
    """One writer's entries, in the order in which they happened. Belongs to one event loop."""

    def __init__(self, url: str) -> None:
        self._url = libpq_url(url)
        self._entries: deque[Entry] = deque()
        self._has_entries = asyncio.Event()
        self._has_batch = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._is_draining = False
        self._connection: psycopg.AsyncConnection | None = None
        # Counters since the start, read by the metrics.
        self.flushes = 0
        self.entries_written = 0
        self.entries_dropped = 0
        self.charges_dropped = 0
        self.flushes_failed = 0
        self.requests_settled = 0
        self.flush_s_last = 0.0

    # ------------------------------------------------------------ appending

    def opened(self, row: OpenedRow) -> None:
        self._append(row)

    def decided(self, row: DecisionRow) -> None:
        self._append(row)

    def attempted(self, row: AttemptRow) -> None:
        self._append(row)

    def settled(self, row: SettledRow) -> None:
        self._append(row)

    @property
    def entries_waiting(self) -> int:
        return len(self._entries)

    @property
    def is_full(self) -> bool:
        return len(self._entries) >= ENTRIES_MAX

    def _append(self, entry: Entry) -> None:
        entries = self._entries
        entries.append(entry)
        waiting = len(entries)
        if waiting == 1:
            self._is_empty.clear()
            self._has_entries.set()
        elif waiting == FLUSH_AT_ENTRIES:
            self._has_batch.set()

    # ------------------------------------------------------------ writing

    async def run(self) -> None:
        """Write until cancelled. An outage keeps the entries; a row that can not be written is
        dropped.
        """
        pause_s = RETRY_S_MIN
        try:
            while True:
                await self._until_due()
                batch = list(islice(self._entries, FLUSH_ENTRIES_MAX))
                try:
                    await self._write(batch)
                except (psycopg.Error, OSError, TimeoutError) as error:
                    self.flushes_failed += 1
                    log.warning(
                        "journal_waits",
                        extra={
                            "fields": {
                                "why": _first_line(error),
                                "entries": len(self._entries),
                                "pause_s": pause_s,
                            }
                        },
                    )
                    await self._disconnect()
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, RETRY_S_MAX)
                    continue
                pause_s = RETRY_S_MIN
                self._done(len(batch))
        finally:
            await self._disconnect()

    async def drain(self, timeout_s: float) -> int:
        """Write what waits, without waiting for more.

        Returns how many entries are left after `timeout_s`.
        """
        self._is_draining = True
        self._has_batch.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            log.error(  # noqa: TRY400 - the traceback says nothing
                "journal_not_drained", extra={"fields": {"entries": len(self._entries)}}
            )
        return len(self._entries)

    async def _until_due(self) -> None:
        """Return when a batch is full, or FLUSH_AFTER_S after the first entry."""
        await self._has_entries.wait()
        if len(self._entries) < FLUSH_AT_ENTRIES and not self._is_draining:
            try:
                async with asyncio.timeout(FLUSH_AFTER_S):
                    await self._has_batch.wait()
            except TimeoutError:
                pass

    def _done(self, count: int) -> None:
        entries = self._entries
        for _ in range(count):
            entries.popleft()
        if len(entries) < FLUSH_AT_ENTRIES and not self._is_draining:
            self._has_batch.clear()
        if not entries:
            self._has_entries.clear()
            self._is_empty.set()

    async def _write(self, batch: Sequence[Entry]) -> None:
        """Write a batch in one transaction; if a row of it is bad, write all the others.

        Raises what is worth another try.
        """
        started = time.perf_counter()
        try:
            await self._flush(batch)
        except _PERMANENT as error:
            await self._isolate(batch, error)
        self.flushes += 1
        self.flush_s_last = time.perf_counter() - started

    async def _isolate(self, batch: Sequence[Entry], error: Exception) -> None:
        """Halve the batch, all entries of a request together, until the bad rows stand alone."""
        by_request: dict[str, list[Entry]] = {}
        for entry in batch:
            by_request.setdefault(_request_of(entry), []).append(entry)
        if len(by_request) == 1:
            await self._write_one_by_one(batch)
            return
        log.warning(
            "journal_isolates",
            extra={"fields": {"why": _first_line(error), "requests": len(by_request)}},
        )
        groups = list(by_request.values())
        half = len(groups) // 2
        for part in (groups[:half], groups[half:]):
            entries = [entry for group in part for entry in group]
            try:
                await self._flush(entries)
            except _PERMANENT as reason:
                await self._isolate(entries, reason)

    async def _write_one_by_one(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            try:
                await self._flush([entry])
            except _PERMANENT as error:
                if isinstance(entry, SettledRow) and (entry.settled_micro_usd or entry.charges):
                    # INVARIANT I1: the request ends, even when what it used can not be charged.
                    self.charges_dropped += 1
                    _report("charge_dropped", entry, error)
                    await self._write_one_by_one([entry._replace(settled_micro_usd=0, charges=())])
                else:
                    self.entries_dropped += 1
                    _report("entry_dropped", entry, error)

    async def _flush(self, entries: Sequence[Entry]) -> None:
        opened = [entry for entry in entries if isinstance(entry, OpenedRow)]
        decided = [entry for entry in entries if isinstance(entry, DecisionRow)]
        attempted = [entry for entry in entries if isinstance(entry, AttemptRow)]
        # INVARIANT I1: of a request that ended twice, the first end alone is charged.
        settled = list(
            {row.id: row for row in reversed(entries) if isinstance(row, SettledRow)}.values()
        )
        statements: list[tuple[LiteralString, list[str]]] = []
        if opened:
            statements.append((_OPEN, _opened_columns(opened)))
        if decided:
            statements.append((_DECIDE, _decided_columns(decided)))
        if attempted:
            statements.append((_ATTEMPT, _attempted_columns(attempted)))
        if settled:
            statements.append((_LOCK, _accounts(settled)))
            statements.append((_SETTLE, [*_settled_columns(settled), *_charged_columns(settled)]))
        async with asyncio.timeout(FLUSH_S_MAX):
            connection = await self._connected()
            async with connection.pipeline(), connection.transaction():
                answers = [
                    await connection.execute(statement, parameters, prepare=True)
                    for statement, parameters in statements
                ]
            if settled:
                row = await answers[-1].fetchone()
                self.requests_settled += row[0] if row else 0
        self.entries_written += len(entries)

    async def _connected(self) -> psycopg.AsyncConnection:
        if self._connection is None or self._connection.closed:
            self._connection = await psycopg.AsyncConnection.connect(
                self._url, autocommit=True, **connect_arguments()
            )
        return self._connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


# ---------------------------------------------------------------- columns as array literals
#
# The driver's own way of writing arrays costs several times as much per value.

# Numbers of other libraries become plain ones.
_encode = msgspec.json.Encoder(enc_hook=float).encode

_DETAIL_AT = AttemptRow._fields.index("detail")
_DECIDED_JSON_AT = tuple(DecisionRow._fields.index(name) for name in ("record", "facts"))
# What the requests row holds already, and the charges, which are rows of their own.
_SETTLED_APART = frozenset({"tenant_id", "workflow_id", "step", "replica_id", "charges"})
_SETTLED_AT = [at for at, name in enumerate(SettledRow._fields) if name not in _SETTLED_APART]


def _opened_columns(rows: Sequence[OpenedRow]) -> list[str]:
    return [_array(column) for column in zip(*rows, strict=True)]


def _decided_columns(rows: Sequence[DecisionRow]) -> list[str]:
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
    for at in _DECIDED_JSON_AT:
        columns[at] = [
            None if members is None else _encode(members).decode() for members in columns[at]
        ]
    return [_array(column) for column in columns]


def _attempted_columns(rows: Sequence[AttemptRow]) -> list[str]:
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
    # The one text that an engine can choose; PostgreSQL has no NUL.
    columns[_DETAIL_AT] = [detail.replace("\x00", "") for detail in columns[_DETAIL_AT]]
    return [_array(column) for column in columns]


def _settled_columns(rows: Sequence[SettledRow]) -> list[str]:
    columns = list(zip(*rows, strict=True))
    return [_array(columns[at]) for at in _SETTLED_AT]


def _charged_columns(rows: Sequence[SettledRow]) -> list[str]:
    ids: list[str] = []
    accounts: list[str] = []
    amounts: list[int] = []
    generations: list[int] = []
    for row in rows:
        for charge in row.charges:
            if charge.amount:
                ids.append(row.id)
                accounts.append(charge.budget_id)
                amounts.append(charge.amount)
                generations.append(charge.generation)
    return [_array(ids), _array(accounts), _array(amounts), _array(generations)]


def _accounts(rows: Sequence[SettledRow]) -> list[str]:
    return [
        _array(list({charge.budget_id for row in rows for charge in row.charges if charge.amount}))
    ]


def _array(values: Sequence[object]) -> str:
    """PostgreSQL's array literal of numbers, booleans, instants or texts, some of them None.

    A JSON array is one but for its brackets, as long as no text needs an escape, which the two
    languages read differently.
    """
    data = _encode(values)
    if b"\\" in data:
        return "{" + ",".join([_quoted(value) for value in values]) + "}"
    return f"{{{data[1:-1].decode()}}}"


def _quoted(value: object) -> str:
    if value is None:
        return "NULL"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# ---------------------------------------------------------------- words for the log


def _request_of(entry: Entry) -> str:
    return entry.id if isinstance(entry, OpenedRow | SettledRow) else entry.request_id


def _report(event: str, entry: Entry, error: Exception) -> None:
    """Identifiers only: what a row holds may be the tenant's."""
    log.error(
        event,
        extra={
            "fields": {
                "kind": type(entry).__name__,
                "request": _request_of(entry),
                "why": _first_line(error),
            }
        },
    )


def _first_line(error: Exception) -> str:
    """The error without its detail, in which PostgreSQL quotes the row."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
