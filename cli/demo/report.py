"""The demo's summary for people."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from cli.explain import explanation
from cli.output import table


def print_report(console: Console, result: dict[str, Any]) -> None:
    """Prints what `demo.json` holds."""
    workflows = result["workflows"]
    ttft, tpot = result["ttft_ms"], result["tpot_ms"]
    cpst = result["cpst_usd"]
    rows = [
        ("workflows started", workflows["started"]),
        ("  succeeded", workflows["succeeded"]),
        ("  failed: the agent's result was wrong", result["failed_by"]["quality"]),
        ("  failed: its calls did not come through", result["failed_by"]["calls"]),
        ("  refused", workflows["refused"]),
        ("calls", result["calls"]),
        ("  steps asked for again", result["steps_retried"]),
        ("cost per successful task", "-" if cpst is None else f"${cpst:.4f}"),
        ("  fleet, for the load's period", f"${result['fleet_usd']:.2f}"),
        ("settled with tenants", f"${result['settled_usd']:.4f}"),
        ("  wasted on failed workflows", f"${result['wasted_usd']:.4f}"),
        ("TTFT p50 / p99", f"{_ms(ttft['p50'])} / {_ms(ttft['p99'])}"),
        ("TPOT p50 / p99", f"{_ms(tpot['p50'])} / {_ms(tpot['p99'])}"),
        ("prompt tokens from cache", f"{result['cached_token_ratio']:.1%}"),
        ("engine killed", result["killed_engine"] or "-"),
    ]
    console.print()
    console.print(table(("DEMO", ">"), rows))
    refusals = sorted(result["refusals"].items(), key=lambda entry: -entry[1])
    console.print()
    if refusals:
        console.print(table(("REFUSALS BY REASON", ">CALLS"), refusals))
    else:
        console.print("no call was refused")
    if result["explained"]:
        console.print("\n[bold]one decision, explained[/]")
        for part in explanation(result["explained"], console.width):
            console.print(part)
    console.print()
    for name, holds in result["invariants"].items():
        mark = "[green]holds[/]" if holds else "[bold red]BROKEN[/]"
        console.print(f"{escape(name)} {mark}  {_INVARIANTS[name]}")
    console.print(
        f"\n[dim]Simulated engines at a speed-up of {result['speedup']:g}: times are of the wall"
        f" clock, fleet dollars of the time that is simulated. Whether an agent's result is right"
        f" is drawn at published success rates. Seed {result['seed']}.[/]"
    )


_INVARIANTS = {
    "I1": "every accepted request ended in one state and was settled once",
    "I2": "spent + reserved stayed within every budget",
    "I3": "gauges are back at zero, no engine lent more than it has",
}


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
