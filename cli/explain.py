"""`headway explain`: why a request went where it went or was refused, what a workflow came to, why a plan is as
it is.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from cli import complete
from cli.client import JsonObject, segment
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session, with_session
from cli.output import cell, dollars, instant, milliseconds, table
from cli.refusal import refusal_lines

PLAN: Final = "plan"
WORKFLOW_PREFIX: Final = "wf-"
CALLS_READ_MAX: Final = 500
CALLS_SHOWN_MAX: Final = 40
CALLS_TOLD_MAX: Final = 3

_MICRO_USD_PER_MILLI_USD = 1_000
# What the columns of numbers take, and the mark of the winner.
_NUMBERS_WIDTH = 66
# Corrections nearer to 1 than this are noise.
_CORRECTION_TOLD_MIN = 0.1

# Column heads of the seven axes, short enough for 80 columns.
_HEADS = {
    "gpu_type": "gpu",
    "kv_headroom": "kv",
    "weight_warmth": "warm",
    "tenant_priority": "prio",
    "workflow": "flow",
    "latency_budget": "lat",
    "agentic_scope": "scope",
}


@with_session
def explain(
    session: Session,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Request, decision or workflow id, `plan`, or `plan:NUMBER`.",
            autocompletion=complete.requests_and_workflows,
        ),
    ],
) -> None:
    """Explain a request, a refusal, a workflow or a plan.

    Of a request: every candidate, every axis in dollars, and why one won.
    Of a refusal: what would have let it in.
    Of a workflow: its calls, and where time and money went.
    Of a plan: what holds it back, and its moves.
    """
    if target == PLAN or target.startswith(f"{PLAN}:"):
        _explain_plan(session, target)
    elif target.startswith(WORKFLOW_PREFIX):
        explain_workflow(session, target)
    else:
        _explain_request(session, target)


def _explain_request(session: Session, request: str) -> None:
    try:
        document = session.api.get(f"requests/{segment(request)}/explain")
    except CommandFailure as failure:
        if failure.reason != "not_found":
            raise
        # Its candidates were not kept. What became of it may be.
        _explain_outcome(session, request, failure)
        return
    parts = explanation(document, session.out.console.width)
    if document["winner"] is None and document["reason"] is not None:
        refusal = _refusal(session, request)
        if refusal is not None:
            document["refusal"] = refusal
            parts += ["", *refusal_lines(refusal)]
    session.out.show(document, *parts)


def _refusal(session: Session, request: str) -> JsonObject | None:
    """What is kept of a refusal; None while it is not written, or when the call waits."""
    try:
        return session.api.get(f"refusals/{segment(request)}")
    except CommandFailure as failure:
        if failure.reason != "not_found":
            raise
        return None


def _explain_outcome(session: Session, request: str, failure: CommandFailure) -> None:
    """A request whose candidates nobody kept: where it was placed, and what became of it."""
    try:
        detail = session.api.get(f"requests/{segment(request)}")
    except CommandFailure as other:
        raise (failure if other.reason == "not_found" else other) from None
    rows = [
        (
            decision["number"],
            decision["verdict"],
            decision["reason"] or decision["decode_engine_id"],
            dollars(decision["cost_micro_usd"]),
            milliseconds(decision["ttft_ms_predicted"]),
            instant(decision["decided_at"]),
        )
        for decision in detail["decisions"]
    ]
    session.out.show(
        detail,
        f"[bold]{escape(request)}[/] for [bold]{escape(detail['model'])}[/]:"
        f" {escape(detail['reason'] or detail['state'])}",
        table((">#", "VERDICT", "WHERE OR WHY", ">COST", ">TTFT", "AT"), rows),
        "[dim]its candidates were not kept: they are of refusals, of a sample, and of what a replica"
        " decided last[/]",
    )


def _explain_plan(session: Session, target: str) -> None:
    from cli.plan import show_plan

    _, _, number = target.partition(":")
    if number and not number.isdigit():
        raise CommandFailure(
            ExitCode.USAGE, f"`{number}` is no number of a plan", "see `headway plan history`"
        )
    show_plan(session, int(number) if number else None)


def explain_workflow(session: Session, workflow: str) -> None:
    """Show what became of a workflow: where its time and its money went, call by call."""
    document = session.api.get(f"workflows/{segment(workflow)}")
    calls = session.api.get("overview", part=["calls"], workflow=workflow, limit=CALLS_READ_MAX)[
        "calls"
    ]
    choice = _choice(session, workflow) if document["asked_model"] else None
    told = {**document, "calls": calls, "model_choice": choice}
    session.out.show(told, *_workflow_view(document, calls, choice))


def _choice(session: Session, workflow: str) -> JsonObject | None:
    try:
        return session.api.get(f"model-choice/workflows/{segment(workflow)}")
    except CommandFailure as failure:
        if failure.reason not in {"not_found", "workflow_not_found"}:
            raise
        return None


def _workflow_view(
    document: JsonObject, calls: list[JsonObject], choice: JsonObject | None
) -> list[Any]:
    spent = document["spent_micro_usd"]
    lost = sum(call["settled_micro_usd"] or 0 for call in calls if call["state"] != "succeeded")
    queued_ms = sum(call["queue_ms"] or 0 for call in calls)
    busy_ms = sum(call["e2e_ms"] or 0 for call in calls) - queued_ms
    cached, prompt = (
        sum(call[name] for call in calls) for name in ("cached_tokens", "prompt_tokens")
    )
    engines = {call["decode_engine_id"] for call in calls if call["decode_engine_id"]}
    refused = [call for call in calls if call["state"] in {"refused", "expired"}]
    budget = document["budget_micro_usd"]
    lines = [
        f"[bold]{escape(document['id'])}[/] of {escape(document['tenant_id'])}: {document['state']}"
        + (f" ({cell(document['detail'])})" if document["detail"] else ""),
        (
            f"{cell(document['kind'])}, {document['scope']}, SLO class {escape(document['slo_class'])};"
            f" {document['steps_done']} of {document['steps_expected']} steps,"
            f" {len(calls)} calls on {len(engines)} engines"
        ),
        _time_line(document),
        f"spent {dollars(spent)}"
        + (f" of {dollars(budget)}" if budget is not None else "")
        + (f", {dollars(lost)} of it on calls that did not succeed" if lost else "")
        + (
            f"; all of it wasted: the workflow {document['state']}"
            if document["state"] not in {"running", "succeeded"} and spent
            else ""
        ),
        (
            f"waited {milliseconds(queued_ms)} in the queue, was served for {milliseconds(busy_ms)};"
            f" {cached / prompt:.0%} of the prompt tokens were cached"
        )
        if prompt
        else "no call was served",
    ]
    if refused:
        words = "; ".join(f"{call['id']} {call['reason']}" for call in refused[:CALLS_TOLD_MAX])
        lines.append(
            f"[yellow]refused:[/] {escape(words)}: `headway explain` says what was missing"
        )
    if choice is not None:
        lines.append(f"model: {escape(choice['sentence'])}")
    if len(calls) >= CALLS_READ_MAX:
        lines.append(f"[dim]only its latest {CALLS_READ_MAX} calls are counted and shown[/]")
    if not calls:
        return lines
    ordered = sorted(calls, key=lambda call: (call["step"], call["opened_at"]))
    shown = ordered[-CALLS_SHOWN_MAX:]
    if len(ordered) > len(shown):
        lines.append(f"[dim]the last {len(shown)} calls; --json has all[/]")
    return [
        *lines,
        "",
        table(
            (">STEP", "REQUEST", "ENGINE", ">QUEUE", ">TTFT", ">E2E", ">COST", "STATE"),
            (
                (
                    call["step"],
                    call["id"],
                    call["decode_engine_id"],
                    milliseconds(call["queue_ms"]),
                    milliseconds(call["ttft_ms"]),
                    milliseconds(call["e2e_ms"]),
                    dollars(call["settled_micro_usd"]),
                    call["reason"] or call["state"],
                )
                for call in shown
            ),
        ),
    ]


def _time_line(document: JsonObject) -> str:
    created, deadline = (
        datetime.fromisoformat(document[name]) for name in ("created_at", "deadline_at")
    )
    given_s = (deadline - created).total_seconds()
    if document["ended_at"] is None:
        used_s = (datetime.now(UTC) - created).total_seconds()
        return f"has used {used_s:.1f} s of the {given_s:.1f} s until its deadline"
    used_s = (datetime.fromisoformat(document["ended_at"]) - created).total_seconds()
    late_s = used_s - given_s
    end = f"{late_s:.1f} s late" if late_s > 0 else f"{-late_s:.1f} s before its deadline"
    return f"ended after {used_s:.1f} s, {end}"


def explanation(document: JsonObject, width: int) -> list[Any]:
    """An explanation for people: candidates by axes in thousandths of a dollar, then in words."""
    candidates = document["candidates"]
    parts: list[Any] = [
        f"[bold]{escape(document['request_id'])}[/] for [bold]{escape(document['model'])}[/]"
    ]
    names = [name(candidate) for candidate in candidates]
    labels = names
    if max(map(len, names), default=0) > width - _NUMBERS_WIDTH:
        # Numbers in the table, names below it.
        labels = [str(number) for number in range(1, len(names) + 1)]
    if candidates:
        parts.append(_table(document, labels))
    if labels is not names:
        parts += [
            f"  {label} {escape(text)} ({candidate['gpu_type']}, {candidate['region']})"
            for label, text, candidate in zip(labels, names, candidates, strict=True)
        ]
    parts += [
        f"  ~ {label} is measured at {candidate['ttft_correction']:.2f} x its published time to the"
        f" first token, {candidate['tpot_correction']:.2f} x per token"
        for label, candidate in zip(labels, candidates, strict=True)
        if _is_told(candidate)
    ]
    parts += [
        f"  [red]x[/] {label} {_HEADS[axis['axis']]}: {escape(axis['objection'])}"
        for label, candidate in zip(labels, candidates, strict=True)
        for axis in candidate["axes"]
        if axis["objection"]
    ]
    parts.append(f"\n{escape(document['sentence'])}")
    queue = document.get("queue")
    if queue is not None:
        wait_ms = queue["wait_ms_predicted"]
        soon = "" if wait_ms is None else f", for about {wait_ms / 1000:.1f} s more"
        parts.append(f"It waits, as number {queue['position']:,}{soon}.")
    return parts


def name(candidate: JsonObject) -> str:
    """A candidate in words: an engine, or a prefill engine and the decode engine after it."""
    if candidate["prefill"]:
        return f"{candidate['prefill']} + {candidate['decode']}"
    return str(candidate["decode"])


def _table(document: JsonObject, labels: list[str]) -> Table:
    result = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        caption="thousandths of a dollar; x = objects; * = winner",
        caption_justify="left",
    )
    result.add_column("CANDIDATE", overflow="fold")
    for head in _HEADS.values():
        result.add_column(head, justify="right")
    result.add_column("SUM", justify="right")
    result.add_column("TTFT", justify="right")
    for label, candidate in zip(labels, document["candidates"], strict=True):
        is_winner = candidate["is_winner"]
        views = {axis["axis"]: axis for axis in candidate["axes"]}
        result.add_row(
            f"{'* ' if is_winner else '  '}{escape(label)}",
            *(_axis(views.get(axis)) for axis in _HEADS),
            _milli(candidate["cost_micro_usd"]) if candidate["is_feasible"] else "-",
            f"{candidate['ttft_ms_predicted']:.0f}ms" if candidate["is_feasible"] else "-",
            style="bold green" if is_winner else "" if candidate["is_feasible"] else "dim",
        )
    return result


def _is_told(candidate: JsonObject) -> bool:
    """An engine that keeps to its published times needs no line."""
    corrections = (candidate["ttft_correction"], candidate["tpot_correction"])
    return any(abs(ratio - 1.0) >= _CORRECTION_TOLD_MIN for ratio in corrections)


def _axis(view: JsonObject | None) -> str:
    if view is None:
        return "-"
    return "x" if view["objection"] else _milli(view["cost_micro_usd"])


def _milli(micro_usd: float | None) -> str:
    if micro_usd is None:
        return "-"
    return f"{micro_usd / _MICRO_USD_PER_MILLI_USD:.3f}"
