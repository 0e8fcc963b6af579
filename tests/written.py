"""Pages of the documentation as what can be run and checked: blocks of commands, of Python and of files."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from tests.surface import ROOT

DOCS: Final = ROOT / "docs"
# Why a block can not be run by a test, in a comment before it; what it names is checked all the same.
NOT_RUN: Final = re.compile(r"<!-- not run: (.+?) -->")
# The exit code of the last command of the block that follows; 0 where nothing is said.
EXIT: Final = re.compile(r"<!-- exit: (\d+) -->")
FENCE: Final = re.compile(r"^```(\S*)\s*$")
# The first line of a block that is a file says its name.
FILE: Final = re.compile(r"^# ([\w./-]+\.(?:yaml|env|py|txt|conf))$")
# Stands for anything within a line of output.
ANYTHING: Final = "…"


@dataclass(frozen=True, slots=True)
class Command:
    """A line for the shell and what a page shows of its output."""

    text: str
    output: tuple[str, ...]
    line: int
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `reason` says why it is not run; empty: it is."""

    language: str
    text: str
    line: int
    reason: str
    exit_code: int = 0
    comments: tuple[str, ...] = field(default=())

    @property
    def file(self) -> str:
        """The name of the file that the block is; empty when it is none."""
        named = FILE.match(self.text.partition("\n")[0])
        return named[1] if named else ""


@cache
def blocks(path: Path) -> tuple[Block, ...]:
    """Fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = path.read_text("utf-8").splitlines()
    at = 0
    while at < len(lines):
        opened = FENCE.match(lines[at])
        if opened is None:
            at += 1
            continue
        before = "\n".join(_comments_before(lines, at))
        end = next(n for n in range(at + 1, len(lines)) if lines[n].startswith("```"))
        reason, code = NOT_RUN.search(before), EXIT.search(before)
        found.append(
            Block(
                language=opened[1],
                text="\n".join(lines[at + 1 : end]) + "\n",
                line=at + 1,
                reason=reason[1] if reason else "",
                exit_code=int(code[1]) if code else 0,
            )
        )
        at = end + 1
    return tuple(found)


def _comments_before(lines: list[str], at: int) -> Iterator[str]:
    at -= 1
    while at >= 0 and (not lines[at].strip() or lines[at].startswith("<!--")):
        yield lines[at]
        at -= 1


def commands(block: Block) -> list[Command]:
    """Commands of a `console` block: lines after `$ `, each with its continuation and its output."""
    found: list[Command] = []
    text: list[str] = []
    output: list[str] = []
    since = 0

    def close() -> None:
        if text:
            found.append(Command("\n".join(text), tuple(output), since))
            text.clear()
            output.clear()

    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith("$ "):
            close()
            text.append(line[2:])
            since = number
        elif text and not output and _goes_on("\n".join(text)):
            text.append(line)
        else:
            output.append(line)
    close()
    if found and block.exit_code:
        last = found[-1]
        found[-1] = Command(last.text, last.output, last.line, block.exit_code)
    return found


@cache
def _goes_on(text: str) -> bool:
    """Whether a shell would wait for more: a quote, a loop or a line that is not closed."""
    if text.endswith("\\"):
        return True
    return subprocess.run(["bash", "-nc", text], capture_output=True, check=False).returncode != 0


def missing_line(output: str, shown: tuple[str, ...]) -> str | None:
    """The first line that a page shows and that `output` does not have after those before it; None: all
    are there.
    """
    left = [" ".join(line.split()) for line in output.splitlines()]
    for line in shown:
        wanted = " ".join(line.split())
        if not wanted:
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in wanted.split(ANYTHING)))
        while left:
            if pattern.fullmatch(left.pop(0)):
                break
        else:
            return line
    return None


# ---------------------------------------------------------------- what a page names


_START: Final = re.compile(r"(?:^|[(|&;]\s*|\s--\s)(?:[A-Z_]+=\S*\s+)*(?:\S*/)?headway\s+")
_END: Final = re.compile(r"\s*(?:\||&&|;|>|<)")
_INNER: Final = re.compile(r"\$\(([^()]*)\)")


def headway_words(text: str) -> Iterator[list[str]]:
    """Words of every call of `headway` in a piece of a shell's script."""
    for line in text.replace("\\\n", " ").splitlines():
        left = line
        # What stands in `$( )` is a line of its own, and one word where it stands.
        while inner := _INNER.search(left):
            yield from headway_words(inner[1])
            left = left.replace(inner[0], "WORD", 1)
        for start in _START.finditer(left):
            rest = left[start.end() :]
            end = _END.search(rest)
            yield shlex.split(rest[: end.start()] if end else rest, comments=True)


def inline_commands(text: str) -> Iterator[list[str]]:
    """Calls of `headway` in running text, up to where words stand for themselves."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for named in re.findall(r"`headway ([^`]+)`", prose):
        words = re.split(r"\s\|\s|…|\.\.\.|\[", named)[0]
        yield shlex.split(words)
