"""`headway nodes`: machines with GPUs."""

from pathlib import Path
from typing import Annotated

import typer

from cli.client import DATA_DIR, segment
from cli.failure import CommandFailure, ExitCode
from cli.operator import DataDirOption, JsonOption, Session, reported, with_change, with_session
from cli.output import Output, cell, instant, table
from cli.paging import CursorOption, LimitOption, page_of, show_page

app = typer.Typer(no_args_is_help=True, help="Machines with GPUs.")

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Node id.")]


@app.command("list")
@with_session
def list_nodes(session: Session, limit: LimitOption = 50, cursor: CursorOption = None) -> None:
    """List nodes and whether their agents are heard."""
    page = page_of(session, "nodes", limit, cursor)
    show_page(
        session,
        page,
        table(
            ("NODE", "REGION", "GPUS", ">ENGINES", "AGENT", "CORDONED", "LAST SEEN"),
            (
                (
                    node["id"],
                    node["region"],
                    f"{node['gpus']} x {node['gpu_type']}",
                    node["engines"],
                    "heard" if node["is_heard"] else "silent",
                    node["is_cordoned"],
                    instant(node["last_seen_at"]),
                )
                for node in page["data"]
            ),
        ),
    )


@app.command("cordon")
@with_change
def cordon(session: Session, node: NodeArgument) -> None:
    """Send nothing new to a node."""
    document = session.api.post(f"nodes/{segment(node)}/cordon")
    session.out.say(document, f"{node} is cordoned")


@app.command("uncordon")
@with_change
def uncordon(session: Session, node: NodeArgument) -> None:
    """Let a node take work again."""
    document = session.api.post(f"nodes/{segment(node)}/uncordon")
    session.out.say(document, f"{node} takes work")


@app.command("drain")
@with_change
def drain(
    session: Session,
    node: NodeArgument,
    deadline_s: Annotated[
        float, typer.Option("--deadline", min=0, help="Seconds that running work may take.")
    ] = 30.0,
) -> None:
    """Cordon a node and let its engines finish and stop taking work."""
    document = session.api.post(f"nodes/{segment(node)}/drain", {"deadline_s": deadline_s})
    commands = document["commands"]
    session.out.show(
        document,
        f"{cell(node)} is cordoned; {len(commands)} engines drain"
        " (follow them with `headway commands list`)",
    )


@app.command("credentials")
def credentials(
    node: NodeArgument, *, as_json: JsonOption = False, data_dir: DataDirOption = DATA_DIR
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
        out = Output(is_json=as_json)
        if as_json:
            out.document(environment)
        else:
            for name, value in environment.items():
                print(f"{name}={value}")
