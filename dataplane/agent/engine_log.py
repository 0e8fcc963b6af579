"""Writes an engine's output to files: rotated, and without secrets. A small program of its own.

The engine writes into a pipe, and this program reads it to its end, so that it outlives the agent as
the engine does. It needs nothing but the standard library, and is started without site packages.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

NAME = "engine.log"
# A file that grows over this is set aside; so many are kept beside the one that is written.
FILE_BYTES_MAX = 16 * 1024 * 1024
FILES_KEPT_MAX = 3
LINE_BYTES_MAX = 64 * 1024
READ_BYTES_MAX = 256 * 1024
# Values that are no secret by their shape, one a line, in this variable of the program's environment.
SECRETS_VARIABLE = "HEADWAY_LOG_SECRETS"
SECRET_CHARACTERS_MIN = 6
HIDDEN = b"[hidden]"

_SHAPES = re.compile(
    rb"\bhf_[A-Za-z0-9]{8,}"
    rb"|\b(?:sk|hw|pk|ghp|gho|glpat|xox[abp]|nvapi)[-_][A-Za-z0-9_\-]{12,}"
    rb"|\bAKIA[A-Z0-9]{16}\b"
    rb"|\beyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]+"
)
# What follows one of these names: `name: value`, `'name': ['value']`, `NAME=value`, `--name value`, and
# what follows `Bearer`.
_NAME = (
    rb"(?:authorization|api[-_]?keys?|access[-_]?key|secret(?:[-_]?key)?|passw(?:or)?d"
    rb"|(?:hf|auth|access|hub|api)[-_]?token|token)"
)
_NAMED = re.compile(
    rb"(?i)(\bbearer\s+"
    rb"|(?:\b|_)" + _NAME + rb"[\"']?\s*[:=]\s*[\[(]*\s*[\"']?(?:bearer\s+|basic\s+)?"
    rb"|--[a-z-]*" + _NAME + rb"\s+)"
    rb"([^\s\"',;\])}]{4,})"
)
# Numbers and words of prose after such a name are no values.
_PROSE = re.compile(rb"(?i)^(?:[\d.]+|\[hidden|none|null|true|false|with|from|that|this)$")


def clean(line: bytes, secrets: Iterable[bytes] = ()) -> bytes:
    """The line with every secret that is known, or looks like one, replaced."""
    for secret in secrets:
        line = line.replace(secret, HIDDEN)
    line = _SHAPES.sub(HIDDEN, line)
    return _NAMED.sub(_hide, line)


def _hide(found: "re.Match[bytes]") -> bytes:
    return found[0] if _PROSE.match(found[2]) else found[1] + HIDDEN


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name holds a secret."""
    return bool(
        re.search(r"(?i)(?:token|secret|passw(?:or)?d|api_?key|access_?key|credential)", name)
    )


def begin(folder: Path) -> None:
    """Set the log of an earlier process aside, and leave an empty one."""
    _rotate(folder / NAME)
    (folder / NAME).touch(mode=0o600)


def _rotate(path: Path) -> None:
    if not path.exists():
        return
    for number in range(FILES_KEPT_MAX, 0, -1):
        before = path if number == 1 else path.with_name(f"{NAME}.{number - 1}")
        if before.exists():
            before.replace(path.with_name(f"{NAME}.{number}"))


class LogFiles:
    """`engine.log`, and `engine.log.1` (the latest) to `engine.log.3` before it."""

    def __init__(self, folder: Path, *, file_bytes_max: int = FILE_BYTES_MAX) -> None:
        self._path = folder / NAME
        self._file_bytes_max = file_bytes_max
        self._file = self._path.open("ab", buffering=0)
        self._written = 0

    def close(self) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        """Append. What can not be written, as on a full disk, is lost: an engine never waits for it."""
        if self._written >= self._file_bytes_max:
            with contextlib.suppress(OSError):
                self._file.close()
                _rotate(self._path)
                self._file = self._path.open("ab", buffering=0)
                self._written = 0
        with contextlib.suppress(OSError, ValueError):
            self._file.write(data)
            self._written += len(data)


def copy(source: int, files: LogFiles, secrets: list[bytes]) -> None:
    """Copy a descriptor to its end, by lines. A bar that is redrawn counts as lines."""
    rest = b""
    while data := os.read(source, READ_BYTES_MAX):
        lines = re.split(rb"(?<=[\r\n])", rest + data)
        rest = lines.pop()
        if len(rest) > LINE_BYTES_MAX:
            lines.append(rest + b"\n")
            rest = b""
        files.write(b"".join(clean(line, secrets) for line in lines))
    if rest:
        files.write(clean(rest, secrets))


def main() -> None:
    secrets = sorted(
        (one for one in os.environb.get(SECRETS_VARIABLE.encode(), b"").split(b"\n") if one),
        key=len,
        reverse=True,
    )
    copy(0, LogFiles(Path(sys.argv[1])), secrets)


if __name__ == "__main__":
    main()
