"""What the pages on engines promise: flags that the adapter gives, settings and profiles that there are."""

import re
from pathlib import Path

import pytest

from cli.profiles import _spec
from dataplane.agent.ports import PORT_FIRST, PORT_LAST
from dataplane.agent.process import _HIDDEN_PREFIXES
from dataplane.agent.settings import read_engines
from dataplane.engines.kinds import KINDS, kind_of
from dataplane.engines.profiles import built_in, parse_profiles, places
from dataplane.protocol.messages import Feature

DOCS = Path(__file__).parents[2] / "docs"
BRING, ENGINES = ((DOCS / name).read_text() for name in ("bring-your-own-vllm.md", "engines.md"))
# Flags of the agent's own command line and of the shell, that the pages name too.
OTHERS = {"--bind-address", "--node", "--nats-url", "--data-dir", "--engines", "--profiles",
          "--cluster", "--file", "--profile", "--help", "--model"}  # fmt: skip

EVERYTHING = """
profiles:
  - name: a
    batch: {tokens_per_step: 4096, long_prompt_tokens: 64, queued_calls_max: 9, order: priority}
    context_tokens_max: 4096
    prefix_cache: {hash: sha256_cbor}
    kv_cache: {dtype: fp8, block_tokens: 16, bytes: 1024, memory_ratio: 0.5}
    kv_offload: {host_gib: 1}
    speculative: {method: ngram, tokens: 2}
    weights: {quantization: fp8, dtype: half, load_format: dummy}
    adapters: {slots: 1, rank_max: 8, host_slots: 2, at_run_time: true, loaded: {law: /srv/law}}
    sleep: {enabled: true}
    answers: {tool_calls: hermes, reasoning: qwen3}
    eager: true
  - name: b
    parallel: {tensor: 2, pipeline: 2, data: 2, experts: true}
    kv_transfer: {connector: nixl, on_failure: recompute}
    batch: {chunked_prefill: false}
"""


def given() -> tuple[set[str], set[str]]:
    """Every flag and every variable that the adapter can give."""
    flags: set[str] = set()
    variables: set[str] = set()
    known = parse_profiles(EVERYTHING, "test")
    for each in known.values():
        spec = _spec(each.profile, known)
        kind = kind_of(spec)
        launch = kind.launch(spec, "192.0.2.1", range(8000, 8000 + kind.ports_needed(spec)))
        flags |= {word.partition("=")[0] for word in launch.argv if word.startswith("--")}
        variables |= set(launch.environment)
    return flags, variables


@pytest.mark.parametrize("page", [BRING, ENGINES])
def test_every_flag_that_a_page_names_is_given(page: str) -> None:
    flags, _ = given()
    named = set(re.findall(r"--[a-z][a-z-]*[a-z]", page)) - OTHERS
    assert len(named) >= 8
    assert named <= flags, named - flags


def test_every_variable_that_a_page_names_is_given_or_kept_back() -> None:
    _, variables = given()
    named = set(re.findall(r"`(VLLM_[A-Z_]+)", BRING + ENGINES))
    assert len(named) == 3
    assert named <= variables
    hidden = set(re.findall(r"`([A-Z]+_?)`", BRING))
    assert hidden == set(_HIDDEN_PREFIXES)


def test_the_ports_to_open_are_those_that_are_given() -> None:
    assert f"in a row from {PORT_FIRST} to {PORT_LAST};" in BRING


def test_the_table_of_settings_is_whole() -> None:
    rows = re.findall(r"^\| (`[a-z_.*`, ]+?) \| ", ENGINES, re.MULTILINE)
    told: set[str] = set()
    for row in rows:
        section = ""
        for name in re.findall(r"`([a-z_.*]+)`", row):
            head, _, tail = name.partition(".")
            section = head or section
            told |= {
                place
                for place in places()
                if place == section
                or (place.split(".")[0] == section and tail in {"*", place.split(".")[-1]})
            }
    assert told == set(places())


def test_the_examples_can_be_read(tmp_path: Path) -> None:
    examples = re.findall(r"^```yaml\n(.*?)^```", BRING + ENGINES, re.MULTILINE | re.DOTALL)
    profiles = [text for text in examples if text.startswith("profiles:")]
    engines = [text for text in examples if "engine_id" in text]
    assert (len(profiles), len(engines)) == (1, 2)
    for each in parse_profiles(profiles[0], "page").values():
        _spec(each.profile, parse_profiles(profiles[0], "page"))
    for text in engines:
        file = tmp_path / "engines.yaml"
        file.write_text(text)
        for spec in read_engines(file, built_in()):
            kind_of(spec).check_settings(spec)


def test_the_table_of_kinds_tells_what_they_declare() -> None:
    header = re.search(r"^\| \| (.*) \|$", ENGINES, re.MULTILINE)
    assert header is not None
    assert set(re.findall(r"`([a-z_]+)`", header[1])) == set(KINDS)
    lacks = {
        name: KINDS[name].traits(_spec(each.profile, built_in())).lacks
        for name, each in {
            "vllm": built_in()["plain"],
            "llama_cpp": built_in()["llama-cpp"],
        }.items()
    }
    for words, feature in (
        ("how full the KV cache is", Feature.KV_USE),
        ("times to first token", Feature.LATENCIES),
        ("prefixes kept apart", Feature.CACHE_SALT),
        ("tokens of an answer", Feature.TOKEN_IDS),
        ("KV events", Feature.KV_EVENTS),
    ):
        row = next(line for line in ENGINES.splitlines() if line.startswith(f"| {words}"))
        _, _, vllm, llama, *_ = (cell.strip() for cell in row.split("|"))
        assert vllm.startswith("no") == (feature in lacks["vllm"])
        assert llama.startswith("no") == (feature in lacks["llama_cpp"])
