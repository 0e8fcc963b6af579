"""`headway plan`: the fleet that the planner wants, what it would change and why, and what it may do."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from cli.client import JsonObject
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session, with_session
from cli.output import ago, cell, dollars, instant, table
from cli.paging import CursorOption, LimitOption, page_of, show_page

app = typer.Typer(
    no_args_is_help=True, help="The fleet that the planner wants, and what it may change."
)

BAR_CELLS_MAX = 16
BINDING_SHOWN_MAX = 6
MICRO_USD_PER_USD = 1_000_000

_STATUS_STYLES = {"ok": "green", "gap_open": "yellow", "short": "bold red", "failed": "bold red"}
_MOVE_STYLES = {
    "done": "green", "running": "cyan", "failed": "red", "undoing": "yellow", "undone": "yellow",
    "stuck": "bold red", "not_executable": "yellow", "cancelled": "dim",
}  # fmt: skip

RevisionArgument = Annotated[
    int | None, typer.Argument(metavar="[REVISION]", min=1, help="Number of a plan; the newest.")
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; it stands in the audit log.")]
GenerationOption = Annotated[
    int | None,
    typer.Option("--generation", min=0, help="Refuse when the planner has changed since this one."),
]


@app.command("show")
@with_session
def show(session: Session, revision: RevisionArgument = None) -> None:
    """Show a plan: engines there are and wanted, what holds it back, its moves and prices."""
    show_plan(session, revision)


def show_plan(session: Session, revision: int | None) -> None:
    """Show a plan, the newest when none is named."""
    if revision is not None:
        plan = session.api.get(f"plans/{revision}")
        session.out.show(plan, *_plan_view(plan))
        return
    current = session.api.get("plans/current")
    plan = current["newest"]
    parts: list[RenderableType] = [_control_line(current)]
    if plan is None:
        parts.append(Text("there is no plan yet: the leader makes one within its next rounds"))
    else:
        parts += _plan_view(plan)
    applying = current["applying"]
    if applying is not None and (plan is None or applying["revision"] != plan["revision"]):
        parts += [Text(""), Text(f"plan {applying['revision']} is being applied", style="bold")]
        parts.append(_moves(applying))
    session.out.show(current, *parts)


@app.command("diff")
@with_session
def diff(
    session: Session,
    revision: RevisionArgument = None,
    other: Annotated[
        int | None,
        typer.Argument(
            metavar="[OTHER]", min=1, help="A plan to compare with; the fleet as it is."
        ),
    ] = None,
) -> None:
    """Show only what a plan changes, against the fleet as it is or another plan."""
    plan = _chosen(session, revision)
    if other is None:
        before = {_kind(entry): entry["actual"] for entry in plan["plan"]["desired"]}
        against = "the fleet"
    else:
        before = _desired(session.api.get(f"plans/{other}"))
        against = f"plan {other}"
    after = _desired(plan)
    changes = [
        (*kind, before.get(kind, 0), after.get(kind, 0))
        for kind in sorted(before.keys() | after.keys())
        if before.get(kind, 0) != after.get(kind, 0)
    ]
    document = {
        "revision": plan["revision"],
        "against": other,
        "engines": [
            dict(zip(("pool", "region", "before", "after"), change, strict=True))
            for change in changes
        ],
        "moves": plan["move_states"] if other is None else [],
    }
    head = Text(f"plan {plan['revision']} against {against}", style="bold")
    if not changes and (other is not None or not plan["move_states"]):
        session.out.show(document, head, Text("no difference"))
        return
    engines = table(
        ("ENGINES", "REGION", ">BEFORE", ">AFTER", ">CHANGE"),
        ((pool, region, old, new, f"{new - old:+d}") for pool, region, old, new in changes),
    )
    if other is None:
        session.out.show(document, head, engines, Text(""), _moves(plan))
    else:
        session.out.show(document, head, engines)


@app.command("history")
@with_session
def history(session: Session, limit: LimitOption = 20, cursor: CursorOption = None) -> None:
    """List plans, newest first."""
    page = page_of(session, "plans", limit, cursor)
    show_page(
        session,
        page,
        table(
            (">PLAN", "MADE", "STATUS", "STATE", ">MOVES", ">$/H", ">GAP", "BY"),
            (
                (
                    plan["revision"],
                    instant(plan["made_at"]),
                    plan["status"],
                    plan["state"],
                    plan["moves"],
                    dollars(plan["fleet_micro_usd_per_hour"]),
                    f"{plan['gap_ratio']:.1%}",
                    plan["applied_by"],
                )
                for plan in page["data"]
            ),
        ),
    )


@app.command("pause")
@with_session
def pause(session: Session, *, reason: ReasonOption, generation: GenerationOption = None) -> None:
    """Begin no further move; those that run are watched to their end."""
    control = session.api.post("plans/pause", {"reason": reason, "generation": generation})
    session.out.say(control, "paused: no move begins until `headway plan resume`")


@app.command("resume")
@with_session
def resume(session: Session, *, reason: ReasonOption, generation: GenerationOption = None) -> None:
    """Let moves begin again."""
    control = session.api.post("plans/resume", {"reason": reason, "generation": generation})
    session.out.say(control, f"resumed; the planner is in mode {control['mode']}")


@app.command("mode")
@with_session
def mode(
    session: Session,
    mode: Annotated[str, typer.Argument(metavar="MODE", help="off, propose or act.")],
    *,
    reason: ReasonOption,
    generation: GenerationOption = None,
) -> None:
    """Let the planner rest (off), only propose (propose), or carry out its moves (act)."""
    if mode not in {"off", "propose", "act"}:
        raise CommandFailure(ExitCode.USAGE, f"there is no mode `{mode}`", "off, propose or act")
    body = {"mode": mode, "reason": reason, "generation": generation}
    control = session.api.post("plans/mode", body)
    meaning = {
        "off": "it makes no plans",
        "propose": "it makes plans and prices; moves are begun by `headway plan apply`",
        "act": "it carries out its moves by itself",
    }
    session.out.say(control, f"the planner is in mode {mode}: {meaning[mode]}")


@app.command("apply")
@with_session
def apply(
    session: Session,
    revision: Annotated[int, typer.Argument(metavar="REVISION", min=1, help="Number of a plan.")],
    *,
    reason: ReasonOption,
) -> None:
    """Carry out the moves of a proposed plan. Each is watched to its end, or taken back."""
    plan = session.api.post(f"plans/{revision}/apply", {"reason": reason})
    session.out.show(
        plan,
        Text(f"plan {revision} is being applied; `headway plan show` tells how far it is"),
        _moves(plan),
    )


@app.command("procure")
@with_session
def procure(
    session: Session,
    *,
    prices: Annotated[
        Path | None,
        typer.Option("--prices", help="Offers, YAML; those that ship.", dir_okay=False),
    ] = None,
    deferrable: Annotated[
        float, typer.Option("--deferrable", min=0, max=0.9, help="Part of the work that may wait.")
    ] = 0.0,
    wait_h: Annotated[
        int, typer.Option("--wait-hours", min=1, max=168, help="How long it may wait.")
    ] = 8,
    risk: Annotated[
        float,
        typer.Option("--risk", min=0, max=1, help="Weight of the worst fifth of outcomes."),
    ] = 0.0,
) -> None:
    """Turn the demand of the last two weeks into a purchase: reserved, on demand, spot."""
    from cli.procurement import bought, plan_purchase, steps_table

    curve = session.api.get("plans/procurement")
    purchase, steps = plan_purchase(
        curve, prices, deferrable_ratio=deferrable, deferrable_h=wait_h, risk_ratio=risk
    )
    session.out.show(bought(curve, purchase, steps), *steps_table(curve, purchase, steps))


# ---------------------------------------------------------------- what people see


def _chosen(session: Session, revision: int | None) -> JsonObject:
    if revision is not None:
        return session.api.get(f"plans/{revision}")
    plan = session.api.get("plans/current")["newest"]
    if plan is None:
        raise CommandFailure(
            ExitCode.FAILED,
            "there is no plan yet",
            "the leader makes one within its next rounds, unless its mode is off",
        )
    chosen: JsonObject = plan
    return chosen


def _control_line(current: JsonObject) -> Text:
    control = current["control"]
    line = Text.assemble("planner: ", (str(control["mode"]), "bold"))
    if control["is_paused"]:
        line.append(", paused", style="bold yellow")
    if control["changed_by"]:
        line.append(
            f"  ({control['changed_by']}, {instant(control['changed_at'])}: {control['reason']})",
            style="dim",
        )
    if current["problem"]:
        line.append(f"\nno plan in the latest round: {current['problem']}", style="bold red")
    return line


def _plan_view(plan: JsonObject) -> list[RenderableType]:
    style = _STATUS_STYLES.get(plan["status"], "")
    head = Text.assemble(
        (f"plan {plan['revision']}", "bold"),
        "  ",
        (str(plan["status"]).replace("_", " "), style),
        f", {plan['state']}  confirmed {ago(plan['confirmed_at'])} ago",
        f"\nfleet {dollars(plan['fleet_micro_usd_per_hour'])} an hour",
        f"   gap {plan['gap_ratio']:.1%}   solved in {plan['solve_s']:.1f} s",
    )
    parts: list[RenderableType] = [head, Text(""), _engines(plan["plan"]["desired"])]
    nodes = [
        entry for entry in plan["plan"]["desired_nodes"] if entry["desired"] != entry["actual"]
    ]
    if nodes:
        parts += [
            Text(""),
            table(
                ("NODES", "REGION", ">THERE", ">WANTED"),
                (
                    (f"{entry['gpu_type']} x{entry['gpus']}", entry["region"], entry["actual"],
                     entry["desired"])
                    for entry in nodes
                ),
            ),
        ]  # fmt: skip
    if plan["binding"]:
        shown = plan["binding"][:BINDING_SHOWN_MAX]
        parts += [Text("\nWHAT HOLDS IT BACK", style="bold")]
        parts += [Text(f"- {words}") for words in shown]
        if len(plan["binding"]) > len(shown):
            parts.append(Text(f"  and {len(plan['binding']) - len(shown)} more", style="dim"))
    parts += [Text(""), _moves(plan)]
    if plan["moves_waiting"]:
        parts.append(Text(f"{plan['moves_waiting']} more wait for their round", style="dim"))
    prices = _prices(plan["plan"])
    if prices is not None:
        parts += [Text(""), prices]
    return parts


def _engines(desired: list[JsonObject]) -> RenderableType:
    """Engines as bars: those that stay, those that come, those that go."""
    most = max((max(entry["actual"], entry["desired"]) for entry in desired), default=0)
    if most == 0:
        return Text("no engines, and none wanted")
    view = table(("ENGINES", "REGION", "", ">THERE", ">WANTED"), ())
    for entry in desired:
        actual, wanted = entry["actual"], entry["desired"]
        if actual == wanted == 0:
            continue
        view.add_row(
            cell(f"{entry['model']} {entry['gpu_type']} x{entry['gpus']} {entry['role']}"),
            cell(entry["region"]),
            _bar(actual, wanted, most),
            str(actual),
            Text(str(wanted), style="" if wanted == actual else "bold"),
        )
    return view


def _bar(actual: int, wanted: int, most: int) -> Text:
    def cells(count: int) -> int:
        return max(1, round(count * BAR_CELLS_MAX / most)) if count else 0

    stays, all_wanted, all_there = cells(min(actual, wanted)), cells(wanted), cells(actual)
    return Text.assemble(
        ("\u2588" * stays, "blue"),
        ("\u2592" * max(0, all_wanted - stays), "green"),
        ("\u2591" * max(0, all_there - stays), "red"),
    )


def _moves(plan: JsonObject) -> RenderableType:
    moves = plan["move_states"]
    if not moves:
        return Text("no moves: the fleet is as it is wanted", style="green")
    view = table((">#", "MOVE", "STATE", ">$/H SAVED", "WHY"), ())
    for move in moves:
        what = f"{move['kind']} {move['engine_id'] or 'all engines'} on {move['node_id']}"
        view.add_row(
            str(move["number"]),
            cell(what),
            Text(str(move["state"]).replace("_", " "), style=_MOVE_STYLES.get(move["state"], "")),
            f"{move['gain_micro_usd_per_hour'] / MICRO_USD_PER_USD:.2f}",
            escape(move["detail"] or move["reason"]),
        )
    return view


def _prices(plan: JsonObject) -> RenderableType | None:
    """What is short, and what it is worth."""
    short = [
        pool
        for pool in plan["prices"]["pools"]
        if pool["micro_usd_per_gpu_ms"] > 0 or pool["micro_usd_per_kv_token_s"] > 0
    ]
    bids = [entry for entry in plan["prices"]["classes"] if entry["bid_micro_usd"] > 0]
    parts: list[RenderableType] = []
    if short:
        parts.append(
            table(
                ("SHORT", "REGION", ">$/ENGINE-S", ">$/M KV TOKEN-S"),
                (
                    (
                        f"{pool['model']} {pool['gpu_type']} x{pool['gpus']} {pool['role']}",
                        pool["region"],
                        f"{pool['micro_usd_per_gpu_ms'] / 1000:.6f}",
                        f"{pool['micro_usd_per_kv_token_s']:.4f}",
                    )
                    for pool in short
                ),
            )
        )
    if bids:
        parts.append(
            table(
                ("CLASS", ">BID", ">SERVED"),
                (
                    (entry["class_id"], dollars(entry["bid_micro_usd"]),
                     f"{entry['served_ratio']:.0%}")
                    for entry in bids
                ),
            )
        )  # fmt: skip
    return Group(*parts) if parts else None


def _kind(entry: JsonObject) -> tuple[str, str]:
    return (
        f"{entry['model']} {entry['gpu_type']} x{entry['gpus']} {entry['role']}",
        str(entry["region"]),
    )


def _desired(plan: JsonObject) -> dict[tuple[str, str], int]:
    return {_kind(entry): entry["desired"] for entry in plan["plan"]["desired"]}
