"""The rollout of a bundle: shadow, canary, active, and back. The server checks and decides."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cli.operator import Session, with_session
from cli.output import instant, table
from cli.paging import CursorOption, LimitOption, page_of, show_page

DIGEST_CHARACTERS_SHOWN = 12

ReasonOption = Annotated[str, typer.Option("--reason", help="Why; goes into the audit log.")]
GenerationOption = Annotated[
    int | None,
    typer.Option("--generation", min=0, help="Refuse when the rollout is not at this one."),
]


def short(digest: str | None) -> str:
    return digest[:DIGEST_CHARACTERS_SHOWN] if digest else "-"


@with_session
def status(session: Session) -> None:
    """Show which bundle rules and which one is on trial."""
    rollout = session.api.get("policies/rollout")
    rows = [
        ("active", short(rollout["active_digest"])),
        ("previous", short(rollout["previous_digest"])),
        ("candidate", short(rollout["candidate_digest"])),
        ("mode", _mode(rollout)),
        ("generation", rollout["generation"]),
        ("changed", f"{instant(rollout['changed_at'])} by {rollout['changed_by']}"),
        ("reason", rollout["reason"]),
    ]
    session.out.show(rollout, table(("POLICY", ""), rows))


@with_session
def apply(
    session: Session,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of the bundle.", file_okay=False)
    ],
    *,
    reason: ReasonOption,
    is_now: Annotated[
        bool, typer.Option("--now", help="Make it rule at once, without a time in shadow.")
    ] = False,
    generation: GenerationOption = None,
) -> None:
    """Store a bundle and let it rule in shadow: without effect, beside the active one."""
    from cli.policy.sources import read_folder

    files, _ = read_folder(folder)
    body = {"files": files, "reason": reason, "is_now": is_now, "generation": generation}
    _say(session, session.api.post("policies/revisions", body))


@with_session
def canary(
    session: Session,
    percent: Annotated[
        int, typer.Argument(metavar="PERCENT", min=1, max=100, help="Share of the tenants.")
    ],
    *,
    reason: ReasonOption,
    generation: GenerationOption = None,
) -> None:
    """Let the candidate rule a share of the tenants, always the same ones."""
    body = {"percent": percent, "reason": reason, "generation": generation}
    _say(session, session.api.post("policies/rollout/canary", body))


@with_session
def promote(session: Session, *, reason: ReasonOption, generation: GenerationOption = None) -> None:
    """Make the candidate the active bundle."""
    body = {"reason": reason, "generation": generation}
    _say(session, session.api.post("policies/rollout/promote", body))


@with_session
def roll_back(
    session: Session, *, reason: ReasonOption, generation: GenerationOption = None
) -> None:
    """Drop the candidate; without one, go back to the previous bundle."""
    body = {"reason": reason, "generation": generation}
    _say(session, session.api.post("policies/rollout/rollback", body))


@with_session
def history(session: Session, limit: LimitOption = 20, cursor: CursorOption = None) -> None:
    """List changes of what rules, newest first: who, what and why."""
    page = page_of(session, "audit", limit, cursor, subject="policy")
    show_page(
        session,
        page,
        table(
            ("AT", "BY", "CHANGE", "ACTIVE", "CANDIDATE", "REASON"),
            (
                (
                    instant(entry["at"]),
                    entry["actor"],
                    entry["action"].removeprefix("policy."),
                    short(entry["after"]["active"]),
                    short(entry["after"]["candidate"]),
                    entry["reason"],
                )
                for entry in page["data"]
            ),
        ),
    )


def _say(session: Session, rollout: dict[str, Any]) -> None:
    active, candidate = short(rollout["active_digest"]), short(rollout["candidate_digest"])
    match rollout["mode"]:
        case "shadow":
            sentence = f"{candidate} rules in shadow beside {active}; next: `headway policy canary`"
        case "canary":
            sentence = (
                f"{candidate} rules {rollout['canary_percent']} % of the tenants, {active} the"
                " rest; next: `headway policy promote`"
            )
        case _:
            sentence = f"{active} is active; replicas follow within two seconds"
    session.out.show(rollout, escape(sentence))


def _mode(rollout: dict[str, Any]) -> str:
    mode = str(rollout["mode"])
    return f"{mode}, {rollout['canary_percent']} %" if mode == "canary" else mode
