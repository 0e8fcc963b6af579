"""Prints those entries of requirements.lock that a running Headway needs: the closure of its dependencies.

Run it with a Python that has the whole lock and Headway itself installed, as the image's builder has.
"""
# A script, and no part of a package.
# ruff: noqa: INP001

import re
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[1]
# Beside Headway's own: what puts the project itself into an environment without building in isolation.
ROOTS: Final = ("headway", "setuptools")
# The images' Pythons: a requirement that any of them has is one.
PYTHONS: Final = ("3.11", "3.12", "3.13")
NAME: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==")


def entries(lock: str) -> dict[str, str]:
    """Entries of a lock by canonical name, each with the lines of its hashes; a name may have one for each
    Python.
    """
    found: dict[str, str] = {}
    name = ""
    for line in lock.splitlines(keepends=True):
        if started := NAME.match(line):
            name = canonicalize_name(started[1])
            found[name] = found.get(name, "") + line
        elif name and line.startswith(" "):
            found[name] += line
    return found


def closure(roots: Iterable[str]) -> set[str]:
    """Canonical names of `roots` and all that they require here, by what is installed."""
    seen: set[tuple[str, str]] = set()
    left = [(canonicalize_name(root), "") for root in roots]
    while left:
        name, extra = left.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in _requirements(name):
            requirement = Requirement(text)
            if not _holds(requirement, extra):
                continue
            needed = canonicalize_name(requirement.name)
            left += [(needed, each) for each in ("", *requirement.extras)]
    return {name for name, _ in seen}


def _requirements(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []  # of another Python than this one


def _holds(requirement: Requirement, extra: str) -> bool:
    """Whether a requirement holds for some Python of the images, on this platform."""
    if requirement.marker is None:
        return True
    return any(
        requirement.marker.evaluate(
            {"extra": extra, "python_version": python, "python_full_version": f"{python}.0"}
        )
        for python in PYTHONS
    )


def runtime_lock(lock: str) -> str:
    """The part of `lock` that ROOTS need. Raises KeyError with the name of one that is not locked."""
    known = entries(lock)
    needed = closure(ROOTS) - {"headway"}
    return "".join(known[name] for name in sorted(needed))


if __name__ == "__main__":
    sys.stdout.write(runtime_lock((ROOT / "requirements.lock").read_text()))
