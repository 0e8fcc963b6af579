"""Gives a command its operator client and output: adds --url, --key, --context, --data-dir, --output and
--json, to one that changes something --reason too, and ends it with an exit code.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from cli.client import DATA_DIR, OperatorClient
from cli.contexts import Connection, connection, names_of_contexts
from cli.failure import CommandFailure
from cli.output import Format, Output, fail

P = ParamSpec("P")

UrlOption = Annotated[
    str | None, typer.Option("--url", help="Server, as http://HOST:PORT (or HEADWAY_URL).")
]
KeyOption = Annotated[
    str | None, typer.Option("--key", help="Operator key (or HEADWAY_OPERATOR_KEY).")
]
DataDirOption = Annotated[
    Path, typer.Option("--data-dir", help="Folder of the local `headway up`.", file_okay=False)
]
ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context",
        help="One of `headway config contexts` (or HEADWAY_CONTEXT).",
        autocompletion=names_of_contexts,
    ),
]
OutputOption = Annotated[
    Format | None, typer.Option("--output", "-o", help="table for people, or json or yaml.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Short for --output json.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; it stands in the audit log.")]


@dataclass(frozen=True, slots=True)
class Session:
    """What a command works with; `connection` is None where somebody else made the client."""

    api: OperatorClient
    out: Output
    connection: Connection | None = None


def with_session(function: Callable[Concatenate[Session, P], None]) -> Callable[..., None]:
    """Makes a command of a function whose first parameter is a Session."""
    return _command(function, ())


def with_change(function: Callable[Concatenate[Session, P], None]) -> Callable[..., None]:
    """The same for a function that changes something: whoever runs it may say why."""
    return _command(function, (("why", ReasonOption, ""),))


def _command(
    function: Callable[Concatenate[Session, P], None],
    further: tuple[tuple[str, object, object], ...],
) -> Callable[..., None]:
    @wraps(function)
    def command(
        *args: Any,
        url: str | None,
        key: str | None,
        context: str | None,
        data_dir: Path,
        output: Format | None,
        as_json: bool,
        why: str = "",
        **kwargs: Any,
    ) -> None:
        with reported():
            out = Output.of(output, as_json=as_json)
            found = connection(url, key, data_dir, context)
            with OperatorClient(found.url, found.key, reason=why) as api:
                function(Session(api=api, out=out, connection=found), *args, **kwargs)

    signature = inspect.signature(function, eval_str=True)
    _, *own = signature.parameters.values()
    options = (
        *further,
        ("output", OutputOption, None),
        ("as_json", JsonOption, False),
        ("url", UrlOption, None),
        ("key", KeyOption, None),
        ("context", ContextOption, None),
        ("data_dir", DataDirOption, DATA_DIR),
    )
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, annotation, default in options
    ]
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    parameters = [*own, *added]
    # Typer reads both; they describe the function that it is to call.
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


class reported:  # noqa: N801  (reads as a word in `with reported():`)
    """Turns a CommandFailure inside its block into words on standard error and an exit code."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, CommandFailure):
            fail(error)
            raise typer.Exit(int(error.code)) from None
