"""Pages over what is small enough to be read whole: the catalogue."""

from collections.abc import Iterable
from typing import TypeVar

Name = TypeVar("Name", bound=str)


def page_by_name(
    names: Iterable[Name], limit: int, cursor: str | None
) -> tuple[list[Name], str | None]:
    """The first `limit` names after `cursor` in order, and the cursor of the next page."""
    rest = sorted(name for name in names if cursor is None or name > cursor)
    page = rest[:limit]
    return page, page[-1] if len(rest) > limit else None
