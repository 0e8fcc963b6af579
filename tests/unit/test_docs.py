"""Every page of the documentation against the program: commands, options, variables, paths, series, links."""

import re
from pathlib import Path

import pytest

from tests import surface
from tests.reference.meanings import AGENT_ONLY, HOT_PATHS, OTHERS, REASONS, SERVE
from tests.reference.pages import FOLDER, pages
from tests.written import DOCS, blocks, commands, headway_words, inline_commands, missing_line

PAGES = sorted(
    [*DOCS.rglob("*.md"), *(surface.ROOT / "deploy").rglob("*.md"), surface.ROOT / "README.md"]
)
WRITTEN = [path for path in PAGES if path.parent != FOLDER]
SHELLS = {"console", "bash", "sh", ""}
HELD = pytest.mark.parametrize(
    "path", WRITTEN, ids=lambda path: str(path.relative_to(surface.ROOT))
)
# Of other programs that Headway reads or starts.
FOREIGN_VARIABLES = re.compile(r"(HF|VLLM|LWS|PG|NATS_BOX)_[A-Z_]+")
# Not a path of its own API: those of engines, and of a deployment.
FOREIGN_PATHS = {"/v1/load_lora_adapter"}


@pytest.mark.parametrize("name", list(pages()))
def test_the_reference_is_what_the_code_says(name: str) -> None:
    assert (FOLDER / name).read_text("utf-8") == pages()[name], (
        "write it again with `python -m tests.reference`"
    )


def test_the_reference_has_meanings_for_what_there_is_and_for_nothing_else() -> None:
    from controlplane.settings import Settings
    from controlplane.wire.outcomes import OUTCOMES

    assert set(SERVE) == set(Settings.model_fields)
    assert set(REASONS) == set(OUTCOMES)
    assert set(HOT_PATHS) == {path for _, path in surface.HOT}
    documented = {surface.variable_of(field) for field in SERVE} | set(AGENT_ONLY) | set(OTHERS)
    assert documented | surface.agent_variables() == surface.variables()


@HELD
def test_commands_and_options_are_the_programs(path: Path) -> None:
    problems = []
    for block in blocks(path):
        if block.language not in SHELLS:
            continue
        lines = (
            [command.text for command in commands(block)]
            if block.language == "console"
            # A listing of commands beside what they do.
            else [
                re.split(r"\s{2,}", line)[0]
                for line in block.text.replace("\\\n", " ").splitlines()
            ]
        )
        for line in lines:
            for words in headway_words(line):
                found = surface.problems_of_command(words)
                if block.language != "console":
                    found = [each for each in found if not _is_left_out(each)]
                problems += [f"{path.name}:{block.line}: {each}" for each in found]
    for words in inline_commands(path.read_text("utf-8")):
        # In running text a command may stand without what it is to be told.
        problems += [
            f"{path.name}: {each}"
            for each in surface.problems_of_command(words)
            if not _is_left_out(each)
        ]
    assert problems == []


def _is_left_out(problem: str) -> bool:
    return "arguments, not" in problem or "lacks its value" in problem


@HELD
def test_variables_paths_and_series_are_the_programs(path: Path) -> None:
    text = path.read_text("utf-8")
    named = set(re.findall(r"\b((?:HEADWAY|OTEL)_[A-Z_]*[A-Z])\b", text))
    assert named - surface.variables() == set()
    series = set(re.findall(r"\b(headway_[a-z_]*[a-z]|gen_ai_[a-z_]+)\b", text))
    stems = {name.removesuffix("_total") for name in surface.metric_names()}
    known = surface.metric_names() | stems
    assert {each for each in series if not _is_series(each, known)} == set()
    asked = re.findall(
        r"(GET|POST|PATCH|PUT|DELETE)? ?(/(?:v1|operator/v1|health)/[\w/{}<>$:-]+)", text
    )
    wrong = [
        spoken
        for method, spoken in asked
        if spoken not in FOREIGN_PATHS and not _is_asked_of_headway(method, spoken)
    ]
    assert wrong == []


def _is_series(name: str, known: frozenset[str] | set[str]) -> bool:
    """A series, or the beginning that some of them share."""
    return name in known or any(each.startswith(name) for each in known)


def _is_asked_of_headway(method: str, spoken: str) -> bool:
    path = re.sub(r"<\w+>|\$\w+|\{\w+\}", "x", spoken).rstrip("/:")
    methods = [method] if method else ["GET", "POST", "PATCH", "PUT", "DELETE"]
    return any(surface.is_served(each, path) for each in methods) or any(
        template.startswith(path) for _, template in surface.paths()
    )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(surface.ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        if not found.exists() or (anchor and anchor not in _anchors(found)):
            broken.append(target)
    assert broken == []


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text("utf-8")
    linked = {(DOCS / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", index)}
    missing = [
        path.relative_to(DOCS)
        for path in DOCS.rglob("*.md")
        if path != DOCS / "README.md"
        and path.resolve() not in linked
        and "runbooks" not in path.parts
    ]
    assert missing == []


def test_a_wrong_option_is_seen() -> None:
    for line, words in (
        ("KEY=$(headway keys create --tennant acme)", "`--tennant`"),
        ("headway nodes drain gpu-7 --wait && echo done", "`--wait`"),
        ("DATABASE_URL=x headway db upgrad", "`upgrad`"),
        ("headway agent --nod gpu-7", "`--nod`"),
    ):
        [found] = list(headway_words(line))
        assert any(words in problem for problem in surface.problems_of_command(found)), line


def test_output_is_compared_line_by_line() -> None:
    said = "sound: 12 files, 9 rules; revision 07fb\n\n39 cases of 9 rules,   0 failed\n"
    assert (
        missing_line(said, ("sound: … files, 9 rules; …", "39 cases of 9 rules, 0 failed")) is None
    )
    assert missing_line(said, ("39 cases of 9 rules, 1 failed",)) is not None
    assert missing_line(said, ("39 cases of 9 rules, 0 failed", "sound: …")) == "sound: …"
