"""The table of what a rule may read: name, type, unit and meaning of every attribute. One home, no logic."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1
# What a workflow without a budget or without a deadline has left.
UNLIMITED: Final = 2**62 - 1


class Kind(StrEnum):
    """Types of CEL that attributes have. There are no fractions: ratios are given in thousandths."""

    INT = "int"
    STRING = "string"
    BOOL = "bool"


Fact = int | str | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """One row. Live attributes change from call to call; the others are known from key, model and flags.

    `usual` is the value where nothing else is said, as in the cases of a rule. `lowest` and `highest`
    bound an integer; `words` are the only values of a string, or examples of it when not `is_closed`.
    `is_asked` marks what the client chooses with the call and can change.
    """

    name: str
    kind: Kind
    unit: str
    sentence: str
    is_live: bool
    usual: Fact
    lowest: int = 0
    highest: int = 0
    words: tuple[str, ...] = ()
    is_closed: bool = False
    is_asked: bool = False

    @property
    def field(self) -> str:
        """Its field in `StaticFacts` or `LiveFacts`."""
        return self.name.replace(".", "_")


def _int(
    name: str,
    unit: str,
    sentence: str,
    highest: int,
    *,
    is_live: bool = True,
    usual: int = 0,
    lowest: int = 0,
    is_asked: bool = False,
) -> Attribute:
    return Attribute(
        name=name,
        kind=Kind.INT,
        unit=unit,
        sentence=sentence,
        is_live=is_live,
        usual=usual,
        lowest=lowest,
        highest=highest,
        is_asked=is_asked,
    )


def _text(
    name: str,
    sentence: str,
    words: tuple[str, ...],
    *,
    is_live: bool = False,
    usual: str = "",
    is_closed: bool = False,
) -> Attribute:
    return Attribute(
        name=name,
        kind=Kind.STRING,
        unit="",
        sentence=sentence,
        is_live=is_live,
        usual=usual,
        words=words,
        is_closed=is_closed,
    )


def _flag(name: str, sentence: str, *, is_live: bool = False, is_asked: bool = False) -> Attribute:
    return Attribute(
        name=name,
        kind=Kind.BOOL,
        unit="",
        sentence=sentence,
        is_live=is_live,
        usual=False,
        is_asked=is_asked,
    )


_TOKENS: Final = 10_000_000
_MICRO_USD: Final = 10**12
_MS: Final = 86_400_000
_COUNT: Final = 100_000

STATIC: Final = (
    _text("tenant.id", "Id of the tenant.", ("acme", "globex")),
    _text("tenant.class", "Class of the tenant.", ("gold", "silver", "bronze")),
    _int(
        "tenant.priority",
        "",
        "Who stays longest when capacity is short: 9 first, 0 last.",
        9,
        is_live=False,
        usual=5,
    ),
    _text("tenant.slo_class", "SLO class of the call.", ("interactive", "standard", "batch")),
    _text("key.id", "Id of the API key.", ("key-1", "key-2")),
    _text("model.name", "Model asked for.", ("llama-3.3-70b", "llama-3.1-8b")),
    _int(
        "model.context_tokens_max",
        "tokens",
        "Longest context that the model takes.",
        _TOKENS,
        is_live=False,
        usual=131_072,
    ),
    _text(
        "request.endpoint",
        "Endpoint called.",
        ("chat_completions", "completions"),
        usual="chat_completions",
        is_closed=True,
    ),
    _flag("request.is_stream", "The answer is streamed.", is_asked=True),
    _flag("request.has_tools", "The call offers tools.", is_asked=True),
    _flag("workflow.exists", "The call belongs to a workflow."),
    _text(
        "workflow.scope",
        "Scope of the workflow, `chat` for a single call.",
        ("chat", "copilot", "research", "autonomous"),
        usual="chat",
        is_closed=True,
    ),
    _text("workflow.kind", "Kind that the workflow was created with, or empty.", ("agent", "")),
)

LIVE: Final = (
    _int("request.n", "answers", "Answers asked for.", 128, usual=1, lowest=1, is_asked=True),
    _int("request.prompt_tokens", "tokens", "Prompt, estimated.", _TOKENS, usual=100),
    _int(
        "request.max_tokens",
        "tokens",
        "Longest answer asked for, or what the class gives when none is.",
        _TOKENS,
        usual=256,
        is_asked=True,
    ),
    _int(
        "request.cost_micro_usd",
        "micro-dollars",
        "Highest price that the call can come to.",
        _MICRO_USD,
    ),
    _int(
        "request.deadline_ms",
        "milliseconds",
        "Time that the client gave the call, 0 when it gave none.",
        _MS,
        is_asked=True,
    ),
    _int(
        "request.priority_hint",
        "",
        "Priority that the client asked for, 0 when it asked for none.",
        9,
        lowest=-9,
        is_asked=True,
    ),
    _int("request.client_retries", "tries", "Earlier tries that the client tells of.", 10),
    _int("tenant.calls_in_flight", "calls", "The tenant's other calls at this replica.", _COUNT),
    _int("workflow.step", "steps", "Steps before this one; 0 is the first.", _COUNT),
    _int(
        "workflow.steps_expected", "steps", "Steps that the workflow is expected to take.", _COUNT
    ),
    _int("workflow.spent_micro_usd", "micro-dollars", "Spent by the workflow so far.", _MICRO_USD),
    _int(
        "workflow.remaining_micro_usd",
        "micro-dollars",
        "Left of the workflow's budget; 2^62-1 when it has none.",
        _MICRO_USD,
        usual=UNLIMITED,
    ),
    _int(
        "workflow.expected_remaining_micro_usd",
        "micro-dollars",
        "What the workflow is expected to cost from here to its end.",
        _MICRO_USD,
    ),
    _int(
        "workflow.deadline_slack_ms",
        "milliseconds",
        "Time to the workflow's deadline beyond what the work needs; 2^62-1 without a deadline.",
        _MS,
        usual=UNLIMITED,
        lowest=-_MS,
    ),
    _int("workflow.calls_in_flight", "calls", "The workflow's other calls.", _COUNT),
    _int("pool.queue_depth", "calls", "Calls that wait for the model at this replica.", _COUNT),
    _int("pool.queue_wait_ms", "milliseconds", "Wait predicted for a call that comes now.", _MS),
    _int(
        "pool.saturation_permille",
        "thousandths",
        "Seats taken of the seats that the model's engines lend.",
        1_000,
    ),
    _int("pool.kv_used_permille", "thousandths", "KV cache in use by the model.", 1_000),
    _text(
        "pool.breaker",
        "Breaker of the model's pool.",
        ("closed", "half_open", "open"),
        is_live=True,
        usual="closed",
        is_closed=True,
    ),
    _flag(
        "pool.is_overloaded", "More work arrives for the model than it can finish.", is_live=True
    ),
    _int("time.hour", "hours", "Hour of the day, UTC.", 23),
    _int("time.weekday", "days", "Day of the week, 0 is Monday, UTC.", 6),
    _int("time.minute", "minutes", "Minute of the hour, UTC.", 59),
    _text(
        "region.home",
        "Region of the engine that holds the call's context, or empty.",
        ("eu", "us", ""),
        is_live=True,
    ),
    _int("stream.completion_tokens", "tokens", "Tokens streamed; 0 outside phase stream.", _TOKENS),
    _int(
        "stream.spent_micro_usd",
        "micro-dollars",
        "Price of the stream so far; 0 outside phase stream.",
        _MICRO_USD,
    ),
    _int("stream.age_ms", "milliseconds", "Age of the stream; 0 outside phase stream.", _MS),
)

ATTRIBUTES: Final = STATIC + LIVE
BY_NAME: Final = {attribute.name: attribute for attribute in ATTRIBUTES}


def reference_page() -> str:
    """The table as a page of the documentation, in Markdown."""
    lines = [
        "# Attributes that policy rules can read",
        "",
        "Conditions of rules (`when`) are CEL over the attributes below. All of them are always",
        "there; every number is a whole number, so ratios are thousandths and money is",
        "micro-dollars. Written by `headway policy attributes --markdown`.",
        "",
        "Static attributes are known from the key, the model and flags of the call. Live ones",
        "change from call to call. *Usual* is the value in a case of a rule that does not give it.",
    ]
    for title, table in (("Static", STATIC), ("Live", LIVE)):
        lines += [
            "",
            f"## {title}",
            "",
            "| attribute | type | unit | usual | meaning |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| `{row.name}` | {row.kind} | {row.unit or '-'} | {_shown(row.usual)} |"
            f" {row.sentence}{_values(row)} |"
            for row in table
        ]
    return "\n".join(lines) + "\n"


def _shown(value: Fact) -> str:
    if value == UNLIMITED:
        return "2^62-1"
    return f'`"{value}"`' if isinstance(value, str) else f"`{str(value).lower()}`"


def _values(row: Attribute) -> str:
    if not row.is_closed:
        return ""
    return " One of " + ", ".join(f'`"{word}"`' for word in row.words) + "."
