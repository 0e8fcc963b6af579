"""How a request and a workflow end, and what a request used."""

from dataclasses import dataclass
from enum import StrEnum


class RequestState(StrEnum):
    """Terminal states of an accepted request. `lost`: its replica died and the reaper ended it."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    EXPIRED = "expired"
    LOST = "lost"


class WorkflowState(StrEnum):
    """`succeeded` and `failed` are the tenant's own word; `expired` is the deadline's."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class AttemptOutcome(StrEnum):
    """How one call of one engine ended, as breakers see it."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    BACKPRESSURE = "backpressure"
    CONNECT_ERROR = "connect_error"
    SERVER_ERROR = "server_error"
    TIMEOUT = "timeout"
    BROKEN_STREAM = "broken_stream"
    CANCELLED = "cancelled"


# Outcomes that say something bad about the engine; the others are neutral or good.
FAULTS = frozenset(
    {
        AttemptOutcome.CONNECT_ERROR,
        AttemptOutcome.SERVER_ERROR,
        AttemptOutcome.TIMEOUT,
        AttemptOutcome.BROKEN_STREAM,
    }
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, prompt counted once over all legs. Estimated when the engine reported none."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    is_estimated: bool
