"""`headway nodes`: machines with GPUs."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cli import complete
from cli.client import DATA_DIR, JsonObject, segment
from cli.commands import follow
from cli.failure import CommandFailure, ExitCode
from cli.operator import (
    DataDirOption,
    JsonOption,
    OutputOption,
    Session,
    reported,
    with_change,
    with_session,
)
from cli.output import Output, ago, cell, table
from cli.paging import LIST_LIMIT_MAX, CursorOption, LimitOption, page_of
from cli.safety import confirm_not_last
from cli.watch import WatchOption, YesOption, show_list, watch

app = typer.Typer(no_args_is_help=True, help="Machines with GPUs.")

GIB = 2**30

NodeArgument = Annotated[
    str, typer.Argument(metavar="NODE", help="Node id.", autocompletion=complete.nodes)
]


@app.command("list")
@with_session
def list_nodes(
    session: Session,
    *,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    is_watched: WatchOption = False,
) -> None:
    """List nodes, whether their agents are heard, and how their GPUs are."""

    def read() -> JsonObject:
        return page_of(session, "nodes", limit, cursor)

    show_list(session, read, _table, is_watched=is_watched)


def _table(page: JsonObject) -> Table:
    return table(
        (
            "NODE", "REGION", "GPUS", ">ENGINES", ">CALLS", "AGENT", "CORDONED", ">SEEN",
            "DEVICES",
        ),
        (
            (
                node["id"],
                node["region"],
                f"{node['gpus']} x {node['gpu_type']}",
                node["engines"],
                node["calls"],
                "heard" if node["is_heard"] else "silent",
                node["is_cordoned"],
                ago(node["last_seen_at"]),
                _devices(node["devices"]),
            )
            for node in page["data"]
        ),
    )  # fmt: skip


def _devices(devices: list[JsonObject]) -> str:
    """Memory, load and temperature of each GPU, or what is wrong with it."""
    return "\n".join(
        f"{gpu['index']}: {gpu['fault']}"
        if gpu["fault"]
        else f"{gpu['index']}: {gpu['memory_used_bytes'] / GIB:.0f}"
        f"/{gpu['memory_total_bytes'] / GIB:.0f} GiB, {gpu['utilisation_ratio']:.0%},"
        f" {gpu['temperature_c']} C"
        for gpu in devices
    )


@app.command("show")
@with_session
def show(session: Session, node: NodeArgument) -> None:
    """Show one node with its GPUs."""
    document = session.api.get(f"nodes/{segment(node)}")
    session.out.show(
        document,
        _table({"data": [document]}),
        table(
            ("GPU", "NAME", ">MEMORY", ">USED", ">TEMP", ">ECC", ">XID", "FAULT"),
            (
                (
                    gpu["index"],
                    gpu["name"],
                    f"{gpu['memory_used_bytes'] / GIB:.0f}/{gpu['memory_total_bytes'] / GIB:.0f} GiB",
                    f"{gpu['utilisation_ratio']:.0%}",
                    f"{gpu['temperature_c']} C",
                    gpu["ecc_uncorrected"],
                    gpu["xid"],
                    gpu["fault"],
                )
                for gpu in document["devices"]
            ),
        ),
    )


@app.command("cordon")
@with_change
def cordon(
    session: Session,
    node: NodeArgument,
    *,
    is_sure: YesOption = False,
    is_watched: WatchOption = False,
) -> None:
    """Send nothing new to a node. With --watch until its last call has ended."""
    _confirm_not_last(session, node, "cordon", is_sure=is_sure)
    document = session.api.post(f"nodes/{segment(node)}/cordon")
    if is_watched:
        _follow(session, node, lambda found: not found["calls"])
        return
    session.out.say(
        document, f"{node} is cordoned; {document['calls']} calls run there to their end"
    )


@app.command("uncordon")
@with_change
def uncordon(session: Session, node: NodeArgument, *, is_watched: WatchOption = False) -> None:
    """Let a node take work again. With --watch until all of its serving engines accept calls."""

    def is_back(found: JsonObject) -> bool:
        engines = session.api.get("engines", limit=LIST_LIMIT_MAX)["data"]
        return bool(found["is_heard"]) and all(
            engine["is_accepting"]
            for engine in engines
            if engine["node_id"] == node and engine["state"] == "serving"
        )

    document = session.api.post(f"nodes/{segment(node)}/uncordon")
    if is_watched:
        _follow(session, node, is_back)
        return
    session.out.say(document, f"{node} takes work")


@app.command("drain")
@with_change
def drain(
    session: Session,
    node: NodeArgument,
    *,
    deadline_s: Annotated[
        float, typer.Option("--deadline", min=0, help="Seconds that running work may take.")
    ] = 30.0,
    is_sure: YesOption = False,
    is_watched: WatchOption = False,
) -> None:
    """Cordon a node and let its engines finish and stop taking work. With --watch until they have."""
    _confirm_not_last(session, node, "drain", is_sure=is_sure)
    document = session.api.post(f"nodes/{segment(node)}/drain", {"deadline_s": deadline_s})
    commands = document["commands"]
    if is_watched and commands:
        follow(session, [command["id"] for command in commands], is_watched=True)
        return
    session.out.show(
        document,
        f"{cell(node)} is cordoned; {len(commands)} engines drain"
        f" (follow them with `headway commands list --node {cell(node)} --watch`)",
    )


def _confirm_not_last(session: Session, node: str, what: str, *, is_sure: bool) -> None:
    confirm_not_last(
        session, f"{what} of {node}", lambda engine: engine["node_id"] == node, is_sure=is_sure
    )


def _follow(session: Session, node: str, is_over: Callable[[JsonObject], bool]) -> None:
    """Show a node until it is so."""

    def read() -> JsonObject:
        return session.api.get(f"nodes/{segment(node)}")

    watch(session, read, lambda found: _table({"data": [found]}), is_over=is_over)


@app.command("credentials")
def credentials(
    node: NodeArgument,
    *,
    output: OutputOption = None,
    as_json: JsonOption = False,
    data_dir: DataDirOption = DATA_DIR,
) -> None:
    """Print the environment of a node's agent, for the NATS of a local `headway up`."""
    with reported():
        folder = data_dir / "nats"
        try:
            port = (folder / "port").read_text().strip()
            password = (folder / "passwords" / Path(node).name).read_text().strip()
        except OSError as error:
            raise CommandFailure(
                ExitCode.USAGE,
                f"{folder} has no credentials of node `{node}`",
                "declare the node in the document of `headway up --cluster`; for a NATS of your"
                " own, make its user there",
            ) from error
        environment = {
            "HEADWAY_NODE_ID": node,
            "NATS_URL": f"nats://127.0.0.1:{port}",
            "HEADWAY_AGENT_PASSWORD": password,
        }
        out = Output.of(output, as_json=as_json)
        if out.is_for_programs:
            out.document(environment)
        else:
            for name, value in environment.items():
                print(f"{name}={value}")
