"""`headway engines profiles`: exit codes, and what it prints for people and for programs."""

import json
import shlex
from pathlib import Path

from typer.testing import CliRunner, Result

from cli.engines import app

CLUSTER = """
regions: [lab]
nodes:
  - id: n1
    region: lab
    gpu_type: h100
    gpus: 8
    address: 127.0.0.1
    engines:
      - {{engine_id: a, kind: vllm, model: m, role: {role}, gpus: {gpus}, profile: {profile}}}
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["profiles", *map(str, arguments)])


def test_list_tells_what_ships_and_what_a_file_adds(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("profiles: [{name: mine, about: my own, batch: {seats: 3}}]")
    told = run("list", "--file", own, "--json")
    assert told.exit_code == 0
    by_name = {each["name"]: each for each in json.loads(told.stdout)}
    assert by_name["mine"]["settings"] == {"batch.seats": 3}
    assert by_name["mine"]["source"] == str(own)
    assert {"plain", "tensor-4", "llama-cpp"} <= set(by_name)


def test_show_prints_a_command_line_that_a_shell_reads_back(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("profiles: [{name: mine, kv_transfer: {connector: nixl}}]")
    told = run("show", "mine", "--file", own, "--json")
    document = json.loads(told.stdout)
    assert document["ports"] == 2
    assert document["declared"]["kv_connector"] == "nixl"
    printed = run("show", "mine", "--file", own)
    assert printed.exit_code == 0
    lines = [line for line in printed.stdout.splitlines() if not line.startswith("#")]
    words = shlex.split("\n".join(lines).replace("\\\n", " "))
    variables = dict(word.split("=", 1) for word in words[: len(document["environment"])])
    assert variables == document["environment"]
    assert words[len(variables) :] == document["command"]
    assert "kv_connector: nixl" in printed.stdout


def test_show_refuses_what_can_not_be() -> None:
    unknown = run("show", "tensor4")
    assert (unknown.exit_code, "did you mean `tensor-4`?" in unknown.stderr) == (1, True)
    wrong = run("show", "tensor-4", "--gpus", 3)
    assert (wrong.exit_code, "`gpus: 3`" in wrong.stderr) == (1, True)


def test_lint_finds_every_wrong_profile_and_engine(tmp_path: Path) -> None:
    good, bad, broken = (tmp_path / name for name in ("good.yaml", "bad.yaml", "broken.yaml"))
    good.write_text("profiles: [{name: mine, parallel: {tensor: 2}}]")
    bad.write_text(
        "profiles: [{name: drafts, speculative: {tokens: 2}}, {name: host, kv_offload:"
        " {backend: native}}]"
    )
    broken.write_text("profiles: [{name: x, batsh: {}}]")
    sound = run("lint", good, "--json")
    assert sound.exit_code == 0
    assert json.loads(sound.stdout)["findings"] == []
    told = run("lint", good, bad, broken, "--json")
    assert told.exit_code == 1
    findings = json.loads(told.stdout)["findings"]
    assert len(findings) == 3
    assert "profile `drafts`: `speculative_tokens` is set without" in findings[0]
    assert "profile `host`" in findings[1]
    assert "did you mean `batch`?" in findings[2]
    assert "did you mean `batch`?" in run("lint", broken).stderr

    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER.format(role="both", gpus=2, profile="mine"))
    told = run("lint", good, "--cluster", cluster, "--json")
    assert (told.exit_code, json.loads(told.stdout)["engines"]) == (0, 1)
    for role, gpus, profile, words in (
        ("both", 3, "mine", "`gpus: 3`"),
        ("both", 2, "mien", "did you mean `mine`?"),
        ("decode", 8, "pipeline-2", "can not be pipelined"),
    ):
        cluster.write_text(CLUSTER.format(role=role, gpus=gpus, profile=profile))
        told = run("lint", good, "--cluster", cluster)
        assert told.exit_code == 1
        assert words in told.stderr.replace("\n", " ")
