"""Which server a command speaks to: options, the environment, a context of the user's, or a local `headway up`.

A context is a name for a URL and the place of its key, in `config.yaml` of the user's folder of settings.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import msgspec
import yaml

from cli.client import DATA_DIR, OPERATOR_FILE
from cli.failure import CommandFailure, ExitCode
from controlplane.embedded.process import write_private

FILE_BYTES_MAX: Final = 256 * 1024
KEY_FILE_BYTES_MAX: Final = 4 * 1024
CONTEXTS_MAX: Final = 1_000
# A file that holds keys is its owner's alone.
_OTHERS: Final = 0o077

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=63)]


class Source(StrEnum):
    """Where a URL or a key comes from, in the order in which they are looked for."""

    OPTION = "option"
    CONTEXT_OPTION = "--context"
    ENVIRONMENT = "environment"
    CONTEXT_ENVIRONMENT = "HEADWAY_CONTEXT"
    LOCAL = "local `headway up`"
    CONTEXT_CURRENT = "current context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A server and the operator key for it; `context` is empty where none was used."""

    url: str
    key: str
    url_source: Source
    key_source: Source
    context: str = ""


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One cluster. Of `key`, `key_file` and `key_variable` one says where its operator key is."""

    url: Annotated[str, msgspec.Meta(pattern=r"^https?://", max_length=2_048)]
    key: Annotated[str, msgspec.Meta(max_length=256)] = ""
    key_file: Annotated[str, msgspec.Meta(max_length=4_096)] = ""
    key_variable: Annotated[str, msgspec.Meta(max_length=255)] = ""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.key, self.key_file, self.key_variable))) != 1:
            raise ValueError("give one of key, key_file and key_variable")


class Contexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The file. `current` is used where nothing else names a server."""

    current: str = ""
    contexts: Annotated[dict[Name, Context], msgspec.Meta(max_length=CONTEXTS_MAX)] = msgspec.field(
        default_factory=dict
    )


def checked(document: object) -> Contexts:
    """The contexts that a document of plain values holds.

    Raises ValueError that says what is wrong and holds no value: one of them may be a key.
    """
    return msgspec.convert(document, Contexts)


def path_of_contexts(environment: Mapping[str, str] | None = None) -> Path:
    """HEADWAY_CONFIG, or `headway/config.yaml` in the user's folder of settings (XDG)."""
    given = os.environ if environment is None else environment
    if named := given.get("HEADWAY_CONFIG"):
        return Path(named)
    home = given.get("XDG_CONFIG_HOME") or Path(given.get("HOME", "~")).expanduser() / ".config"
    return Path(home) / "headway" / "config.yaml"


def read_contexts() -> Contexts:
    """The user's contexts, none where there is no file. Raises CommandFailure that says what is wrong."""
    path = path_of_contexts()
    try:
        status = path.stat()
        if status.st_size > FILE_BYTES_MAX:
            raise _unusable(path, f"it is larger than {FILE_BYTES_MAX} bytes", "make it smaller")
        found = checked(yaml.safe_load(path.read_text("utf-8")) or {})
    except FileNotFoundError:
        return Contexts()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _unusable(path, str(error), "mend or remove it") from error
    except ValueError as error:
        raise _unusable(path, str(error), "mend or remove it") from None
    if status.st_mode & _OTHERS and any(context.key for context in found.contexts.values()):
        raise _unusable(path, "others may read the keys in it", f"run `chmod 600 {path}`")
    return found


def write_contexts(contexts: Contexts) -> Path:
    """Writes the file whole, readable by the owner only. Raises CommandFailure."""
    path = path_of_contexts()
    document = msgspec.to_builtins(contexts)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise _unusable(path, str(error), "check its folder") from error
    return path


def key_of(name: str, context: Context) -> str:
    """The operator key of a context. Raises CommandFailure when it is not where it should be."""
    if context.key:
        return context.key
    if context.key_variable:
        key = os.environ.get(context.key_variable, "")
        where = f"the variable {context.key_variable}"
    else:
        path = Path(context.key_file).expanduser()
        where = str(path)
        try:
            with path.open("rb") as file:
                key = file.read(KEY_FILE_BYTES_MAX).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CommandFailure(
                ExitCode.USAGE,
                f"the key of context `{name}` can not be read: {error}",
                "see `headway config contexts`",
            ) from error
    if not key:
        raise CommandFailure(
            ExitCode.USAGE,
            f"the key of context `{name}` is not in {where}",
            "see `headway config contexts`",
        )
    return key


def context_named(name: str) -> Context:
    """Raises CommandFailure that lists the contexts there are."""
    known = read_contexts().contexts
    if name not in known:
        there = ", ".join(sorted(known)) or "none"
        raise CommandFailure(
            ExitCode.USAGE,
            f"there is no context `{name}`; there are: {there}",
            "make it with `headway config add`",
        )
    return known[name]


def connection(
    url: str | None, key: str | None, data_dir: Path = DATA_DIR, context: str | None = None
) -> Connection:
    """The server and its key. An option stands above a context that is named, that above the environment, that
    above the local server of this folder, and that above the current context.

    A key belongs to its server: one that was found with a URL is never sent to another. Raises
    CommandFailure when nothing says where to go.
    """
    if context is not None:
        return _of_context(url, key, context, Source.CONTEXT_OPTION)
    url_there, key_there = os.environ.get("HEADWAY_URL"), os.environ.get("HEADWAY_OPERATOR_KEY")
    if (url or url_there) and (key or key_there):
        return Connection(
            url=url or url_there or "",
            key=key or key_there or "",
            url_source=Source.OPTION if url else Source.ENVIRONMENT,
            key_source=Source.OPTION if key else Source.ENVIRONMENT,
        )
    if named := os.environ.get("HEADWAY_CONTEXT"):
        return _of_context(url or url_there, key or key_there, named, Source.CONTEXT_ENVIRONMENT)
    path = data_dir / OPERATOR_FILE
    local = _local(path)
    if local is not None:
        local_url, local_key = local
        asked = url or url_there
        _refuse_foreign(asked, key or key_there, local_url, str(path))
        return Connection(
            url=asked or local_url,
            key=key or key_there or local_key,
            url_source=_source(url, url_there, Source.LOCAL),
            key_source=_source(key, key_there, Source.LOCAL),
        )
    current = read_contexts().current
    if current:
        return _of_context(url or url_there, key or key_there, current, Source.CONTEXT_CURRENT)
    missing = "URL" if not (url or url_there) else "operator key"
    raise CommandFailure(
        ExitCode.USAGE,
        f"no {missing}: neither --url and --key nor HEADWAY_URL and HEADWAY_OPERATOR_KEY"
        f" are given, no context is in use, and there is no {path}",
        "start a local server with `headway up`, name one with `headway config add`, or give both",
    )


def names_of_contexts(incomplete: str) -> list[str]:
    """For the shell; nothing where the file can not be used."""
    try:
        return [name for name in read_contexts().contexts if name.startswith(incomplete)]
    except CommandFailure:
        return []


def _of_context(url: str | None, key: str | None, name: str, source: Source) -> Connection:
    context = context_named(name)
    _refuse_foreign(url, key, context.url, f"context `{name}`")
    return Connection(
        url=url or context.url,
        key=key or key_of(name, context),
        url_source=Source.OPTION if url else source,
        key_source=Source.OPTION if key else source,
        context=name,
    )


def _refuse_foreign(url: str | None, key: str | None, own_url: str, where: str) -> None:
    """The key of one server is never sent to another."""
    if url and not key and url.rstrip("/") != own_url.rstrip("/"):
        raise CommandFailure(
            ExitCode.USAGE,
            f"no operator key for {url}; the one in {where} belongs to {own_url}",
            "give --key or HEADWAY_OPERATOR_KEY",
        )


def _source(option: str | None, there: str | None, otherwise: Source) -> Source:
    return Source.OPTION if option else Source.ENVIRONMENT if there else otherwise


def _local(path: Path) -> tuple[str, str] | None:
    """URL and key that `headway up` wrote; None where none runs."""
    try:
        stored = json.loads(path.read_text())
        return str(stored["url"]), str(stored["key"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandFailure(
            ExitCode.USAGE,
            f"{path} can not be used: {error}",
            "remove it and run `headway up` again",
        ) from error


def _unusable(path: Path, why: str, remedy: str) -> CommandFailure:
    return CommandFailure(ExitCode.USAGE, f"{path} can not be used: {why}", remedy)
