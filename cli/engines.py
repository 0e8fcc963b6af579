"""`headway engines`: inference servers, and the commands that agents obey."""

import json
from typing import Annotated, Any

import typer

from cli.client import JsonObject, segment
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session, with_change, with_session
from cli.output import table
from cli.paging import CursorOption, LimitOption, page_of, show_page

app = typer.Typer(no_args_is_help=True, help="Inference servers, and commands to their agents.")

EngineArgument = Annotated[str, typer.Argument(metavar="ENGINE", help="Engine id.")]


@app.command("list")
@with_session
def list_engines(session: Session, limit: LimitOption = 50, cursor: CursorOption = None) -> None:
    """List engines with what they run now."""
    page = page_of(session, "engines", limit, cursor)
    show_page(
        session,
        page,
        table(
            ("ENGINE", "MODEL", "ROLE", "STATE", ">RUN", ">WAIT", ">KV", ">SEATS"),
            (
                (
                    engine["id"],
                    engine["model"],
                    engine["role"],
                    _state(engine),
                    engine["running"],
                    engine["waiting"],
                    f"{engine['kv_used_ratio']:.0%}",
                    f"{engine['seats_taken']}/{engine['seats_lent']}",
                )
                for engine in page["data"]
            ),
        ),
    )


def _state(engine: JsonObject) -> str:
    if engine["is_suspect"]:
        return "suspect"
    if engine["state"] == "serving" and not engine["is_accepting"]:
        return "not accepting"
    return str(engine["state"])


@app.command("load")
@with_change
def load(
    session: Session,
    *,
    engine: EngineArgument,
    node: Annotated[str, typer.Option("--node", help="Node that is to run it.")],
    model: Annotated[str, typer.Option("--model", help="Model of the catalogue.")],
    kind: Annotated[str, typer.Option("--kind", help="simulated or vllm.")] = "vllm",
    role: Annotated[str, typer.Option("--role", help="both, prefill or decode.")] = "both",
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs it takes.")] = 1,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="NAME=VALUE of its kind; repeatable.")
    ] = None,
) -> None:
    """Start an engine on a node."""
    spec: dict[str, Any] = {
        "node_id": node,
        "kind": kind,
        "model": model,
        "role": role,
        "gpus": gpus,
        "options": dict(_option(text) for text in option or ()),
    }
    _told(session, engine, session.api.post(f"engines/{segment(engine)}/load", spec))


@app.command("unload")
@with_change
def unload(session: Session, engine: EngineArgument) -> None:
    """Drain an engine, stop it, and forget it."""
    _told(session, engine, session.api.post(f"engines/{segment(engine)}/unload"))


@app.command("drain")
@with_change
def drain(
    session: Session,
    engine: EngineArgument,
    deadline_s: Annotated[
        float, typer.Option("--deadline", min=0, help="Seconds that running work may take.")
    ] = 30.0,
) -> None:
    """Let an engine finish what runs and take nothing new."""
    path = f"engines/{segment(engine)}/drain"
    _told(session, engine, session.api.post(path, {"deadline_s": deadline_s}))


@app.command("stop")
@with_change
def stop(session: Session, engine: EngineArgument) -> None:
    """Stop an engine at once."""
    _told(session, engine, session.api.post(f"engines/{segment(engine)}/stop"))


def _told(session: Session, engine: str, document: JsonObject) -> None:
    session.out.say(
        document,
        f"{document['kind']} {engine}: command {document['id']}"
        " (follow it with `headway commands list`)",
    )


def _option(text: str) -> tuple[str, str | int | float | bool]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise CommandFailure(ExitCode.USAGE, f"`{text}` is not NAME=VALUE")
    try:
        parsed = json.loads(value)
    except ValueError:
        return name, value
    return name, parsed if isinstance(parsed, str | int | float | bool) else value
