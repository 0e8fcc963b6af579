"""Asks before a change would leave a model without an engine that accepts calls."""

from collections.abc import Callable, Iterator
from typing import Final

from cli.client import JsonObject
from cli.operator import Session
from cli.paging import LIST_LIMIT_MAX
from cli.watch import confirm

MODELS_TOLD_MAX: Final = 5


def confirm_not_last(
    session: Session, what: str, is_leaving: Callable[[JsonObject], bool], *, is_sure: bool
) -> None:
    """Ask when engines that leave are the last of their model that accept calls; `--yes` says so beforehand.

    `what` is the change in words. Raises CommandFailure when it is not confirmed.
    """
    if is_sure:
        return
    models = left_without(list(_engines(session)), is_leaving)
    if models:
        told = ", ".join(models[:MODELS_TOLD_MAX])
        more = f" and {len(models) - MODELS_TOLD_MAX} more" if len(models) > MODELS_TOLD_MAX else ""
        confirm(
            session, f"{what} leaves no engine that accepts calls for {told}{more}", is_sure=False
        )


def left_without(engines: list[JsonObject], is_leaving: Callable[[JsonObject], bool]) -> list[str]:
    """Models that have an engine that accepts calls now, and none of those left, by name.

    An engine that only computes prompts answers nobody by itself.
    """
    serving = [
        engine for engine in engines if engine["is_accepting"] and engine["role"] != "prefill"
    ]
    there = {engine["model"] for engine in serving}
    left = {engine["model"] for engine in serving if not is_leaving(engine)}
    return sorted(there - left)


def _engines(session: Session) -> Iterator[JsonObject]:
    cursor: str | None = None
    while True:
        page = session.api.get("engines", limit=LIST_LIMIT_MAX, cursor=cursor)
        yield from page["data"]
        cursor = page["next_cursor"]
        if cursor is None:
            return
