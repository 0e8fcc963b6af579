"""`headway requests tail`: calls as they come and end, and those that are refused."""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Final

import typer
from rich.text import Text

from cli import complete
from cli.client import JsonObject, segment
from cli.operator import Session, with_session
from cli.output import dollars, milliseconds

LOOK_S_DEFAULT: Final = 1.0
PAGE: Final = 200
# Pages that one look reads at most: what came beyond that is told to be missing.
PAGES_MAX: Final = 5
SEEN_MAX: Final = 20_000
# Open calls older than the newest pages that one look asks after.
OPEN_READ_MAX: Final = 20

TenantOption = Annotated[
    str | None,
    typer.Option("--tenant", help="Only of this tenant.", autocompletion=complete.tenants),
]


class Seen:
    """States by id that were told already, the oldest of them forgotten."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, str] = OrderedDict()

    def changed(self, identifier: str, state: str) -> bool:
        """Whether this is news; it is not afterwards."""
        if self._states.get(identifier) == state:
            return False
        self._states[identifier] = state
        self._states.move_to_end(identifier)
        while len(self._states) > SEEN_MAX:
            self._states.popitem(last=False)
        return True

    def opened(self, identifier: str) -> bool:
        """Note a call that has not ended; whether it is news."""
        return self.changed(identifier, "open")

    def open_ones(self, met: set[str]) -> list[str]:
        """Open calls that were not met in the newest pages, the oldest first."""
        found = (
            name for name, state in self._states.items() if state == "open" and name not in met
        )
        return list(islice(found, OPEN_READ_MAX))

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._states


@with_session
def tail(
    session: Session,
    *,
    tenant: TenantOption = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Only for this model.", autocompletion=complete.models),
    ] = None,
    workflow: Annotated[
        str | None,
        typer.Option(
            "--workflow", help="Only of this workflow.", autocompletion=complete.workflows
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option("--state", help="Only what ends so: succeeded, failed, refused, …"),
    ] = None,
    slower_than_ms: Annotated[
        float,
        typer.Option("--slower-than", min=0, help="Only ended ones with this E2E or more, ms."),
    ] = 0.0,
    has_refusals: Annotated[
        bool, typer.Option("--refusals/--no-refusals", help="Also calls that were not accepted.")
    ] = True,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=PAGE, help="Calls before now to begin with.")
    ] = 10,
    seconds: Annotated[
        float | None,
        typer.Option("--for", min=0, help="End after so many seconds; by Ctrl-C else."),
    ] = None,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.2, max=60, help="Seconds between two looks.")
    ] = LOOK_S_DEFAULT,
) -> None:
    """Follow calls: one line when a call is refused or ends, with where it ran and what it cost."""

    def is_wanted(call: JsonObject) -> bool:
        return (
            (model is None or call["model"] == model)
            and (tenant is None or call["tenant_id"] == tenant)
            and (state is None or call["state"] == state)
            and (not slower_than_ms or (call["e2e_ms"] or 0.0) >= slower_than_ms)
        )

    seen, refused = Seen(), Seen()
    ends_at = None if seconds is None else time.monotonic() + seconds
    is_first = True
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            news = list(_calls(session, seen, tenant, workflow))
            if has_refusals and workflow is None:
                news += _refusals(session, refused, seen)
            news.sort(key=lambda call: call["at"])
            wanted = [call for call in news if is_wanted(call)]
            if is_first:
                wanted = wanted[-lines:] if lines else []
                is_first = False
            for call in wanted:
                _tell(session, call)
            if ends_at is not None and time.monotonic() >= ends_at:
                return
            time.sleep(interval_s)


def _calls(
    session: Session, seen: Seen, tenant: str | None, workflow: str | None
) -> Iterator[JsonObject]:
    """Accepted calls that have ended since the last look: newest pages until one has no news, and the open
    ones from before them, each by itself.
    """
    cursor: str | None = None
    met: set[str] = set()
    for _ in range(PAGES_MAX):
        page = session.api.get(
            "requests", tenant=tenant, workflow=workflow, limit=PAGE, cursor=cursor
        )
        is_news = False
        for call in page["data"]:
            met.add(call["id"])
            if call["state"] == "open":
                is_news |= seen.opened(call["id"])
            elif seen.changed(call["id"], call["state"]):
                is_news = True
                yield {**call, "at": call["ended_at"]}
        cursor = page["next_cursor"]
        if not is_news or cursor is None:
            break
    for identifier in seen.open_ones(met):
        call = session.api.get(f"requests/{segment(identifier)}")
        if call["state"] != "open" and seen.changed(identifier, call["state"]):
            yield {**call, "at": call["ended_at"]}


def _refusals(session: Session, refused: Seen, seen: Seen) -> Iterator[JsonObject]:
    """Calls that were refused before they were accepted."""
    page = session.api.get("decisions", verdict="refuse", limit=PAGE)
    for decision in page["data"]:
        identifier = decision["request_id"]
        # One that waited and was then refused is told as a call.
        if identifier in seen or not refused.changed(identifier, "refused"):
            continue
        yield {
            "id": identifier,
            "at": decision["decided_at"],
            "tenant_id": decision["tenant_id"],
            "model": decision["model"],
            "state": "refused",
            "reason": decision["reason"],
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "ttft_ms": None,
            "e2e_ms": None,
            "queue_ms": None,
            "settled_micro_usd": None,
        }


def _tell(session: Session, call: JsonObject) -> None:
    if session.out.is_for_programs:
        session.out.document_of_many(call)
        return
    style = {"succeeded": "green", "cancelled": "dim"}.get(call["state"], "red")
    line = Text()
    line.append(f"{call['at'][11:19]} ", style="dim")
    line.append(f"{call['reason'] or call['state']:<13.13} ", style=style)
    line.append(f"{call['tenant_id'] or '-':<10.10} ")
    line.append(f"{call['id']} ")
    if call["state"] != "refused":
        line.append(
            f"{dollars(call['settled_micro_usd']):>9} {milliseconds(call['e2e_ms']):>6}"
            f" {call['prompt_tokens']:,}>{call['completion_tokens']:,}"
        )
        if call["ttft_ms"] is not None:
            line.append(f" ttft {milliseconds(call['ttft_ms'])}", style="dim")
    line.append(f" {call['model'] or ''}", style="dim")
    session.out.console.print(line, no_wrap=True, overflow="ellipsis")
