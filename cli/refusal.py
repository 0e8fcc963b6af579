"""What would have let a refused call in: the numbers of the recorded decision, in words. Pure."""

from collections.abc import Iterator
from typing import Any, Final

from rich.markup import escape

from cli.client import JsonObject
from cli.output import dollars

_MICRO_USD_PER_USD: Final = 1_000_000
_MS_PER_S: Final = 1_000.0
# Facts of rules say "as much as one likes" with numbers from here on.
_UNLIMITED: Final = 2**61


def refusal_lines(refusal: JsonObject) -> list[str]:
    """Lines of markup: what was said, and what would have let it in; last, when to come back."""
    head = f"[bold]refused:[/] {escape(str(refusal['reason'] or 'no reason recorded'))}"
    if refusal["rule"]:
        head += f" by rule {escape(refusal['rule'])}"
    lines = [head]
    if refusal["detail"]:
        lines.append(f"  {escape(refusal['detail'])}")
    ways = list(ways_in(refusal))
    lines.append("[bold]what would have let it in[/]")
    if ways:
        lines += [f"  [green]+[/] {escape(way)}" for way in ways]
    else:
        lines.append("  [dim]its numbers were not recorded[/]")
    if refusal["waited_ms"]:
        lines.append(
            f"[dim]it waited {refusal['waited_ms'] / _MS_PER_S:.1f} s over {refusal['decisions']} decisions[/]"
        )
    return lines


def ways_in(refusal: JsonObject) -> Iterator[str]:
    """Each thing that, had it been so, would have let the call in."""
    facts = refusal["facts"] or {}
    for hurdle in refusal["hurdles"]:
        yield _way(hurdle, refusal)
    match refusal["reason"]:
        case "deadline_unreachable":
            yield from _deadline(refusal, facts)
        case "insufficient_quota":
            yield from _workflow_money(refusal, facts)
        case "queue_full":
            depth, wait_ms = facts.get("pool.queue_depth"), facts.get("pool.queue_wait_ms")
            if depth is not None:
                yield (
                    f"fewer calls waiting: {depth:,} waited, the first of them for about"
                    f" {(wait_ms or 0) / _MS_PER_S:.1f} s"
                )
        case "state_unavailable":
            yield "PostgreSQL that answers in time: `headway doctor` looks at it"
        case "no_capacity" | "warming":
            yield f"an engine of {refusal['model']} that accepts calls and is allowed to this tenant"
        case "forbidden_by_policy" | "shed_overload" if refusal["rule"]:
            yield (
                f"facts under which the rule {refusal['rule']} does not fire: `headway policy explain"
                f" {refusal['request_id']}` names the nearest"
            )
        case _:
            pass
    if refusal["retry_after_ms"] is not None:
        yield f"time: it was told to come back in {refusal['retry_after_ms'] / _MS_PER_S:.1f} s"
    elif refusal["is_final"]:
        yield "nothing but other numbers: the same call sent again would be refused again"


def _way(hurdle: JsonObject, refusal: JsonObject) -> str:
    there, needed, of = hurdle["there"], hurdle["needed"], hurdle["of"]
    match hurdle["quantity"]:
        case "worth_micro_usd_per_s":
            return _price(there, needed)
        case "seats":
            return (
                f"seats: {needed:.2f} not promised to others; {there:.2f} were there. Less work, or a"
                " later deadline, needs fewer"
            )
        case "time_ms":
            return (
                f"a deadline {max(0.0, needed - there) / _MS_PER_S:.1f} s later: room was likely in"
                f" {needed / _MS_PER_S:.1f} s, and it could wait {there / _MS_PER_S:.1f} s"
            )
        case "micro_usd":
            return (
                f"budget: {dollars(needed)} free on {of}; `headway budgets show {of}` tells what is"
                " left, `headway budgets set` gives more. A lower token limit of the call holds less"
            )
        case "tokens":
            return f"budget: {needed:,.0f} tokens free on {of}; `headway budgets show {of}`"
        case "requests_per_minute":
            return f"rate: fewer than {there:,.0f} requests a minute of this {of}"
        case "tokens_per_minute":
            return f"rate: fewer than {there:,.0f} tokens a minute of this {of}"
        case "calls_in_flight":
            return f"fewer calls at once: {there:,.0f} are allowed to this {of}, it would be {needed:,.0f}"
        case "steps":
            return (
                f"a scope with more steps: `{of}` allows {there:,.0f}, this is step {needed:,.0f}"
            )
        case other:
            return f"{other} of {needed:g} in place of {there} ({refusal['reason']})"


def _price(there: float, needed: float) -> str:
    offered, asked = (f"${value / _MICRO_USD_PER_USD:.6f}" for value in (there, needed))
    if there >= needed:
        return (
            f"a higher priority, or less promised work: {offered} for a second of work is above the"
            f" price of {asked}, and seats were short all the same"
        )
    return (
        f"price: more than {asked} for each second of its work; it offers {offered}. Raise"
        " `value_micro_usd` of its SLO class, or send it when the price is lower"
    )


def _deadline(refusal: JsonObject, facts: dict[str, Any]) -> Iterator[str]:
    """Against what the best engine would have taken."""
    given = facts.get("request.deadline_ms")
    slack = facts.get("workflow.deadline_slack_ms")
    predicted = refusal["e2e_ms_predicted"]
    limits = [value for value in (given, slack) if value and value < _UNLIMITED]
    if predicted is None or not limits:
        return
    left = min(limits)
    if predicted > left:
        yield (
            f"a deadline of {predicted / _MS_PER_S:.1f} s or more: the best engine would have taken"
            f" that, and {left / _MS_PER_S:.1f} s were left"
        )
    else:
        yield (
            f"a free seat sooner: the best engine needs {predicted / _MS_PER_S:.1f} s of the"
            f" {left / _MS_PER_S:.1f} s that it had when it came"
        )


def _workflow_money(refusal: JsonObject, facts: dict[str, Any]) -> Iterator[str]:
    """Where the workflow's own budget is spent; accounts that refused have a number of their own."""
    left = facts.get("workflow.remaining_micro_usd")
    cost = facts.get("request.cost_micro_usd")
    if refusal["hurdles"] or left is None or left >= _UNLIMITED:
        return
    yield f"a budget of the workflow with {dollars(cost)} left; {dollars(max(0, left))} were"
