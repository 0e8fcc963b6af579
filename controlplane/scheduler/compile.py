"""Compiles the decision core to C where a C compiler exists. Without one the same files run as they are.

`python -m controlplane.scheduler.compile` leaves shared objects beside the sources, which Python
then prefers. They are never stale: any that is older than a source of the group is rebuilt, or
removed when it can not be. HEADWAY_PURE=1 removes them.

Not imported by the core; it is a build step that lives beside what it builds.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
# One group: functions of its modules call each other as C functions.
GROUP: Final = "controlplane.scheduler.core"
MODULES: Final = (
    "controlplane.domain.fleet",
    "controlplane.domain.request",
    "controlplane.scheduler.legs",
    "controlplane.scheduler.perf_model",
    "controlplane.scheduler.flow",
    "controlplane.scheduler.axes.gpu_type",
    "controlplane.scheduler.axes.kv_headroom",
    "controlplane.scheduler.axes.weight_warmth",
    "controlplane.scheduler.axes.tenant_priority",
    "controlplane.scheduler.axes.workflow",
    "controlplane.scheduler.axes.latency_budget",
    "controlplane.scheduler.axes.agentic_scope",
    "controlplane.scheduler.place",
)
BUILD_S_MAX: Final = 600
# Lets the C compiler inline across functions of the library, which nothing else may override.
C_FLAGS: Final = "-fno-semantic-interposition"
PURE_VARIABLE: Final = "HEADWAY_PURE"

# The group's own shared object; those of its modules only point into it.
LIBRARY: Final = f"{GROUP}__mypyc"
SUFFIX: Final = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
_BUILD: Final = """
import sys
from mypyc.build import mypycify
from setuptools import setup
modules = mypycify(["--strict", *sys.argv[3:]], group_name=sys.argv[1], opt_level="3")
setup(name="core", ext_modules=modules, script_args=["-q", "build_ext", "--build-lib", sys.argv[2]])
"""


def source_of(module: str, root: Path = ROOT) -> Path:
    return root / (module.replace(".", "/") + ".py")


def objects(root: Path = ROOT) -> list[Path]:
    """Shared objects of the group that exist, for whatever Python they were built."""
    return sorted(
        path
        for name in (*MODULES, LIBRARY)
        for path in source_of(name, root).parent.glob(f"{name.rpartition('.')[2]}.*.so")
    )


def object_of(name: str, root: Path = ROOT) -> Path:
    """Where this Python looks for the shared object of a module."""
    return source_of(name, root).with_suffix("").with_suffix(SUFFIX)


def is_fresh(root: Path = ROOT) -> bool:
    """Every shared object of this Python is there and none is older than any source of the group."""
    newest = max(source_of(module, root).stat().st_mtime_ns for module in MODULES)
    expected = [object_of(name, root) for name in (*MODULES, LIBRARY)]
    return all(path.is_file() and path.stat().st_mtime_ns >= newest for path in expected)


def is_stale(root: Path = ROOT) -> bool:
    """Shared objects lie there that do not stem from the sources as they are."""
    return bool(objects(root)) and not is_fresh(root)


def remove(root: Path = ROOT) -> int:
    """Delete the shared objects; how many there were."""
    found = objects(root)
    for path in found:
        path.unlink()
    return len(found)


def build() -> str | None:
    """Compile the group in a scratch folder and move the results into place. The error, or None."""
    # A source that is edited while the compiler runs must count as newer than what comes out.
    newest = max(source_of(module).stat().st_mtime_ns for module in MODULES)
    try:
        with tempfile.TemporaryDirectory(prefix="headway-compile-") as scratch:
            library = Path(scratch) / "lib"
            done = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    _BUILD,
                    GROUP,
                    str(library),
                    *(str(source_of(module)) for module in MODULES),
                ],
                cwd=scratch,
                env={
                    **os.environ,
                    "MYPYPATH": str(ROOT),
                    "CFLAGS": f"{os.environ.get('CFLAGS', '')} {C_FLAGS}",
                },
                capture_output=True,
                text=True,
                timeout=BUILD_S_MAX,
                check=False,
            )
            if done.returncode != 0:
                return (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
            # The library first: the modules' objects are nothing without it.
            for built in sorted(library.rglob("*.so"), key=lambda path: "__mypyc" not in path.name):
                target = ROOT / built.relative_to(library)
                beside = target.with_name(target.name + ".new")
                beside.write_bytes(built.read_bytes())
                os.utime(beside, ns=(newest, newest))
                beside.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


def refresh() -> str:
    """Bring the shared objects in line with sources and environment; one sentence of what is so now."""
    if os.environ.get(PURE_VARIABLE, "") not in {"", "0"}:
        return (
            f"{PURE_VARIABLE} is set: the decision core runs uncompiled ({remove()} files removed)"
        )
    if is_fresh():
        return "the compiled decision core is fresh"
    remove()
    error = build()
    if error is None:
        return f"the decision core is compiled ({len(objects())} shared objects)"
    remove()
    return f"the decision core runs uncompiled, for it can not be compiled here: {error[-400:]}"


class SourceFinder(MetaPathFinder):
    """Finds modules of the control plane as source even where a shared object lies beside it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        for folder in path or ():
            finder = FileFinder(folder, (SourceFileLoader, SOURCE_SUFFIXES))
            spec = finder.find_spec(fullname, target)
            if spec is not None:
                return spec
        return None


def prefer_sources() -> None:
    """Import the group uncompiled in this process; call it before anything imports the group."""
    sys.meta_path.insert(0, SourceFinder())


def main() -> None:
    sys.stdout.write(refresh() + "\n")


if __name__ == "__main__":
    main()
