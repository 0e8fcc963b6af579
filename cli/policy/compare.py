"""One bundle against another, and against what was decided: differences, replays, explanations."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from cli.client import JsonObject, segment
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session, with_session
from cli.output import table

if TYPE_CHECKING:
    from policies.replay import ReplayReport

# Small pages: the server that makes them also serves calls.
FACTS_PER_PAGE = 100
# Rows of the decision log that one replay reads at most.
ROWS_MAX = 100_000
CHANGES_SHOWN_MAX = 30
RULES_SHOWN_MAX = 20
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_SINCE = re.compile(r"([1-9][0-9]{0,6})([smhd])")

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="BUNDLE", help="Folder, digest, or one of active, previous and candidate."
    ),
]


@with_session
def diff(
    session: Session,
    bundle: SourceArgument,
    *,
    against: Annotated[
        str, typer.Option("--against", metavar="BUNDLE", help="What it is compared with.")
    ] = "active",
) -> None:
    """Show what a bundle changes: rules by name, and the lines of its files."""
    from cli.policy.sources import compiled, read_any

    (old, old_name), (new, new_name) = read_any(session, against), read_any(session, bundle)
    before, after = _rules(compiled(old, old_name)), _rules(compiled(new, new_name))
    lines = list(_lines(old, new))
    document = {
        "rules_added": sorted(after.keys() - before.keys()),
        "rules_removed": sorted(before.keys() - after.keys()),
        "rules_changed": sorted(
            name for name in before.keys() & after.keys() if before[name] != after[name]
        ),
        "lines": lines,
    }
    shown = [_coloured(line) for line in lines]
    shown += [
        f"[{colour}]{word}:[/] {escape(name)}"
        for word, colour in (("added", "green"), ("removed", "red"), ("changed", "yellow"))
        for name in document[f"rules_{word}"]
    ]
    session.out.show(document, *(shown or ["no difference"]))


@with_session
def replay(
    session: Session,
    *,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="How far back: 90s, 30m, 24h or 7d.")
    ] = "24h",
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="BUNDLE",
            help="Folder, digest, active, previous or candidate; the candidate, or else the active"
            " bundle, when left out.",
        ),
    ] = None,
) -> None:
    """Decide the calls of the decision log again, and show which would end otherwise."""
    seconds = seconds_of(since)
    if against is None:
        rollout = session.api.get("policies/rollout")
        against = "candidate" if rollout["candidate_digest"] else "active"
    report, is_cut = replayed(session, seconds, against)
    rows = report.rows
    document = {"since_s": seconds, "against": against, "is_cut": is_cut, **asdict(report)}
    shown: list[Any] = []
    if report.changes:
        shown.append(
            table(
                ("TENANT", "BEFORE", "AFTER", ">CALLS", "EXAMPLE"),
                (
                    (
                        change.tenant,
                        _ended(change.reason_before, change.rule_before),
                        _ended(change.reason_after, change.rule_after),
                        change.calls,
                        change.examples[0],
                    )
                    for change in report.changes[:CHANGES_SHOWN_MAX]
                ),
            )
        )
    hidden = len(report.changes) - CHANGES_SHOWN_MAX
    if hidden > 0:
        shown.append(f"and {hidden} more; --json shows them all")
    if report.fired:
        fired = list(report.fired.items())[:RULES_SHOWN_MAX]
        shown.append(table(("RULE FIRES", ">CALLS"), fired))
    if is_cut:
        shown.append(f"[yellow]note:[/] only the newest {rows} rows were read")
    if report.rows_unreadable:
        shown.append(
            f"[yellow]note:[/] {report.rows_unreadable} rows hold facts that this version can not"
            " read"
        )
    shown.append(
        f"{report.calls} calls ({report.rows} rows) against {report.revision[:12]}:"
        f" {report.calls_changed} would end otherwise; refused"
        f" {_share(report.calls_denied_before, report.calls)} before,"
        f" {_share(report.calls_denied_after, report.calls)} after"
    )
    session.out.show(document, *shown)


@with_session
def explain(
    session: Session,
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="Request or decision id.")],
    *,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="BUNDLE", help="Another bundle than the one that decided."
        ),
    ] = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="Also the rules that did not fire.")
    ] = False,
) -> None:
    """Show what the rules read when a call was decided, which fired, and what would have passed."""
    from cli.policy.sources import compiled, read_any
    from policies.documents import Phase
    from policies.facts import from_json

    decided = session.api.get(f"policies/facts/{segment(request)}")
    policy = compiled(*read_any(session, against or decided["policy_revision"]))
    try:
        static, live = from_json(decided["facts"])
    except ValueError as error:
        raise CommandFailure(
            ExitCode.FAILED, f"the recorded facts can not be read by this version: {error}"
        ) from error
    views = [
        view
        for phase in Phase
        for view in policy.explain(phase, static, live)
        if is_all or view.is_fired or view.error
    ]
    document = {
        "request_id": decided["request_id"],
        "verdict": decided["verdict"],
        "reason": decided["reason"],
        "rule": decided["rule"],
        "decided_at": decided["decided_at"],
        "policy_revision": decided["policy_revision"],
        "explained_by": policy.revision,
        "rules": [{**asdict(view), "values": dict(view.values)} for view in views],
        "facts": decided["facts"],
    }
    ended = decided["verdict"] + (f": {decided['reason']}" if decided["reason"] else "")
    ruled = f" by rule {decided['rule']}" if decided["rule"] else ""
    shown = [f"[bold]{escape(decided['request_id'])}[/] {escape(ended)}{escape(ruled)}"]
    for view in views:
        mark = "[red]fires[/]" if view.is_fired else "[dim]does not fire[/]"
        shown.append(
            f"\n[bold]{escape(view.rule)}[/] {mark} at {view.phase}"
            f" ({view.level}: {', '.join(view.effects)})"
        )
        shown.append(f"  {escape(view.message)}")
        shown.append(f"  when {escape(' '.join(view.when.split()))}")
        shown += [f"    {escape(name)} = {escape(repr(value))}" for name, value in view.values]
        if view.error:
            shown.append(f"  [red]error:[/] {escape(view.error)}")
        if view.nearest:
            shown.append(f"  [green]would pass with[/] {escape(view.nearest)}")
    if not views:
        shown.append("no rule fires on its facts")
    session.out.show(document, *shown)


def replayed(session: Session, since_s: int, against: str) -> "tuple[ReplayReport, bool]":
    """The calls of the last `since_s` seconds decided again by a bundle, and whether the log was cut."""
    from cli.policy.sources import compiled, read_any
    from policies.replay import Replay

    again = Replay(compiled(*read_any(session, against)))
    rows = 0
    for page in _pages(session, since_s):
        again.add_all(_recorded(page))
        rows += len(page)
        if rows >= ROWS_MAX:
            return again.report(), True
    return again.report(), False


def _pages(session: Session, since_s: int) -> Iterator[list[JsonObject]]:
    cursor: str | None = None
    while True:
        page = session.api.get(
            "policies/facts", since_s=since_s, limit=FACTS_PER_PAGE, cursor=cursor
        )
        yield page["data"]
        cursor = page["next_cursor"]
        if cursor is None:
            return


def _recorded(rows: Iterable[JsonObject]) -> Iterator[Any]:
    from policies.replay import Recorded

    for row in rows:
        yield Recorded(
            request_id=row["request_id"],
            verdict=row["verdict"],
            reason=row["reason"],
            rule=row["rule"],
            weight=row["sample_weight"],
            facts=row["facts"],
        )


def seconds_of(since: str) -> int:
    """A time as it is given on a command line, in seconds. Raises CommandFailure."""
    found = _SINCE.fullmatch(since)
    if found is None:
        raise CommandFailure(
            ExitCode.USAGE, f"`{since}` is not a time", "write it as 90s, 30m, 24h or 7d"
        )
    return int(found[1]) * _SECONDS[found[2]]


def _rules(policy: Any) -> dict[str, object]:
    """Every rule of a bundle by its name, with the level of its document."""
    return {
        f"{document.name}/{rule.name}": (document.level, rule)
        for document in policy.bundle.rules
        for rule in document.rules
    }


def _lines(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        yield from difflib.unified_diff(
            old.get(name, "").splitlines(),
            new.get(name, "").splitlines(),
            f"a/{name}" if name in old else "/dev/null",
            f"b/{name}" if name in new else "/dev/null",
            lineterm="",
        )


def _coloured(line: str) -> str:
    for start, style in (("+++", "bold"), ("---", "bold"), ("+", "green"), ("-", "red")):
        if line.startswith(start):
            return f"[{style}]{escape(line)}[/]"
    return escape(line)


def _ended(reason: str, rule: str) -> str:
    if not reason:
        return "let through"
    return f"{reason} {rule}".rstrip()


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.1%})" if whole else "0"
