"""Cursors of lists that are ordered newest first.

Opaque to clients, and carry nothing but a position.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from sqlalchemy import Column, ColumnElement, Select, tuple_

LIMIT_MAX = 500

T = TypeVar("T")


class BadCursor(ValueError):
    """A cursor that this program did not make."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list. `next_cursor` continues it, None at its end."""

    items: tuple[T, ...]
    next_cursor: str | None


def newest_first(
    statement: Select[tuple[object, ...]],
    instant: Column[datetime],
    identifier: Column[str],
    *,
    limit: int,
    cursor: str | None,
) -> Select[tuple[object, ...]]:
    """`statement` from the cursor on, with one row more than `limit`. Raises BadCursor."""
    if cursor is not None:
        statement = statement.where(_before(instant, identifier, cursor))
    return statement.order_by(instant.desc(), identifier.desc()).limit(_bounded(limit) + 1)


def page(items: Sequence[T], positions: Sequence[tuple[datetime, str]], limit: int) -> Page[T]:
    """What fits in `limit`, and the cursor when there was more."""
    limit = _bounded(limit)
    if len(items) <= limit:
        return Page(tuple(items), None)
    instant, identifier = positions[limit - 1]
    text = f"{instant.isoformat()}|{identifier}"
    return Page(tuple(items[:limit]), base64.urlsafe_b64encode(text.encode()).decode())


def _before(instant: Column[datetime], identifier: Column[str], cursor: str) -> ColumnElement[bool]:
    try:
        text = base64.b64decode(cursor.encode("ascii"), altchars=b"-_", validate=True).decode()
        written, name = text.split("|", 1)
        position = datetime.fromisoformat(written)
        if position.tzinfo is None or "\x00" in name:
            raise BadCursor("the cursor is not one of this list")
    except (ValueError, binascii.Error) as error:
        raise BadCursor("the cursor is not one of this list") from error
    return tuple_(instant, identifier) < tuple_(position, name)


def _bounded(limit: int) -> int:
    return max(1, min(limit, LIMIT_MAX))
