"""What is known of one call when its rules are evaluated: flat values, always all of them.

Knows nothing of rules. Text that CEL would misread (it cuts strings at NUL) is told apart here.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from policies.attributes import (
    ATTRIBUTES,
    BY_NAME,
    INT_MAX,
    INT_MIN,
    LIVE,
    STATIC,
    Attribute,
    Fact,
    Kind,
)

TEXT_CHARS_MAX: Final = 256
_NAMES: Final = tuple(row.name for row in ATTRIBUTES)
# C0, DEL, and halves of surrogate pairs.
_BROKEN: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


class StaticFacts(NamedTuple):
    """Known from key, model and flags; fields in the order of `attributes.STATIC`."""

    tenant_id: str
    tenant_class: str
    tenant_priority: int
    tenant_slo_class: str
    key_id: str
    model_name: str
    model_context_tokens_max: int
    request_endpoint: str
    request_is_stream: bool
    request_has_tools: bool
    workflow_exists: bool
    workflow_scope: str
    workflow_kind: str


class LiveFacts(NamedTuple):
    """Known only at this call; fields in the order of `attributes.LIVE`. Integers fit in 64 bits."""

    request_n: int
    request_prompt_tokens: int
    request_max_tokens: int
    request_cost_micro_usd: int
    request_deadline_ms: int
    request_priority_hint: int
    request_client_retries: int
    tenant_calls_in_flight: int
    workflow_step: int
    workflow_steps_expected: int
    workflow_spent_micro_usd: int
    workflow_remaining_micro_usd: int
    workflow_expected_remaining_micro_usd: int
    workflow_deadline_slack_ms: int
    workflow_calls_in_flight: int
    pool_queue_depth: int
    pool_queue_wait_ms: int
    pool_saturation_permille: int
    pool_kv_used_permille: int
    pool_breaker: str
    pool_is_overloaded: bool
    time_hour: int
    time_weekday: int
    time_minute: int
    region_home: str
    stream_completion_tokens: int = 0
    stream_spent_micro_usd: int = 0
    stream_age_ms: int = 0


def unclean(text: str) -> bool:
    """Whether CEL could misread the text: control characters, lone surrogates, or too long."""
    return len(text) > TEXT_CHARS_MAX or _BROKEN.search(text) is not None


def has_unclean(facts: StaticFacts | LiveFacts) -> bool:
    return any(isinstance(value, str) and unclean(value) for value in facts)


def as_json(static: StaticFacts, live: LiveFacts) -> dict[str, Fact]:
    """Every attribute by its name, as rules spell it."""
    values: tuple[Fact, ...] = (*static, *live)
    return dict(zip(_NAMES, values, strict=True))


def from_json(values: Mapping[str, object]) -> tuple[StaticFacts, LiveFacts]:
    """Facts from names and values; what is not named has its usual value.

    Raises ValueError, which says what is wrong with which attribute.
    """
    for name in values:
        if name not in BY_NAME:
            raise ValueError(
                f"the attribute `{name[:100]}` does not exist; `headway policy attributes` lists them"
            )
    return (
        StaticFacts._make(_value(row, values) for row in STATIC),
        LiveFacts._make(_value(row, values) for row in LIVE),
    )


def _value(row: Attribute, values: Mapping[str, object]) -> Fact:
    value = values.get(row.name, row.usual)
    match row.kind, value:
        case Kind.BOOL, bool():
            return value
        case Kind.STRING, str():
            if unclean(value):
                raise ValueError(
                    f"`{row.name}` holds control characters, broken text or more than"
                    f" {TEXT_CHARS_MAX} characters; give plain text"
                )
            return value
        case Kind.INT, int() if not isinstance(value, bool):
            if not INT_MIN <= value <= INT_MAX:
                raise ValueError(f"`{row.name}` does not fit in 64 bits; give a smaller number")
            return value
        case _:
            raise ValueError(f"`{row.name}` is of type {row.kind}; give a value of that type")
