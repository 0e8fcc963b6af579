"""`headway demo`: starts everything, plays a load, kills an engine, prints the bill."""

from typing import Annotated

import typer
from rich.console import Console

from cli.client import DATA_DIR
from cli.failure import CommandFailure, ExitCode
from cli.operator import DataDirOption, JsonOption, reported
from cli.output import Output
from cli.running import PORT_DEFAULT, ClusterOption

SECONDS_DEFAULT = 30.0
SEED_DEFAULT = 7


def demo(
    *,
    seconds: Annotated[
        float, typer.Option("--seconds", min=5, max=600, help="Length of the load.")
    ] = SECONDS_DEFAULT,
    seed: Annotated[
        int, typer.Option("--seed", help="Another seed is another load.")
    ] = SEED_DEFAULT,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=1, max=65535, help="Port of the API; any free one when left out."
        ),
    ] = None,
    cluster: ClusterOption = None,
) -> None:
    """Play a load of agent workflows on a local fleet, kill an engine, show what a task cost."""
    from cli.demo.report import print_report
    from cli.demo.run import run
    from cli.documents import read_cluster
    from cli.processes import LocalCluster, free_port

    with reported():
        out = Output.of(None, as_json=as_json)
        console = Console(stderr=as_json, highlight=False)
        local = LocalCluster(
            data_dir=data_dir,
            port=free_port(PORT_DEFAULT) if port is None else port,
            cluster=read_cluster(cluster),
            on_event=lambda event: console.print(f"[dim]{event.text}[/]"),
        )
        result = run(local, console, seconds=seconds, seed=seed)
        if as_json:
            out.document(result)
        else:
            print_report(out.console, result)
        broken = [name for name, holds in result["invariants"].items() if not holds]
        if broken:
            raise CommandFailure(
                ExitCode.FAILED,
                f"invariants broken: {', '.join(broken)}",
                f"the logs are in {data_dir}/logs; repeat with --seed {seed}",
            )
