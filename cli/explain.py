"""`headway explain`: why a request went where it went, in dollars per axis and in one sentence."""

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cli.client import JsonObject, segment
from cli.operator import Session, with_session

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
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="Request or decision id.")],
) -> None:
    """Explain a decision: every candidate, every axis, and why the winner won."""
    document = session.api.get(f"requests/{segment(request)}/explain")
    session.out.show(document, *explanation(document, session.out.console.width))


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
