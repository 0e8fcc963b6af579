"""`headway engines`: inference servers, and the commands that agents obey."""

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from cli import complete, profiles
from cli.client import JsonObject, segment
from cli.commands import follow
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session, with_change, with_session
from cli.output import table
from cli.paging import CursorOption, LimitOption, page_of
from cli.safety import confirm_not_last
from cli.watch import WatchOption, YesOption, confirm, progress_of, show_list

app = typer.Typer(no_args_is_help=True, help="Inference servers, and commands to their agents.")
app.add_typer(profiles.app, name="profiles")

EngineArgument = Annotated[
    str, typer.Argument(metavar="ENGINE", help="Engine id.", autocompletion=complete.engines)
]
DeadlineOption = Annotated[
    float, typer.Option("--deadline", min=0, help="Seconds that running work may take.")
]


@app.command("list")
@with_session
def list_engines(
    session: Session,
    *,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    is_watched: WatchOption = False,
) -> None:
    """List engines with what they run now."""

    def read() -> JsonObject:
        return page_of(session, "engines", limit, cursor)

    show_list(session, read, _table, is_watched=is_watched)


def _table(page: JsonObject) -> Table:
    return table(
        ("ENGINE", "MODEL", "ROLE", "STATE", ">RUN", ">WAIT", ">KV", ">SEATS", "PROGRESS"),
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
                engine["cordon"] or progress_of(engine["progress"]),
            )
            for engine in page["data"]
        ),
    )


def _state(engine: JsonObject) -> str:
    if engine["cordon"]:
        return f"{engine['state']}, cordoned"
    if engine["sleep_level"]:
        return f"asleep, level {engine['sleep_level']}"
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
    node: Annotated[
        str, typer.Option("--node", help="Node that is to run it.", autocompletion=complete.nodes)
    ],
    model: Annotated[
        str, typer.Option("--model", help="Model of the catalogue.", autocompletion=complete.models)
    ],
    kind: Annotated[str, typer.Option("--kind", help="vllm, llama_cpp or simulated.")] = "vllm",
    role: Annotated[str, typer.Option("--role", help="both, prefill or decode.")] = "both",
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs it takes.")] = 1,
    profile: Annotated[
        str, typer.Option("--profile", help="Engine profile that the node knows.")
    ] = "",
    option: Annotated[
        list[str] | None, typer.Option("--option", help="NAME=VALUE of its kind; repeatable.")
    ] = None,
    is_watched: WatchOption = False,
) -> None:
    """Start an engine on a node."""
    spec: dict[str, Any] = {
        "node_id": node,
        "kind": kind,
        "model": model,
        "role": role,
        "gpus": gpus,
        "profile": profile,
        "options": dict(_option(text) for text in option or ()),
    }
    _tell(session, engine, "load", spec, is_watched=is_watched)


@app.command("unload")
@with_change
def unload(
    session: Session,
    engine: EngineArgument,
    *,
    deadline_s: DeadlineOption = 30.0,
    is_sure: YesOption = False,
    is_watched: WatchOption = False,
) -> None:
    """Drain an engine, stop it, and forget it."""
    confirm(session, f"unload takes {engine} out of the fleet", is_sure=is_sure)
    _tell(session, engine, "unload", {"deadline_s": deadline_s}, is_watched=is_watched)


@app.command("drain")
@with_change
def drain(
    session: Session,
    engine: EngineArgument,
    *,
    deadline_s: DeadlineOption = 30.0,
    is_sure: YesOption = False,
    is_watched: WatchOption = False,
) -> None:
    """Let an engine finish what runs and take nothing new, then stop it."""
    _confirm_not_last(session, engine, "drain", is_sure=is_sure)
    _tell(session, engine, "drain", {"deadline_s": deadline_s}, is_watched=is_watched)


@app.command("stop")
@with_change
def stop(
    session: Session,
    engine: EngineArgument,
    *,
    is_sure: YesOption = False,
    is_watched: WatchOption = False,
) -> None:
    """Stop an engine at once."""
    confirm(session, f"stop ends what runs on {engine}", is_sure=is_sure)
    _tell(session, engine, "stop", is_watched=is_watched)


@app.command("restart")
@with_change
def restart(
    session: Session,
    engine: EngineArgument,
    *,
    deadline_s: DeadlineOption = 30.0,
    is_sure: YesOption = False,
    is_watched: WatchOption = False,
) -> None:
    """Drain an engine and start it anew."""
    confirm(session, f"restart empties {engine} and loads it again", is_sure=is_sure)
    _tell(session, engine, "restart", {"deadline_s": deadline_s}, is_watched=is_watched)


@app.command("role")
@with_change
def role(
    session: Session,
    engine: EngineArgument,
    new_role: Annotated[str, typer.Argument(metavar="ROLE", help="both, prefill or decode.")],
    *,
    deadline_s: DeadlineOption = 30.0,
    is_sure: YesOption = False,
    is_watched: WatchOption = False,
) -> None:
    """Drain an engine and start it anew in another role."""
    confirm(session, f"the role {new_role} empties {engine} and loads it again", is_sure=is_sure)
    body = {"role": new_role, "deadline_s": deadline_s}
    _tell(session, engine, "role", body, is_watched=is_watched)


@app.command("sleep")
@with_change
def sleep(
    session: Session,
    engine: EngineArgument,
    *,
    level: Annotated[
        int, typer.Option("--level", min=1, max=2, help="1 keeps the weights in host memory.")
    ] = 1,
    deadline_s: DeadlineOption = 30.0,
    is_sure: YesOption = False,
    is_watched: WatchOption = False,
) -> None:
    """Let an engine finish what runs and give its GPU memory back."""
    _confirm_not_last(session, engine, "sleep", is_sure=is_sure)
    body = {"level": level, "deadline_s": deadline_s}
    _tell(session, engine, "sleep", body, is_watched=is_watched)


@app.command("wake")
@with_change
def wake(session: Session, engine: EngineArgument, *, is_watched: WatchOption = False) -> None:
    """Bring a sleeping engine's weights back."""
    _tell(session, engine, "wake", is_watched=is_watched)


@app.command("reset-cache")
@with_change
def reset_cache(
    session: Session, engine: EngineArgument, *, is_watched: WatchOption = False
) -> None:
    """Let an engine forget its prefix cache."""
    _tell(session, engine, "reset-cache", is_watched=is_watched)


@app.command("cordon")
@with_change
def cordon(
    session: Session,
    engine: EngineArgument,
    *,
    because: Annotated[str, typer.Option("--because", help="Shown wherever the engine is.")] = "",
    is_sure: YesOption = False,
    is_watched: WatchOption = False,
) -> None:
    """Send nothing new to an engine."""
    _confirm_not_last(session, engine, "cordon", is_sure=is_sure)
    _tell(session, engine, "cordon", {"reason": because}, is_watched=is_watched)


@app.command("uncordon")
@with_change
def uncordon(session: Session, engine: EngineArgument, *, is_watched: WatchOption = False) -> None:
    """Let an engine take work again, and start it when it was given up."""
    _tell(session, engine, "uncordon", is_watched=is_watched)


@app.command("load-adapter")
@with_change
def load_adapter(
    session: Session,
    engine: EngineArgument,
    name: Annotated[str, typer.Argument(metavar="ADAPTER", help="Name that requests use.")],
    path: Annotated[str, typer.Argument(metavar="PATH", help="Its folder on the node.")],
    *,
    is_watched: WatchOption = False,
) -> None:
    """Load a LoRA adapter into an engine."""
    body = {"name": name, "path": path}
    _tell(session, engine, "load-adapter", body, is_watched=is_watched)


@app.command("unload-adapter")
@with_change
def unload_adapter(
    session: Session,
    engine: EngineArgument,
    name: Annotated[str, typer.Argument(metavar="ADAPTER", help="Name that requests use.")],
    *,
    is_watched: WatchOption = False,
) -> None:
    """Unload a LoRA adapter from an engine."""
    _tell(session, engine, "unload-adapter", {"name": name}, is_watched=is_watched)


def _confirm_not_last(session: Session, engine: str, what: str, *, is_sure: bool) -> None:
    confirm_not_last(
        session, f"{what} of {engine}", lambda one: one["id"] == engine, is_sure=is_sure
    )


def _tell(
    session: Session,
    engine: str,
    what: str,
    body: JsonObject | None = None,
    *,
    is_watched: bool,
) -> None:
    document = session.api.post(f"engines/{segment(engine)}/{what}", body)
    if is_watched:
        follow(session, [document["id"]], is_watched=True)
        return
    session.out.say(
        document,
        f"{document['kind']} {engine}: command {document['id']}"
        f" (follow it with `headway commands show {document['id']} --watch`)",
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
