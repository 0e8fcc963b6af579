"""The recipes of the cookbook, put together into a copy of the bundle that ships: linted and tested with mutants."""

import re
import shutil
from pathlib import Path

import yaml
from typer.testing import CliRunner

from cli.main import app
from tests.surface import ROOT
from tests.written import DOCS, blocks

RECIPES = [block for block in blocks(DOCS / "policy-cookbook.md") if block.language == "yaml"]
RECIPES_MIN = 12


def headway(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_recipes_are_sound_and_their_tests_notice_every_mutant(tmp_path: Path) -> None:
    bundle = tmp_path / "my-policies"
    shutil.copytree(ROOT / "policies" / "default", bundle)
    shipped = headway("policy", "test", str(bundle))
    # It moves the same calls as a recipe does.
    (bundle / "fallback.yaml").unlink()
    rules = cases = 0
    for recipe in RECIPES:
        document = yaml.safe_load(recipe.text)
        is_rules = document["kind"] == "rules"
        # Other documents stand in a bundle once, so a recipe takes the place of the one that ships.
        assert (bundle / recipe.file).exists() is not is_rules
        (bundle / recipe.file).write_text(recipe.text)
        if is_rules:
            assert recipe.file == f"{document['name']}.yaml"
            rules += len(document["rules"])
            cases += sum(len(rule["tests"]) for rule in document["rules"])
    assert rules >= RECIPES_MIN
    assert "sound:" in headway("policy", "lint", str(bundle))
    said = headway("policy", "test", str(bundle), "--mutants", "--score-min", "100")
    before, after = (
        [int(number) for number in re.findall(r"(\d+) cases of (\d+) rules, 0 failed", text)[0]]
        for text in (shipped, said)
    )
    fallback_cases, fallback_rules = 8, 1
    assert after == [before[0] - fallback_cases + cases, before[1] - fallback_rules + rules]
