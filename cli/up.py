"""`headway up`: the local cluster, in the foreground, until Ctrl-C."""

import os
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from cli.client import DATA_DIR
from cli.operator import DataDirOption, reported
from cli.running import PORT_DEFAULT, ClusterOption, PortOption, run_until_signal

if TYPE_CHECKING:
    from cli.processes import Event, LocalCluster


def up(
    *,
    data_dir: DataDirOption = DATA_DIR,
    port: PortOption = PORT_DEFAULT,
    cluster: ClusterOption = None,
) -> None:
    """Run a whole Headway on this machine: stores, control plane, agents and engines."""
    from cli.documents import read_cluster
    from cli.processes import LocalCluster

    with reported():
        console = Console(highlight=False, stderr=True)
        local = LocalCluster(
            data_dir=data_dir,
            port=port,
            cluster=read_cluster(cluster),
            on_event=lambda event: _print_event(console, event),
        )
        run_until_signal(lambda: _up(local))


async def _up(local: "LocalCluster") -> None:
    await local.start()
    try:
        print_welcome(local)
        await local.wait()
    finally:
        await local.stop()


def print_welcome(local: "LocalCluster") -> None:
    """URL, a key and a line to paste."""
    logs = f"{os.path.relpath(local.data_dir)}/logs"
    print(f"\nHeadway serves at {local.url}  (logs in {logs})\n")
    models = [model.name for model in local.cluster.models]
    for tenant, key in list(local.tenant_keys.items())[:1]:
        print(f"  key of tenant {tenant}:\n    {key}\n")
        for model in models[:1]:
            print("  try it:")
            print(f"    curl {local.url}/v1/chat/completions \\")
            print(f"      -H 'authorization: Bearer {key}' \\")
            print("      -H 'content-type: application/json' \\")
            print(f'      -d \'{{"model": "{model}",')
            print('           "messages": [{"role": "user", "content": "hello"}]}\'\n')
    print("  look at it:  headway status\n  stop it:     Ctrl-C\n", flush=True)


def _print_event(console: Console, event: "Event") -> None:
    console.print(f"[dim]{escape(event.child):<20}[/] {escape(event.text)}")
