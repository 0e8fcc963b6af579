"""Shapes that every router shares: strict bodies, lists with a cursor, bounded identifiers."""

from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Path, Query
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from controlplane.domain.money import MICRO_USD_PER_USD, micro_usd
from controlplane.store.paging import Page as StoredPage

LIST_LIMIT_DEFAULT = 50
LIST_LIMIT_MAX = 500
CURSOR_CHARACTERS_MAX = 256
FILTER_CHARACTERS_MAX = 255

R = TypeVar("R")
T = TypeVar("T")


class Body(BaseModel):
    """A request body: unknown members are refused, nothing is coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, members: Any) -> Any:
        """JSON has one kind of number: 1.0 is an integer there (JSON Schema 2020-12, 6.1.1)."""
        if not isinstance(members, dict):
            return members
        return {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in members.items()
        }


class Answer(BaseModel):
    """A response body, built from a record of the store."""

    model_config = ConfigDict(extra="ignore", frozen=True, from_attributes=True)


class Page(Answer, Generic[T]):
    """A part of a list. `next_cursor` continues it, null at its end."""

    object: Literal["list"] = "list"
    data: list[T]
    next_cursor: str | None = None


def page_of(found: StoredPage[R], answer: Callable[[R], T]) -> Page[T]:
    """A page of records as answers."""
    return Page(data=[answer(record) for record in found.items], next_cursor=found.next_cursor)


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answer):
    """The OpenAI error envelope. `code` is a reason of a closed set."""

    error: ErrorDetail


def _printable(text: str) -> str:
    """PostgreSQL stores no NUL, and lone surrogates are no UTF-8."""
    if "\x00" in text:
        raise ValueError("must not contain NUL")
    text.encode()
    return text


# The pattern is told, and checked in words that people understand.
Text = Annotated[
    str, AfterValidator(_printable), Field(json_schema_extra={"pattern": r"^[^\x00]*$"})
]
Slug = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9_.-]*[a-z0-9])?$", max_length=63)
]
Name = Annotated[Text, StringConstraints(min_length=1, max_length=255)]
Detail = Annotated[Text, StringConstraints(max_length=2_000)]
Identifier = Annotated[str, Path(min_length=1, max_length=127, pattern=r"^[\x21-\x7e]+$")]
Filter = Annotated[
    str | None,
    Query(
        max_length=FILTER_CHARACTERS_MAX,
        pattern=r"^[ -~]*$",
        description="Only entries with exactly this.",
    ),
]
Limit = Annotated[int, Query(ge=1, le=LIST_LIMIT_MAX, description="Most entries to return.")]
Cursor = Annotated[
    str | None,
    Query(max_length=CURSOR_CHARACTERS_MAX, description="`next_cursor` of the previous page."),
]


def whole_micro_usd(usd: float) -> float:
    """The amount, which is not below the least unit of money. Raises ValueError."""
    micro_usd(usd)
    return usd


Usd = Annotated[
    float,
    Field(ge=1 / MICRO_USD_PER_USD, le=1_000_000, allow_inf_nan=False),
    AfterValidator(whole_micro_usd),
]
