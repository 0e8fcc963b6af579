"""`headway config`: the clusters that this user knows, and the settings that a server runs with."""

import sys
from typing import Annotated, Final

import msgspec
import typer
from rich.markup import escape

from cli.client import JsonObject
from cli.contexts import (
    Context,
    Contexts,
    checked,
    context_named,
    names_of_contexts,
    path_of_contexts,
    read_contexts,
    write_contexts,
)
from cli.failure import CommandFailure, ExitCode
from cli.operator import JsonOption, OutputOption, Session, reported, with_session
from cli.output import Output, table

app = typer.Typer(
    no_args_is_help=True, help="Clusters that you know, and the settings of a server."
)

# What is shown of a key: that there is one.
MASK: Final = "********"

NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of a context.", autocompletion=names_of_contexts),
]


@app.command("contexts")
def list_contexts(*, output: OutputOption = None, as_json: JsonOption = False) -> None:
    """List the clusters that you know; `*` marks the one in use."""
    with reported():
        out = Output.of(output, as_json=as_json)
        known = read_contexts()
        document = {
            "path": str(path_of_contexts()),
            "current": known.current or None,
            "contexts": [
                {"name": name, "url": one.url, "key": _where(one)}
                for name, one in known.contexts.items()
            ],
        }
        if not known.contexts and not out.is_for_programs:
            out.console.print("no contexts; make one with `headway config add NAME --url URL …`")
            return
        out.show(
            document,
            table(
                ("", "CONTEXT", "URL", "KEY"),
                (
                    ("*" if name == known.current else " ", name, one.url, _where(one))
                    for name, one in known.contexts.items()
                ),
            ),
        )


@app.command("use")
def use(name: NameArgument, *, output: OutputOption = None, as_json: JsonOption = False) -> None:
    """Use a cluster from now on, where no option, variable or local `headway up` names another."""
    with reported():
        out = Output.of(output, as_json=as_json)
        context = context_named(name)
        write_contexts(Contexts(current=name, contexts=read_contexts().contexts))
        out.say({"current": name, "url": context.url}, f"{name} is in use: {context.url}")


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name for the cluster.")],
    *,
    url: Annotated[str, typer.Option("--url", help="Server, as https://HOST.")],
    key_file: Annotated[
        str, typer.Option("--key-file", help="File that holds the operator key.")
    ] = "",
    key_variable: Annotated[
        str, typer.Option("--key-variable", help="Variable that holds the operator key.")
    ] = "",
    has_key_on_stdin: Annotated[
        bool, typer.Option("--key-stdin", help="Read the key from standard input and keep it.")
    ] = False,
    is_used: Annotated[bool, typer.Option("--use", help="Use it from now on.")] = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a cluster known, or change it. A key is never given on the command line: others see that."""
    with reported():
        out = Output.of(output, as_json=as_json)
        key = sys.stdin.readline().strip() if has_key_on_stdin else ""
        if has_key_on_stdin and not key:
            raise CommandFailure(ExitCode.USAGE, "no key came on standard input")
        known = read_contexts()
        try:
            context = Context(url=url, key=key, key_file=key_file, key_variable=key_variable)
            changed = Contexts(
                current=name if is_used else known.current,
                contexts={**known.contexts, name: context},
            )
            # A struct checks what is converted to it, not what it is made of.
            checked(msgspec.to_builtins(changed))
        except ValueError:
            # Without the error's own words, which may hold the key.
            raise CommandFailure(
                ExitCode.USAGE,
                f"context `{name}` can not be made as it is given",
                "a name of letters, digits, `.`, `_` and `-`; a URL that begins with http:// or"
                " https://; and one of --key-file, --key-variable and --key-stdin",
            ) from None
        path = write_contexts(changed)
        out.say(
            {"name": name, "url": context.url, "path": str(path)},
            f"{name} is {'in use' if is_used else 'known'}: {context.url} ({path})",
        )


@app.command("remove")
def remove(name: NameArgument, *, output: OutputOption = None, as_json: JsonOption = False) -> None:
    """Forget a cluster, with its key where that stands in the file."""
    with reported():
        out = Output.of(output, as_json=as_json)
        context_named(name)
        known = read_contexts()
        left = {other: one for other, one in known.contexts.items() if other != name}
        current = "" if known.current == name else known.current
        write_contexts(Contexts(current=current, contexts=left))
        out.say({"name": name, "is_removed": True}, f"{name} is forgotten")


@app.command("show")
@with_session
def show(session: Session) -> None:
    """Show where this command speaks to and why, and the settings of the server with their source."""
    found = session.connection
    served = session.api.get("settings")
    here: JsonObject = {}
    if found is not None:
        here = {
            "url": found.url,
            "url_source": str(found.url_source),
            "key": MASK,
            "key_source": str(found.key_source),
            "context": found.context or None,
            "contexts_file": str(path_of_contexts()),
        }
    rows = [(name.replace("_", " "), value) for name, value in here.items()]
    session.out.show(
        {"client": here, **served},
        "[bold]this command[/]",
        table(("", ""), rows),
        f"\n[bold]replica {escape(served['replica_id'])}[/]",
        table(
            ("VARIABLE", "VALUE", "SOURCE"),
            ((one["variable"], _value(one), one["source"]) for one in served["settings"]),
        ),
    )


def _value(setting: JsonObject) -> str:
    if setting["is_secret"]:
        return MASK if setting["is_set"] else "not set"
    return str(setting["value"] or "-")


def _where(context: Context) -> str:
    if context.key:
        return MASK
    return context.key_file or f"${context.key_variable}"
