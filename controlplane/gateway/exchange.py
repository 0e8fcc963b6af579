"""One accepted call, from its ticket to its settlement: engines are asked, the answer is relayed.

Whatever happens, cancellation included, the ticket is settled exactly once, with what was used.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw

from controlplane.domain.decision import Placement, Reason, Refuse
from controlplane.domain.fleet import EngineRow
from controlplane.domain.outcome import AttemptOutcome, RequestState, Usage
from controlplane.domain.transfer import KvSource
from controlplane.gateway import cut, legs, usage
from controlplane.gateway.answer_heads import Lines, ticket_lines
from controlplane.gateway.body import NOTHING_MORE, Body, for_hand_over, with_transfer
from controlplane.gateway.counting import count_answer
from controlplane.gateway.heartbeat import STREAM_HEAD
from controlplane.gateway.relay import Tap
from controlplane.gateway.resume import Resume, ResumeClass, settled_by
from controlplane.gateway.resume_record import Space
from controlplane.gateway.resume_splice import Continuation, Splice
from controlplane.gateway.upstream import (
    Address,
    Connection,
    LeavingError,
    SilentError,
    Upstream,
    UpstreamError,
)
from controlplane.runtime.call import Call, Ticket, monotonic_ms
from controlplane.telemetry.metrics import Metrics
from controlplane.telemetry.tracing import CallRecord, Leg, TraceContext, Tracing, leg_span_id
from controlplane.wire.openai import Answer, Detokenized
from controlplane.wire.outcomes import OUTCOMES, envelope, error_response, stream_error_event
from dataplane.protocol.messages import Feature

if TYPE_CHECKING:
    from controlplane.runtime.admit import Gate

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# From asking an engine to its first token; a call's own deadline may be sooner.
FIRST_TOKEN_S_MAX: Final = 60.0
# The longest pause inside of a stream, and the longest whole answer.
SILENCE_S_MAX: Final = 60.0
WHOLE_S_MAX: Final = 600.0
# How soon a busy engine is worth asking again when it does not say: telemetry is younger by then.
BACKPRESSURE_RETRY_MS: Final = 1_000
# Statuses of engines that mean the same to a client; any other one of 4xx is told as the first.
BAD_REQUEST: Final = 400
CLIENT_STATUSES: Final = frozenset({BAD_REQUEST, 404, 413, 422})
# Bytes per token of an answer that came without usage.
BYTES_PER_TOKEN: Final = 4

DETOKENIZE_PATH: Final = b"/detokenize"
DETOKENIZE_S_MAX: Final = 2.0
# Tokens at the end of a chunk that an engine may hold back: a character has at most four bytes.
HELD_TOKENS_MAX: Final = 4
# KV of a stream is handed over from where so many tokens would be computed again. Measured with vLLM 0.32: 500
# tokens take 16 ms to compute and 27 to hand over, 6,000 tokens 462 and 42.
HAND_OVER_TOKENS_MIN: Final = 512
# An engine that is left may answer so late and not later: then the next one computes.
HAND_OVER_S_MAX: Final = 2.0

_EVENT_STREAM: Final = b"text/event-stream"
_HELD_KV: Final = b'"kv_transfer_params":{'
_ABORT: Final = "abort"
# vLLM's words for a prompt and an answer that do not fit its context window together.
_TOO_LONG: Final = "maximum context length"
_FAILURES: Final = frozenset({RequestState.FAILED, RequestState.EXPIRED})
_LENGTH: Final = "length"

_answer = msgspec.json.Decoder(Answer).decode
_index = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """One engine failed a call; `status` is its HTTP status, 0 when there was none."""

    row: EngineRow
    outcome: AttemptOutcome
    detail: str
    status: int = 0
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _Giver:
    """An engine that a stream has left and that holds its KV."""

    row: EngineRow
    address: Address
    source: KvSource


class Exchange:
    """Serves one ticket. `run` raises nothing but a cancellation that the client did not cause."""

    __slots__ = (
        "_admitted_ms", "_asked", "_body", "_cached_by_prefill", "_call", "_extra_head", "_gaps", "_gate",
        "_giver", "_has_engine_worked", "_held", "_is_at_limit", "_is_client_gone", "_is_head_sent", "_is_left",
        "_is_moved", "_is_started", "_last_token_ms", "_legs", "_lost_ms", "_metrics", "_path", "_reason", "_resume",
        "_send", "_span_id", "_status", "_tap", "_ticket", "_trace", "_tracing", "_ttft_ms", "_upstream", "_usage",
        "has_answered", "state",
    )  # fmt: skip

    def __init__(
        self,
        gate: "Gate",
        upstream: Upstream,
        metrics: Metrics,
        tracing: Tracing | None,
        *,
        ticket: Ticket,
        call: Call,
        body: Body,
        path: bytes,
        send: Send,
        trace: TraceContext | None,
        admitted_ms: float,
        is_client_gone: Callable[[], bool],
        is_head_sent: bool = False,
        extra_head: Lines | None = None,
        space: Space,
    ) -> None:
        """`is_head_sent`: the stream was opened while the call waited. `extra_head`: further headers.

        `space` is where records of streams lie.
        """
        self._gate = gate
        self._upstream = upstream
        self._metrics = metrics
        self._tracing = tracing
        self._ticket = ticket
        self._call = call
        body.serve_as(ticket.model.name, ticket.n)
        self._body = body
        self._resume = Resume(body, space, ticket.completion_tokens_max) if body.is_stream else None
        # Engines after the first have been asked, the last one was left behind, and when it was lost.
        self._is_moved = self._is_left = False
        self._lost_ms = 0.0
        self._path = path
        self._send = send
        self._trace = trace
        self._is_client_gone = is_client_gone
        self._extra_head = extra_head
        # The status is decided; and the client has got something of an engine's answer.
        self._is_head_sent = is_head_sent
        self._is_started = False
        self._is_at_limit = False
        self._has_engine_worked = False
        # The engine call that is under way: its row, leg, address and start.
        self._asked: tuple[EngineRow, str, Address, float] | None = None
        # Engine calls that have ended, the span that engines are told for the one under way, and the times
        # without an engine: what a trace is made of later.
        self._legs: list[Leg] = []
        self._span_id = 0
        self._gaps: list[tuple[str, float, float]] = []
        self._admitted_ms = admitted_ms
        self._status = legs.OK
        self._tap: Tap | None = None
        self._cached_by_prefill: int | None = None
        # KV of an attempt whose decode engine could not be reached.
        self._held: legs.Prefilled | None = None
        # A living engine that was left, from which the next one can fetch the KV.
        self._giver: _Giver | None = None
        self._ttft_ms: float | None = None
        self._last_token_ms = 0.0
        self.state = RequestState.FAILED
        self._reason: Reason | None = Reason.INTERNAL_ERROR
        self._usage: Usage | None = None
        # The client has an answer that it may keep, whole or cut at the end of its budget.
        self.has_answered = False

    @property
    def usage(self) -> Usage:
        """What was used so far."""
        return self._used()

    @property
    def is_repeatable(self) -> bool:
        """Nothing but the call itself decided the answer: no other model, no limit of the moment."""
        ticket, call = self._ticket, self._call
        return ticket.model.name == call.model and (
            not self._is_at_limit or ticket.completion_tokens_max == call.completion_tokens_max
        )

    async def run(self) -> None:
        model = (self._ticket.model.name,)
        self._metrics.in_flight.add(model)
        try:
            await self._serve()
        except asyncio.CancelledError:
            if not self._is_client_gone():
                # The process is ending: no stream may look finished that is not.
                self._reason = Reason.STREAM_INTERRUPTED
                await self._refuse(Refuse(Reason.STREAM_INTERRUPTED, "the server is shutting down"))
                raise
            self.state, self._reason = RequestState.CANCELLED, None
            self._metrics.disconnects.add(model)
        except Exception:
            # The outermost frame of a call: a mistake of ours ends this call only.
            trace = None if self._trace is None else f"{self._trace.trace_id:032x}"
            log.exception(
                "call_failed", extra={"fields": {"request": self._ticket.id, "trace": trace}}
            )
            self.state, self._reason = RequestState.FAILED, Reason.INTERNAL_ERROR
            await self._refuse(Refuse(Reason.INTERNAL_ERROR, "an unexpected error; it is logged"))
        finally:
            self._metrics.in_flight.add(model, -1)
            self._settle()
            self._abandoned()

    # ------------------------------------------------------------ attempts

    async def _serve(self) -> None:
        while True:
            failure = await self._attempt()
            if failure is None:
                return
            if failure.outcome is AttemptOutcome.OK:
                # Some of several answers want more than the others: the same engine is asked again.
                self._ticket.attempt += 1
                continue
            if failure.outcome is not AttemptOutcome.CANCELLED:
                self._metrics.upstream_errors.add((failure.row.engine_id, failure.outcome))
            if self._is_started and await self._end_here():
                return
            if self._is_left:
                self._is_left = False
                continue
            if self._is_started:
                if await self._go_on(failure):
                    continue
            elif self._gate.retry(self._ticket, failure.row, failure.outcome, failure.detail):
                self._forget_attempt()
                continue
            await self._give_up(failure)
            return

    async def _end_here(self) -> bool:
        """End a stream of which nothing was lost but its end. False: more than that was."""
        resume = self._resume
        if resume is None or not resume.settle():
            return False
        used = self._used()
        ending = resume.ending(used)
        if ending is None:
            return False
        self._last_token_ms = monotonic_ms()
        self.state, self._reason, self._usage = RequestState.SUCCEEDED, None, used
        self._metrics.stream_resumes.add((str(resume.resume_class), "ended"))
        await self._send_piece(ending, is_last=True)
        self.has_answered = True
        return True

    async def _go_on(self, failure: Failure) -> bool:
        """Let another engine go on with a stream whose engine was lost; False: it ends here."""
        resume, tap = self._resume, self._tap
        assert resume is not None
        assert tap is not None
        label = str(resume.resume_class)
        if not self._lost_ms:
            self._lost_ms = monotonic_ms()
        self._upstream.suspect(self._ticket.decode_url)
        if isinstance(tap, Splice) and tap.is_diverged:
            self._metrics.stream_resumes.add((label, "diverged"))
            return False
        if not resume.can_go_on():
            self._metrics.stream_resumes.add((label, "not_possible"))
            return False
        self._keep_from_lacking(resume)
        is_placed = await self._gate.resume(self._ticket, failure.row)
        if not is_placed or self._is_lacking(resume):
            self._metrics.stream_resumes.add((label, "no_engine"))
            return False
        resume.resumes += 1
        self._is_moved = True
        return True

    def _keep_from_lacking(self, resume: Resume) -> None:
        """Let no engine that tells no token ids be asked to go on by token ids."""
        if resume.resume_class.needs_ids:
            self._gate.leave_out(self._ticket, Feature.TOKEN_IDS)

    def _is_lacking(self, resume: Resume) -> bool:
        """Whether the stream was given to an engine that came up meanwhile and lacks token ids."""
        row = self._ticket.placement.decode
        return resume.resume_class.needs_ids and Feature.TOKEN_IDS in row.lacks

    async def _attempt(self) -> Failure | None:
        """Ask the engines of the current placement; None when the client has its answer."""
        ticket, body, resume = self._ticket, self._body, self._resume
        placement = ticket.placement
        row = placement.decode
        path = self._path
        cache_salt = _salt_for(ticket, row)
        held: legs.Prefilled | None = None
        if self._is_moved:
            assert resume is not None
            leg = str(resume.resume_class)
            failure = await self._make_sure(resume, row)
            if failure is not None:
                return failure
            tokens = sum(resume.counted() or ())
            path, engine_body = resume.next_request(path, cache_salt)
            held = await self._hand_over(tokens, path, engine_body)
            if held is not None:
                engine_body = with_transfer(engine_body, held.transfer)
        else:
            if resume is not None and Feature.TOKEN_IDS in row.lacks:
                resume.go_without_ids()
            held = await self._prefill()
            leg = "whole" if held is None else "decode"
            engine_body = body.for_engine(
                ticket.completion_tokens_max,
                cache_salt,
                None if held is None else held.transfer,
                NOTHING_MORE if resume is None else resume.engine_members,
            )
        headers = self._engine_headers(None if held is None else held.request_id)
        is_fetching_kv = held is not None and held.is_fetched
        first_token_s_max = legs.FETCH_S_MAX if is_fetching_kv else FIRST_TOKEN_S_MAX
        self._begin(row, leg)
        try:
            connection = await self._upstream.post(
                ticket.decode_url,
                path,
                headers,
                engine_body,
                deadline=self._deadline(first_token_s_max if body.is_stream else WHOLE_S_MAX),
                is_fetching_kv=is_fetching_kv,
            )
        except UpstreamError as error:
            # KV that nobody has asked for yet can still be fetched, by another engine.
            self._held = held if error.is_unsent and not self._is_moved else None
            return self._failed(row, error.outcome, error.detail)
        outcome = legs.outcome_of(connection.status)
        if outcome is not AttemptOutcome.OK:
            return await self._refused_by_engine(row, connection, outcome)
        self._has_engine_worked = True
        if body.is_stream:
            return await self._relay(row, connection, is_fetching_kv=is_fetching_kv)
        return await self._answer_whole(row, connection)

    async def _make_sure(self, resume: Resume, row: EngineRow) -> Failure | None:
        """Ask how far the text of the last tokens was heard, where a stream can not tell."""
        for strand in resume.unsure():
            headers = self._engine_headers(None)
            self._begin(row, "detokenize")
            for _ in range(HELD_TOKENS_MAX):
                body = _encode({"model": self._ticket.model.name, "tokens": strand.unsure})
                try:
                    connection = await self._upstream.post(
                        self._ticket.decode_url,
                        DETOKENIZE_PATH,
                        headers,
                        body,
                        deadline=self._deadline(DETOKENIZE_S_MAX),
                    )
                    text = _detokenized(await connection.read())
                except UpstreamError as error:
                    return self._failed(row, error.outcome, error.detail)
                connection.release()
                if text is None:
                    return self._failed(row, AttemptOutcome.SERVER_ERROR, "no text of tokens")
                if settled_by(strand, text):
                    break
            else:
                return self._failed(row, AttemptOutcome.SERVER_ERROR, "another text of tokens")
            self._ended(AttemptOutcome.OK)
        return None

    async def _prefill(self) -> legs.Prefilled | None:
        """KV that the decode engine can get, or None: then that one computes the prompt itself."""
        ticket = self._ticket
        held, self._held = self._held, None
        if (
            held is not None
            and monotonic_ms() < held.until_s * 1000.0
            and self._gate.prefill_kept(ticket, held.row)
        ):
            return self._note_prefilled(held)
        # Of the first engine; what another one is predicted to need teaches nothing and is not told.
        predicted_ms = ticket.placement.ttft_ms_predicted
        while ticket.prefill_url is not None and ticket.kv_source is not None:
            row, source = ticket.placement.prefill, ticket.kv_source
            assert row is not None
            request_id = legs.id_of_attempt(ticket.id, ticket.attempt)
            now_s = monotonic_ms() / 1000.0
            left_s = None
            if self._call.deadline_ms is not None:
                left_s = self._deadline_ms() / 1000.0 - now_s
            self._begin(row, "prefill", ticket.prefill_url)
            filled = await legs.prefill(
                self._upstream,
                row,
                source,
                ticket.prefill_url,
                self._path,
                self._engine_headers(request_id, is_whole=True),
                self._body.for_prefill(_salt_for(ticket, row), legs.asked(source, request_id)),
                request_id=request_id,
                now_s=now_s,
                deadline_s=now_s + legs.patience_s(source, predicted_ms, left_s),
            )
            if isinstance(filled, legs.Prefilled) and monotonic_ms() >= filled.until_s * 1000.0:
                filled = legs.Unfilled(AttemptOutcome.TIMEOUT, "the lease of the KV has run out")
            if isinstance(filled, legs.Prefilled):
                self._ended(AttemptOutcome.OK)
                return self._note_prefilled(filled)
            self._ended(filled.outcome, filled.detail)
            self._metrics.upstream_errors.add((row.engine_id, filled.outcome))
            self._gate.prefill_failed(ticket, row, filled.outcome)
        return None

    async def _hand_over(
        self, tokens: int, path: bytes, engine_body: bytes
    ) -> legs.Prefilled | None:
        """Let the engine that was left keep its KV of the stream's `tokens` until the next one has fetched it.

        None: it is not worth it, or failed; then the next one computes, and nothing holds the first one.
        """
        giver, self._giver = self._giver, None
        if giver is None:
            return None
        ticket = self._ticket
        if tokens - ticket.placement.cached_tokens >= HAND_OVER_TOKENS_MIN:
            request_id = legs.id_of_attempt(ticket.id, ticket.attempt)
            self._begin(giver.row, "hand_over", giver.address)
            filled = await legs.prefill(
                self._upstream,
                giver.row,
                giver.source,
                giver.address,
                path,
                self._engine_headers(request_id, is_whole=True),
                for_hand_over(engine_body, legs.asked(giver.source, request_id)),
                request_id=request_id,
                now_s=monotonic_ms() / 1000.0,
                deadline_s=self._deadline(HAND_OVER_S_MAX),
            )
            if isinstance(filled, legs.Prefilled):
                self._ended(AttemptOutcome.OK)
                return filled
            self._ended(filled.outcome, filled.detail)
        self._gate.let_go(ticket)
        return None

    def _note_prefilled(self, held: legs.Prefilled) -> legs.Prefilled:
        self._has_engine_worked = True
        self._cached_by_prefill = held.cached_tokens
        return held

    async def _refused_by_engine(
        self, row: EngineRow, connection: Connection, outcome: AttemptOutcome
    ) -> Failure | None:
        """An answer of 4xx or 5xx. A mistake of the client's is passed on in the engine's words."""
        status = connection.status
        try:
            answer = await connection.read()
        except UpstreamError as error:
            return self._failed(row, error.outcome, error.detail)
        except BaseException:
            connection.abort()
            raise
        connection.release()
        if outcome is not AttemptOutcome.CLIENT_ERROR:
            detail, retry_after_ms = f"status {status}", connection.retry_after_ms
            self._ended(outcome, detail, retry_after_ms)
            return Failure(row, outcome, detail, status, retry_after_ms)
        self._ended(outcome, f"status {status}")
        reason, body = _client_error(answer)
        self.state, self._reason = RequestState.FAILED, reason
        self._usage = usage.NOTHING_USED
        told = status if status in CLIENT_STATUSES else BAD_REQUEST
        await self._send_whole(told, body, reason)
        return None

    # ------------------------------------------------------------ answers

    async def _relay(
        self, row: EngineRow, connection: Connection, *, is_fetching_kv: bool
    ) -> Failure | None:
        """Relay a stream. A failure after the first token is final, and is told by `_give_up`."""
        if not connection.content_type.startswith(_EVENT_STREAM):
            connection.abort()
            return self._failed(row, AttemptOutcome.SERVER_ERROR, "the answer is not a stream")
        resume = self._resume
        assert resume is not None
        if self._is_moved:
            assert self._tap is not None
            tap = self._tap = resume.next_tap(self._tap.tokens)
        else:
            tap = self._tap = resume.first_tap()
        check_at = self._ticket.tokens_check_at
        if resume.record is not None:
            connection.expect_steady()
        try:
            while True:
                try:
                    data = await connection.next()
                except SilentError as silence:
                    if self._has_moved(row, silence):
                        connection.abort()
                        return Failure(row, silence.outcome, silence.detail)
                    continue
                piece = tap.feed(data) if data else tap.end()
                if self._ttft_ms is None and tap.has_token:
                    self._note_first_token(connection)
                elif self._lost_ms and piece:
                    self._note_resumed(connection)
                if tap.is_done:
                    if tap.is_cut_short:
                        connection.abort()
                    else:
                        connection.release()
                    break
                if tap.loss is not None:
                    connection.abort()
                    if piece and self._is_started:
                        await self._send_piece(piece)
                    return self._failed(row, _outcome_of(tap), tap.loss)
                if piece:
                    if check_at and tap.tokens >= check_at and tap.unfinished:
                        refuse = self._gate.may_continue(self._ticket, tap.tokens)
                        if refuse is not None:
                            connection.abort()
                            await self._cut(tap, piece, refuse)
                            return None
                        check_at = self._ticket.tokens_check_at
                    await self._send_piece(piece)
        except UpstreamError as error:
            outcome = error.outcome
            if outcome is AttemptOutcome.CONNECT_ERROR:
                outcome = AttemptOutcome.BROKEN_STREAM
            return self._failed(row, outcome, error.detail)
        except BaseException:
            if is_fetching_kv and not tap.has_token:
                connection.abort_after_first_byte()
            else:
                connection.abort()
            raise
        self._last_token_ms = monotonic_ms()
        self._ended(AttemptOutcome.OK)
        self.state, self._reason = RequestState.SUCCEEDED, None
        self._is_at_limit = tap.is_at_limit
        if tap.usage is not None:
            self._usage = usage.reported(tap.usage, self._cached_by_prefill)
        await self._send_piece(piece, is_last=True)
        self.has_answered = True
        return None

    def _has_moved(self, row: EngineRow, silence: SilentError) -> bool:
        """Leave an engine that fell silent or is drained, if another one can go on, and only then: it may be just
        slow. A drained one is left only by whoever goes on behind what was delivered, for others would have to
        begin again.
        """
        resume = self._resume
        assert resume is not None
        silent_ms = monotonic_ms()
        is_well = isinstance(silence, LeavingError)
        if is_well and (not self._is_started or resume.resume_class is not ResumeClass.CONTINUE):
            return False
        if self._is_started:
            if not resume.can_go_on():
                return False
            self._keep_from_lacking(resume)
        placement = self._gate.elsewhere(self._ticket, row)
        if not isinstance(placement, Placement):
            return False
        self._ended(silence.outcome, silence.detail)
        address = self._ticket.decode_url
        source = None
        if is_well:
            source = self._gate.hand_over_source(row, placement.decode)
        else:
            self._upstream.suspect(address)
        self._giver = None if source is None else _Giver(row, address, source)
        self._gate.move(self._ticket, placement, keeps_left=source is not None)
        self._is_left = True
        if self._is_started:
            self._lost_ms = self._lost_ms or silent_ms
            self._is_moved = True
            resume.resumes += 1
        else:
            self._forget_attempt()
        return True

    def _note_resumed(self, connection: Connection) -> None:
        """Another engine has said something new."""
        resume = self._resume
        assert resume is not None
        label = str(resume.resume_class)
        now_ms = monotonic_ms()
        self._gaps.append((label, self._lost_ms, now_ms))
        gap_ms, self._lost_ms = now_ms - self._lost_ms, 0.0
        self._metrics.stream_resumes.add((label, "resumed"))
        self._metrics.resume_gap.observe(gap_ms / 1000.0, (label,))
        self._metrics.resume_tokens.add((label,), resume.take_repeated())
        self._gate.goes_on(self._ticket)
        connection.expect_flow(SILENCE_S_MAX)

    async def _cut(self, tap: Tap, piece: bytes, refuse: Refuse) -> None:
        """Money for more is not there: the answer ends after `piece`, as if at its token limit."""
        self._last_token_ms = monotonic_ms()
        self._ended(AttemptOutcome.CANCELLED, refuse.detail)
        self.state, self._reason = RequestState.FAILED, refuse.reason
        self._metrics.streams_cut.add((self._ticket.model.name,))
        ending = cut.ending(
            piece,
            refuse,
            is_chat=self._body.is_chat,
            unfinished=tap.unfinished,
            usage=self._used() if self._body.asks_usage else None,
            held=tap.held() if isinstance(tap, Continuation) else {},
        )
        await self._send_piece(piece + ending, is_last=True)
        self.has_answered = True

    async def _answer_whole(self, row: EngineRow, connection: Connection) -> Failure | None:
        try:
            answer = await connection.read()
        except UpstreamError as error:
            connection.abort()
            return self._failed(row, error.outcome, error.detail)
        except BaseException:
            connection.abort()
            raise
        connection.release()
        try:
            decoded = _answer(answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._failed(row, AttemptOutcome.SERVER_ERROR, "the answer is not a completion")
        for choice in decoded.choices:
            if choice.finish_reason == _ABORT:
                return self._failed(
                    row, AttemptOutcome.BROKEN_STREAM, "the engine aborted the answer"
                )
            self._is_at_limit = self._is_at_limit or choice.finish_reason == _LENGTH
        self._ended(AttemptOutcome.OK)
        self.state, self._reason = RequestState.SUCCEEDED, None
        if decoded.usage is not None:
            self._usage = usage.reported(decoded.usage, self._cached_by_prefill)
        else:
            most = self._ticket.completion_tokens_max * self._body.sequences
            self._usage = usage.estimated(
                self._ticket.request.prompt_tokens, min(most, len(answer) // BYTES_PER_TOKEN)
            )
        if _HELD_KV in answer:
            # Where KV lies is between the engines.
            members = _index(answer)
            members.pop("kv_transfer_params", None)
            answer = _encode(members)
        await self._send_whole(legs.OK, answer)
        self.has_answered = True
        return None

    def _note_first_token(self, connection: Connection) -> None:
        now_ms = monotonic_ms()
        self._ttft_ms = now_ms - self._call.received_ms
        self._gate.first_token(self._ticket, now_ms - self._ticket.decided_ms)
        connection.expect_flow(SILENCE_S_MAX)

    # ------------------------------------------------------------ failing

    def _begin(self, row: EngineRow, leg: str, address: Address | None = None) -> None:
        """`address` is by default that of the engine which is to answer."""
        self._asked = (row, leg, address or self._ticket.decode_url, monotonic_ms())

    def _ended(
        self, outcome: AttemptOutcome, detail: str = "", retry_after_ms: int | None = None
    ) -> None:
        """The engine call under way has ended: told to the gate once."""
        asked = self._asked
        if asked is None:
            return
        self._asked = None
        row, leg, address, started_ms = asked
        self._gate.attempted(self._ticket, row, leg, outcome, detail, retry_after_ms)
        self._legs.append(
            Leg(
                name=leg,
                engine=row.engine_id,
                host=address[0],
                port=address[1],
                span_id=self._span_id,
                start_ms=started_ms,
                end_ms=monotonic_ms(),
                outcome=outcome,
                is_ok=outcome is AttemptOutcome.OK,
                detail=detail,
            )
        )

    def _failed(self, row: EngineRow, outcome: AttemptOutcome, detail: str) -> Failure:
        self._ended(outcome, detail)
        return Failure(row, outcome, detail)

    def _abandoned(self) -> None:
        """Give up what was kept to go on elsewhere."""
        if self._resume is not None:
            self._resume.close()

    def _forget_attempt(self) -> None:
        """Another engine starts from nothing; nothing of the failed one has reached the client."""
        self._tap = None
        self._ttft_ms = None
        self._cached_by_prefill = None
        self._has_engine_worked = False

    async def _give_up(self, failure: Failure) -> None:
        self.state = RequestState.FAILED
        detail = f"the engine failed: {failure.detail}"
        retry_after_ms = None
        match failure.outcome:
            case AttemptOutcome.BACKPRESSURE:
                reason = (
                    Reason.QUEUE_FULL if failure.status == legs.TOO_MANY else Reason.NO_CAPACITY
                )
                detail = "every engine that was asked is busy"
                retry_after_ms = failure.retry_after_ms or BACKPRESSURE_RETRY_MS
            case AttemptOutcome.TIMEOUT:
                reason = Reason.UPSTREAM_TIMEOUT
                if self._call.deadline_ms is not None and monotonic_ms() >= self._deadline_ms():
                    self.state = RequestState.EXPIRED
            case _:
                reason = Reason.UPSTREAM_ERROR
        if self._is_started:
            reason = Reason.STREAM_INTERRUPTED
        self._reason = reason
        # A client that comes back spends from the same budget as our own retries.
        is_final = not self._is_head_sent and not self._gate.may_return(self._ticket)
        await self._refuse(
            Refuse(reason, detail, retry_after_ms, self._ticket.id, is_final=is_final)
        )

    async def _refuse(self, refuse: Refuse) -> None:
        """Tell the client: by status while that is possible, else by the stream's last event."""
        if self._is_client_gone():
            return
        if self._is_head_sent:
            if self._body.is_stream:
                await self._send_last(stream_error_event(refuse))
            return
        if refuse.reason is Reason.STREAM_INTERRUPTED:
            refuse = Refuse(Reason.NO_CAPACITY, refuse.detail, BACKPRESSURE_RETRY_MS)
        self._is_head_sent = True
        status, headers, body = error_response(refuse, self._ticket.id)
        self._status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    *((name.encode(), value.encode()) for name, value in headers),
                    *self._ticket.rate_headers,
                    (b"content-length", b"%d" % len(body)),
                ],
            }
        )
        await self._send_last(body)

    # ------------------------------------------------------------ to the client

    async def _send_piece(self, piece: bytes, *, is_last: bool = False) -> None:
        self._is_started = True
        if not self._is_head_sent:
            self._is_head_sent = True
            headers = [*STREAM_HEAD, *self._head()]
            await self._send({"type": "http.response.start", "status": legs.OK, "headers": headers})
        await self._send({"type": "http.response.body", "body": piece, "more_body": not is_last})

    async def _send_whole(self, status: int, body: bytes, reason: Reason | None = None) -> None:
        """`reason`: it is a refusal of the engine's, and why."""
        if self._is_head_sent:
            # A stream that was opened while it waited, and that the engine refused.
            await self._send_last(b"data: " + msgspec.json.format(body, indent=-1) + b"\n\n")
            return
        self._is_head_sent = True
        self._status = status
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *self._head(),
        ]
        if reason is not None:
            headers.append((b"x-should-retry", b"false"))
            headers.append((b"x-headway-reason", reason.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_last(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": False})

    def _head(self) -> Lines:
        lines = ticket_lines(self._ticket)
        lines.append((b"x-headway-engine", self._ticket.placement.decode.engine_id.encode()))
        if self._extra_head is not None:
            lines += self._extra_head
        return lines

    def _engine_headers(self, request_id: str | None, *, is_whole: bool = False) -> bytes:
        """All that an engine is told: nothing of the client's own headers, least of all its key.

        `request_id`: that of the first leg, where there was one. `is_whole`: no stream is asked for.
        """
        is_stream = self._body.is_stream and not is_whole
        accept = b"text/event-stream" if is_stream else b"application/json"
        if request_id is None:
            request_id = legs.id_of_attempt(self._ticket.id, self._ticket.attempt)
        lines = b"content-type: application/json\r\naccept: %s\r\nx-request-id: %s\r\n" % (
            accept,
            request_id.encode(),
        )
        # Engines name it when they tell what they keep in their prefix caches. Prompts that share a call
        # could not be told apart by it.
        if self._body.sequences == (self._body.read.n or 1):
            lines += b"x-session-id: %s\r\n" % self._ticket.id.encode()
        self._span_id = leg_span_id(self._ticket.id, len(self._legs))
        if self._trace is not None:
            lines += b"traceparent: %s\r\n" % self._trace.traceparent(self._span_id)
        return lines

    # ------------------------------------------------------------ time and settlement

    def _deadline(self, seconds: float) -> float:
        """`seconds` from now, or the call's own deadline when that is sooner; monotonic seconds."""
        now_ms = monotonic_ms()
        deadline_ms = now_ms + seconds * 1000.0
        if self._call.deadline_ms is not None:
            deadline_ms = min(deadline_ms, self._deadline_ms())
        return deadline_ms / 1000.0

    def _deadline_ms(self) -> float:
        return self._call.received_ms + (self._call.deadline_ms or 0)

    def _used(self) -> Usage:
        if self._usage is not None:
            return self._usage
        tap = self._tap
        if tap is not None and tap.usage is not None:
            return usage.reported(tap.usage, self._cached_by_prefill)
        if self._has_engine_worked or self.state is RequestState.CANCELLED:
            counted = None if self._resume is None else self._resume.counted()
            if counted is not None:
                return usage.counted(*counted)
            tokens = 0 if tap is None else tap.tokens
            return usage.estimated(self._ticket.request.prompt_tokens, tokens)
        return usage.NOTHING_USED

    def _settle(self) -> None:
        self._ended(AttemptOutcome.CANCELLED, "the client went away")
        used = self._used()
        now_ms = self._last_token_ms or monotonic_ms()
        e2e_ms = now_ms - self._call.received_ms
        ttft_ms, tpot_ms = self._ttft_ms, None
        if ttft_ms is not None and used.completion_tokens > 1:
            tpot_ms = (e2e_ms - ttft_ms) / (used.completion_tokens - 1)
        state, reason = self.state, self._reason
        self._gate.settle(self._ticket, state, used, reason, ttft_ms, tpot_ms, e2e_ms)
        count_answer(
            self._metrics, self._call, self._ticket.model.name, state, reason or "", used, ttft_ms,
            tpot_ms, e2e_ms, "" if self._trace is None else self._trace.exemplar,
        )  # fmt: skip
        if self._tracing is not None and self._tracing.why(
            self._trace,
            is_failure=state in _FAILURES,
            is_resumed=bool(self._gaps),
            e2e_ms=e2e_ms,
            ttft_ms=ttft_ms,
        ):
            self._tracing.ended(self._record(used, now_ms))

    def _record(self, used: Usage, ended_ms: float) -> CallRecord:
        call, ticket = self._call, self._ticket
        return CallRecord(
            request_id=ticket.id,
            context=self._trace,
            endpoint=call.endpoint,
            model_asked=call.model,
            model=ticket.model.name,
            tenant_class=call.principal.tenant.tenant_class,
            workflow=call.workflow,
            step=call.step,
            is_stream=call.is_stream,
            received_ms=call.received_ms,
            admitted_ms=self._admitted_ms,
            queue_ms=ticket.queue_ms,
            ended_ms=ended_ms,
            settled_ms=monotonic_ms(),
            ttft_ms=self._ttft_ms,
            state=self.state,
            reason=self._reason or "",
            rule=ticket.rule,
            status=self._status,
            is_failure=self.state in _FAILURES,
            attempts=ticket.attempt + 1,
            legs=tuple(self._legs),
            gaps=tuple(self._gaps),
            completion_tokens_max=ticket.completion_tokens_max,
            choices=ticket.n,
            temperature=self._body.read.temperature,
            prompt_tokens=used.prompt_tokens,
            cached_tokens=used.cached_tokens,
            completion_tokens=used.completion_tokens,
        )


def _salt_for(ticket: Ticket, row: EngineRow) -> str | None:
    return None if Feature.CACHE_SALT in row.lacks else ticket.cache_salt


def _detokenized(answer: bytes) -> str | None:
    """The text in an engine's answer about tokens."""
    try:
        return msgspec.json.decode(answer, type=Detokenized).prompt
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _outcome_of(tap: Tap) -> AttemptOutcome:
    """How an engine that did not finish a stream is to be seen: not every time is it to blame."""
    if isinstance(tap, Continuation) and tap.wants_more:
        return AttemptOutcome.OK
    if isinstance(tap, Splice) and tap.is_diverged:
        return AttemptOutcome.CANCELLED
    return AttemptOutcome.BROKEN_STREAM


def _client_error(answer: bytes) -> tuple[Reason, bytes]:
    """An engine's 4xx body as an envelope like any other: its words and the member it blames, our code."""
    words, param = "the engine refused the request", None
    try:
        members = _index(answer)
        inner = members.get("error")
        if inner is not None and bytes(inner).startswith(b"{"):
            members = _index(inner)
            blamed = members.get("param")
            param = None if blamed is None else msgspec.json.decode(blamed)
        message = members.get("message") or members.get("detail")
        if message is not None:
            decoded = msgspec.json.decode(message)
            words = decoded if isinstance(decoded, str) else bytes(message).decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    reason = Reason.CONTEXT_LENGTH_EXCEEDED if _TOO_LONG in words else Reason.INVALID_REQUEST
    param = param if isinstance(param, str) else None
    return reason, _encode(envelope(words, OUTCOMES[reason].error_type, param, reason))
