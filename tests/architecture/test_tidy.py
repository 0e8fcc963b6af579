"""Rules of the tree that no linter knows."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("controlplane", "dataplane", "policies", "cli")


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """Every module and every name that a module imports, as dotted names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_every_module_is_reached() -> None:
    """A module that nothing imports and that is no entry is dead."""
    known = {dotted(path) for path in modules()}
    reached: set[str] = set()
    for path in [*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "migrations").rglob("*.py")]:
        reached |= imported(path)
    entries = {name for name in known if name.endswith("__main__")}
    packages = {dotted(path) for path in modules() if path.name == "__init__.py"}
    assert known - reached - entries - packages == set()


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        dotted(path)
        for path in modules()
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


@pytest.mark.parametrize(
    "package", ["controlplane/domain", "controlplane/scheduler", "controlplane/admission",
                "controlplane/reliability"]
)  # fmt: skip
def test_the_core_asks_no_clock(package: str) -> None:
    clocks = re.compile(r"\b(time\.(time|monotonic|perf_counter)|datetime\.now|random\.)")
    asking = [
        str(path.relative_to(ROOT))
        for path in (ROOT / package).rglob("*.py")
        if clocks.search(path.read_text())
    ]
    assert asking == []


def test_metric_names_are_declared_once() -> None:
    from controlplane.telemetry.metrics import Metrics

    names = [metric.declaration.name for metric in Metrics().all()]
    assert len(names) == len(set(names))


def test_the_readme_draws_the_layers_that_the_linter_holds() -> None:
    import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(
        contract["layers"]
        for contract in contracts["contracts"]
        if contract["name"] == "Control plane layers"
    )
    drawn = re.findall(
        r"^\| `([a-z_` |]+)` \|", (ROOT / "controlplane/README.md").read_text(), re.MULTILINE
    )
    assert [re.sub(r"[` ]", "", row) for row in drawn] == [
        layer.replace(" ", "") for layer in layers
    ]


def test_every_field_that_is_logged_is_on_the_list() -> None:
    from controlplane.telemetry.logging import FIELDS

    logged: set[str] = set()
    for path in (ROOT / "controlplane").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "fields":
                    assert isinstance(value, ast.Dict), f"{path}: fields must be written out"
                    logged |= {
                        str(name.value) for name in value.keys if isinstance(name, ast.Constant)
                    }
    assert logged, "nothing is logged with fields"
    assert logged <= FIELDS
