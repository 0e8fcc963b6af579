"""`headway simulate referee`: this world beside NVIDIA Dynamo's own replay (`referee.py`)."""

import json
from pathlib import Path
from typing import Annotated, Final

import typer

from cli.failure import CommandFailure, ExitCode
from cli.operator import reported
from cli.output import Output, table

REQUESTS_DEFAULT: Final = 1_500
REQUESTS_MAX: Final = 50_000
WORKERS_DEFAULT: Final = 4
WORKERS_MAX: Final = 64


def referee(
    trace: Annotated[
        Path,
        typer.Option("--trace", dir_okay=False, help="Conversations in Mooncake's format."),
    ],
    dynamo_python: Annotated[
        str,
        typer.Option(
            "--dynamo-python",
            metavar="PATH",
            help="Python with ai-dynamo; without it only this world plays.",
        ),
    ] = "",
    requests: Annotated[
        int, typer.Option("--requests", min=1, max=REQUESTS_MAX, help="Calls to play.")
    ] = REQUESTS_DEFAULT,
    workers: Annotated[
        int, typer.Option("--workers", min=2, max=WORKERS_MAX, help="Engines.")
    ] = WORKERS_DEFAULT,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", dir_okay=False, help="The figures.")
    ] = None,
) -> None:
    """Play a trace here and in NVIDIA Dynamo's own replay; ends with 1 when they rank routers differently."""
    # Worlds take their time to import; other commands need none.
    from cli.simulate.referee import agrees, conversations, ours, theirs
    from cli.simulate.traces import read_trace

    with reported():
        plans = conversations(read_trace(str(trace)), requests)
        worlds = {"headway": ours(plans, workers)}
        if dynamo_python:
            worlds["dynamo"] = theirs(plans, workers, dynamo_python)
        is_agreed = agrees(worlds["headway"], worlds["dynamo"]) if dynamo_python else None
        document = {
            "requests": sum(len(plan.steps) for plan in plans),
            "conversations": len(plans),
            "workers": workers,
            "is_agreed": is_agreed,
            "worlds": {
                name: {router: judged.document() for router, judged in found.items()}
                for name, found in worlds.items()
            },
        }
        if json_path is not None:
            json_path.write_text(json.dumps(document, indent=2) + "\n")
        out = Output()
        out.console.print(
            table(
                ("WORLD", "ROUTER", ">REUSE", ">TTFT ms", ">P50", ">P90", ">P99", ">TPOT", ">E2E"),
                (
                    (
                        name,
                        router,
                        f"{each.reuse_ratio:.1%}",
                        *(
                            f"{value:,.0f}"
                            for value in (
                                each.ttft_ms_mean,
                                each.ttft_ms_p50,
                                each.ttft_ms_p90,
                                each.ttft_ms_p99,
                            )
                        ),
                        f"{each.tpot_ms_p50:.1f}",
                        f"{each.e2e_ms_mean:,.0f}",
                    )
                    for name, found in worlds.items()
                    for router, each in found.items()
                ),
            )
        )
        if is_agreed is False:
            raise CommandFailure(ExitCode.FAILED, "the two worlds rank the routers differently")
