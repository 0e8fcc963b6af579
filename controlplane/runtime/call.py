"""What the gateway read off the wire, before anything is decided; and what it is given when it may go on."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from controlplane.admission.budget import Hold
from controlplane.admission.queue import Charge
from controlplane.domain.catalog import Model, Principal
from controlplane.domain.decision import Placement
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import RequestId
from controlplane.domain.request import Request
from controlplane.domain.transfer import KvSource
from controlplane.runtime.rate_limits import UNLIMITED
from policies.evaluate import Policy, Ruling, StaticPart, Terms
from policies.facts import LiveFacts, StaticFacts

# Host and port, and header lines that every request there carries.
Address = tuple[str, int] | tuple[str, int, bytes]


def monotonic_ms() -> float:
    """Milliseconds of the one clock that every instant in the process is measured by."""
    return time.monotonic() * 1000.0


def wall_ms() -> float:
    """Milliseconds since the epoch, for what is written down; never for measuring."""
    return time.time() * 1000.0


# Not frozen: setting 17 members through the guard of a frozen class costs 2 microseconds a call.
@dataclass(slots=True)
class Call:
    """One call of a tenant, never changed once it is made.

    `prefix_bytes` is the JSON of its messages or prompt as it was sent.

    `deadline_ms` is relative to `received_ms`; `tools_digest` separates prompts that differ only in
    their tools; `completion_tokens_max` is the tenant's own limit, None when it set none.
    """

    principal: Principal
    endpoint: str
    model: str
    is_stream: bool
    prompt_bytes: int
    prefix_bytes: bytes
    tools_digest: int
    completion_tokens_max: int | None
    n: int
    workflow: str | None
    step: int | None
    session: str | None
    deadline_ms: int | None
    completion_tokens_hint: int | None
    priority_hint: int | None
    client_retries: int
    is_single_engine: bool
    received_ms: float
    idempotency_key: str | None = None
    # Told (position from 1, predicted wait in ms) now and then while the call waits in the queue.
    on_waiting: Callable[[int, int], None] | None = None
    # Given before admission where somebody must know it by then; else the intake gives one.
    request_id: RequestId | None = None


class Ticket:
    """One accepted request, from admission to settlement. Owned by the task that serves it.

    `is_holding_prefill` and `is_holding_decode` say which credits are still taken; `holds` what is
    reserved of budgets, `grant` of rate limits, `charge` what its tenant was charged in fairness.
    `is_settled` makes settlement happen once, `is_replayed` marks an answer from the response cache,
    which no engine gave. `kv_source` is how the KV of `prefill_url` is fetched. From `tokens_check_at`
    completion tokens on (0: never) the relay asks whether the answer may go on; `tokens_held` are covered by
    `holds`. `resumes` counts the engines that went on with the stream after one was lost. `rate_headers` and
    `warnings` are told to the client.
    """

    __slots__ = (
        "attempt", "attempts_failed", "cache_salt", "call", "charge", "completion_tokens_max", "decided_ms",
        "decisions", "decode_cached_tokens",
        "decode_url", "grant", "holds", "home_until_ms", "id", "idle_until_ms",
        "is_first_token_seen", "is_holding_decode", "is_holding_prefill", "is_replayed", "is_settled",
        "kv_source", "left", "live", "model", "n", "opened_at_s", "part", "placement", "policy", "prefill_url",
        "queue_class", "queue_ms", "rate_headers", "request", "reserved_micro_usd", "resumes", "rule", "ruling",
        "static", "terms", "tokens_check_at", "tokens_held", "warnings",
    )  # fmt: skip

    # Set by the gate before it hands the ticket out.
    placement: Placement

    def __init__(
        self,
        *,
        call: Call,
        request: Request,
        model: Model,
        terms: Terms,
        policy: Policy,
        static: StaticFacts,
        part: StaticPart,
        live: LiveFacts,
        completion_tokens_max: int,
        n: int,
        cache_salt: str,
        reserved_micro_usd: int,
        tokens_held: int,
        holds: tuple[Hold, ...],
        queue_class: str,
        idle_until_ms: int,
        rule: str,
        warnings: tuple[str, ...],
        ruling: Ruling,
        opened_at_s: float,
    ) -> None:
        self.id = request.id
        self.call = call
        self.request = request
        self.model = model
        self.terms = terms
        self.policy = policy
        self.static = static
        self.part = part
        self.live = live
        self.completion_tokens_max = completion_tokens_max
        self.n = n
        self.cache_salt = cache_salt
        self.reserved_micro_usd = reserved_micro_usd
        self.tokens_held = tokens_held
        self.holds = holds
        self.queue_class = queue_class
        self.idle_until_ms = idle_until_ms
        self.rule = rule
        self.warnings = warnings
        self.ruling = ruling
        self.opened_at_s = opened_at_s
        self.grant = UNLIMITED
        self.charge: Charge | None = None
        self.prefill_url: Address | None = None
        self.kv_source: KvSource | None = None
        self.decode_url: Address = ("", 0)
        self.attempt = 0
        self.resumes = 0
        self.decisions = 0
        self.attempts_failed: tuple[EngineRow, ...] = ()
        self.decided_ms = 0.0
        self.home_until_ms = 0.0
        self.queue_ms = 0.0
        self.is_holding_prefill = False
        self.is_holding_decode = False
        self.is_first_token_seen = False
        self.decode_cached_tokens = 0
        self.left: Placement | None = None
        self.is_replayed = False
        self.is_settled = False
        self.tokens_check_at = 0
        self.rate_headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def prompt_bytes(self) -> int:
        return self.call.prompt_bytes
