"""Engine profiles: what is refused and in which words, what flags they become, what is declared."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataplane.agent.settings import SettingsError, known_profiles, read_engines
from dataplane.engines.base import EngineError
from dataplane.engines.controls import controls_of
from dataplane.engines.kinds import KINDS, kind_of, profile_options, with_profile
from dataplane.engines.kv_connectors import transfer_of
from dataplane.engines.kv_wire import KvEndpoints, remove_sockets
from dataplane.engines.profiles import Profiles, built_in, parse_profiles, places
from dataplane.protocol.messages import Capability, EngineSpec, Feature

VLLM = KINDS["vllm"]


def profiles(text: str) -> Profiles:
    return parse_profiles(f"profiles:\n  - {{name: p, {text}}}", "file")


def spec(text: str = "", *, role: str = "both", gpus: int = 1, **options: Any) -> EngineSpec:
    """A vLLM engine by a profile of these settings, with options of its own above it."""
    made = EngineSpec(
        engine_id="v", kind="vllm", model="m", role=role, gpus=gpus, options=options, profile="p"
    )
    return with_profile(made, profiles(text) if text else profiles("kind: vllm"))


def command(made: EngineSpec) -> list[str]:
    VLLM.check_settings(made)
    return list(VLLM.launch(made, "127.0.0.1", range(8000, 8000 + VLLM.ports_needed(made))).argv)


def value_of(argv: list[str], flag: str) -> Any:
    """What follows a flag; decoded where it is JSON."""
    said = [word.partition("=")[2] for word in argv if word.startswith(f"{flag}=")]
    word = said[0] if said else argv[argv.index(flag) + 1]
    return json.loads(word) if word.startswith("{") else word


# Written down by hand from `vllm serve --help=all` of 0.32, and not from the adapter's table.
FLAGS: dict[str, tuple[str, str]] = {
    "parallel: {tensor: 4}": ("--tensor-parallel-size", "4"),
    "parallel: {pipeline: 4}": ("--pipeline-parallel-size", "4"),
    "parallel: {data: 4}": ("--data-parallel-size", "4"),
    "batch: {seats: 7}": ("--max-num-seqs", "7"),
    "batch: {tokens_per_step: 4096}": ("--max-num-batched-tokens", "4096"),
    "batch: {long_prompt_tokens: 99}": ("--long-prefill-token-threshold", "99"),
    "batch: {queued_calls_max: 5}": ("--max-num-queued-reqs", "5"),
    "batch: {order: priority}": ("--scheduling-policy", "priority"),
    "context_tokens_max: 4096": ("--max-model-len", "4096"),
    "prefix_cache: {hash: sha256_cbor}": ("--prefix-caching-hash-algo", "sha256_cbor"),
    "kv_cache: {dtype: fp8}": ("--kv-cache-dtype", "fp8"),
    "kv_cache: {block_tokens: 32}": ("--block-size", "32"),
    "kv_cache: {bytes: 1024}": ("--kv-cache-memory-bytes", "1024"),
    "kv_cache: {memory_ratio: 0.8}": ("--gpu-memory-utilization", "0.8"),
    "kv_offload: {host_gib: 2.5}": ("--kv-offloading-size", "2.5"),
    "kv_offload: {host_gib: 2, backend: lmcache}": ("--kv-offloading-backend", "lmcache"),
    "weights: {quantization: fp8}": ("--quantization", "fp8"),
    "weights: {dtype: half}": ("--dtype", "half"),
    "weights: {load_format: dummy}": ("--load-format", "dummy"),
    "adapters: {slots: 3}": ("--max-loras", "3"),
    "adapters: {slots: 3, rank_max: 64}": ("--max-lora-rank", "64"),
    "adapters: {slots: 3, host_slots: 9}": ("--max-cpu-loras", "9"),
    "answers: {tool_calls: hermes}": ("--tool-call-parser", "hermes"),
    "answers: {reasoning: qwen3}": ("--reasoning-parser", "qwen3"),
}
SWITCHES = {
    "prefix_cache: {enabled: false}": "--no-enable-prefix-caching",
    "batch: {chunked_prefill: false}": "--no-enable-chunked-prefill",
    "parallel: {data: 4, experts: true}": "--enable-expert-parallel",
    "sleep: {enabled: true}": "--enable-sleep-mode",
    "eager: true": "--enforce-eager",
    "adapters: {slots: 1}": "--enable-lora",
    "answers: {tool_calls: hermes}": "--enable-auto-tool-choice",
}


@pytest.mark.parametrize("text", FLAGS)
def test_a_setting_becomes_its_flag_and_is_not_there_unsaid(text: str) -> None:
    flag, value = FLAGS[text]
    made = spec(text, gpus=4 if "parallel" in text else 1)
    assert value_of(command(made), flag) == value
    # Seats are always told, since they are what is lent.
    if flag != "--max-num-seqs":
        assert not [word for word in command(spec()) if word.startswith(flag)]


@pytest.mark.parametrize("text", SWITCHES)
def test_a_switch_is_thrown_only_when_told(text: str) -> None:
    assert SWITCHES[text] in command(spec(text, gpus=4 if "parallel" in text else 1))
    assert SWITCHES[text] not in command(spec())


def test_drafts_are_one_json_value() -> None:
    text = "speculative: {method: eagle3, tokens: 3, model: org/head, draft_tensor: 1}"
    assert value_of(command(spec(text)), "--speculative-config") == {
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "model": "org/head",
        "draft_tensor_parallel_size": 1,
    }
    text = "speculative: {method: ngram, tokens: 4, lookup_tokens_min: 2, lookup_tokens_max: 5}"
    assert value_of(command(spec(text)), "--speculative-config") == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }


def test_adapters_that_are_there_from_the_start_are_modules() -> None:
    made = spec("adapters: {slots: 2, loaded: {law: /srv/law, med: /srv/med}, at_run_time: true}")
    argv = command(made)
    at = argv.index("--lora-modules")
    assert argv[at + 1 : at + 3] == ["law=/srv/law", "med=/srv/med"]
    launch = VLLM.launch(made, "127.0.0.1", [8000])
    assert launch.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    traits = VLLM.traits(made)
    assert (traits.adapters, traits.adapter_slots) == (("law", "med"), 2)
    assert VLLM.traits(spec()).adapter_slots == 0
    assert controls_of(made).capabilities(made) == {Capability.LORA}
    assert not controls_of(spec()).capabilities(spec())


def test_adapters_that_come_later_are_told_to_one_api_server() -> None:
    text = "adapters: {slots: 2, at_run_time: true}"
    both = f"{text}, parallel: {{data: 2}}"
    assert value_of(command(spec(both, gpus=2)), "--api-server-count") == "1"
    assert "--api-server-count" not in command(spec(text))
    assert "--api-server-count" not in command(spec("parallel: {data: 2}", gpus=2))


@pytest.mark.parametrize(
    ("connector", "role", "expected"),
    [
        ("nixl", "prefill", {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}),
        ("nixl_push", "decode", {"kv_connector": "NixlPushConnector", "kv_role": "kv_consumer",
                                 "kv_load_failure_policy": "recompute",
                                 "kv_connector_extra_config": {"push_registration_timeout": 30}}),
        ("mooncake", "both", {"kv_connector": "MooncakeConnector", "kv_role": "kv_both",
                              "kv_load_failure_policy": "recompute", "engine_id": "v"}),
    ],
)  # fmt: skip
def test_connectors_by_role(connector: str, role: str, expected: dict[str, str]) -> None:
    made = spec(f"kv_transfer: {{connector: {connector}}}", role=role)
    assert value_of(command(made), "--kv-transfer-config") == expected
    told = transfer_of(VLLM, made, [8000, 8001])
    assert told is not None
    assert told.connector == connector
    assert transfer_of(VLLM, spec(), [8000]) is None


def test_what_a_connector_is_told_beyond_its_name() -> None:
    text = "kv_transfer: {connector: nixl, lease_s: 60, on_failure: fail}"
    assert value_of(command(spec(text)), "--kv-transfer-config") == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": 60},
    }
    text = "kv_transfer: {connector: shared_folder, folder: /srv/kv}"
    config = value_of(command(spec(text)), "--kv-transfer-config")
    assert config["kv_connector_extra_config"] == {"shared_storage_path": "/srv/kv"}


def test_host_memory_beside_a_connector_goes_through_the_one_that_holds_both() -> None:
    """`--kv-offloading-size` would silently take the place of the connector."""
    made = spec("kv_transfer: {connector: nixl}, kv_offload: {host_gib: 2}", role="prefill")
    argv = command(made)
    assert not [word for word in argv if word.startswith("--kv-offloading")]
    config = value_of(argv, "--kv-transfer-config")
    assert config["kv_connector"] == "MultiConnector"
    first, second = config["kv_connector_extra_config"]["connectors"]
    assert (first["kv_connector"], first["kv_role"]) == ("NixlConnector", "kv_producer")
    assert second["kv_connector"] == "OffloadingConnector"
    assert second["kv_connector_extra_config"] == {"cpu_bytes_to_use": 2 * 2**30}
    assert VLLM.traits(made).kv_host_bytes == 2 * 2**30


def test_ports_count_up_with_the_ranks_and_never_meet() -> None:
    made = spec("parallel: {data: 2}, kv_transfer: {connector: nixl}", gpus=2)
    assert VLLM.ports_needed(made) == 1 + 2
    launch = VLLM.launch(made, "127.0.0.1", range(100, 103))
    side = int(launch.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    http = int(value_of(list(launch.argv), "--port"))
    assert sorted([http, *(side + rank for rank in range(2))]) == [100, 101, 102]


def test_ranks_tell_their_blocks_on_sockets_that_vllm_can_tell_apart() -> None:
    """By its `offset_endpoint_port`: a suffix where the name has `inproc`, else an end with an error."""
    both = value_of(command(spec("parallel: {data: 2}", gpus=2)), "--kv-events-config")
    alone = value_of(command(spec()), "--kv-events-config")
    for name in ("endpoint", "replay_endpoint"):
        assert "inproc" in both[name]
        assert "inproc" not in alone[name]
    assert both["endpoint"] != both["replay_endpoint"]


def test_what_ranks_leave_behind_is_cleared_away(tmp_path: Path) -> None:
    ours, other = tmp_path / "kv-inproc-h-1", tmp_path / "kv-inproc-h-11"
    paths = [ours, Path(f"{ours}_dp1"), Path(f"{ours}-replay"), Path(f"{ours}-replay_dp1")]
    for path in (*paths, other):
        path.touch()
    remove_sockets(KvEndpoints(events=f"ipc://{ours}", replay=f"ipc://{ours}-replay"))
    assert list(tmp_path.iterdir()) == [other]


def test_what_is_only_watched_is_not_taken_to_tell_its_blocks() -> None:
    watched = spec(attach="http://127.0.0.1:8000")
    assert VLLM.kv_endpoints(watched, "127.0.0.1", 8000) is None
    assert Feature.KV_EVENTS in VLLM.traits(watched).lacks
    assert Feature.KV_EVENTS not in VLLM.traits(spec()).lacks


def test_ranks_and_stages_are_declared() -> None:
    traits = VLLM.traits(spec("parallel: {data: 2, tensor: 2, pipeline: 2, experts: true}", gpus=8))
    assert (traits.gpus, traits.ranks, traits.pipeline, traits.expert_gpus) == (4, 2, 2, 8)
    assert traits.has_ranks
    alone = VLLM.traits(spec(gpus=4))
    assert (alone.gpus, alone.ranks, alone.has_ranks, alone.expert_gpus) == (4, 1, False, 0)


# ---------------------------------------------------------------- what contradicts itself


@pytest.mark.parametrize(
    ("text", "gpus", "role", "words"),
    [
        ("parallel: {tensor: 2, pipeline: 2}", 8, "both", "`gpus: 8`, but tensor 2 x pipeline 2"),
        ("parallel: {pipeline: 3}", 4, "both", "tensor 1 x pipeline 3"),
        ("parallel: {data: 1, experts: true}", 1, "both", "there is only one"),
        ("parallel: {pipeline: 2}", 2, "decode", "a decode engine over `nixl` can not be pipelined"),
        ("batch: {chunked_prefill: false, tokens_per_step: 512}, context_tokens_max: 1024", 1,
         "both", "must hold a whole prompt"),
        ("batch: {seats: 64, tokens_per_step: 32}", 1, "both", "raise the tokens or lower"),
        ("speculative: {method: eagle3, tokens: 2}", 1, "both", "needs a `speculative_model`"),
        ("speculative: {method: ngram, tokens: 2, model: m}", 1, "both", "takes no model"),
        ("speculative: {method: ngram}", 1, "both", "needs `speculative_tokens`"),
        ("speculative: {tokens: 2}", 1, "both", "without a `speculative_method`"),
        ("speculative: {method: guess, tokens: 2}", 1, "both", "no speculative method `guess`"),
        ("speculative: {method: mtp, lookup_tokens_max: 3}", 1, "both", "looks nothing up"),
        ("speculative: {method: ngram, tokens: 2, lookup_tokens_min: 5, lookup_tokens_max: 3}", 1,
         "both", "at least 5 and at most 3"),
        ("speculative: {method: suffix, draft_tensor: 2}", 1, "both", "no draft model to spread"),
        ("kv_transfer: {connector: shared_folder}", 1, "both", "and only with it"),
        ("kv_transfer: {connector: lmcache}", 1, "both", "no KV connector `lmcache`"),
        ("kv_transfer: {connector: mooncake}, parallel: {data: 2}", 2, "both", "by one id"),
        ("kv_transfer: {lease_s: 5}", 1, "both", "no `kv_connector` moves KV"),
        ("kv_transfer: {on_failure: fail}", 1, "both", "no `kv_connector` moves KV"),
        ("kv_offload: {backend: native}", 1, "both", "without `kv_offloading_size`"),
        ("prefix_cache: {enabled: false, hash: sha256}", 1, "both", "of no use"),
        ("prefix_cache: {enabled: false}, kv_offload: {host_gib: 1}", 1, "both", "of no use"),
        ("adapters: {rank_max: 8}", 1, "both", "without slots for adapters"),
        ("adapters: {slots: 2, rank_max: 9}", 1, "both", "vLLM takes 1, 8, 16"),
        ("adapters: {slots: 4, host_slots: 2}", 1, "both", "can not fill 4 slots"),
        ("adapters: {slots: 1, loaded: {m: /srv/m}}", 1, "both", "the name of its model"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_in_words(text: str, gpus: int, role: str, words: str) -> None:
    with pytest.raises(EngineError, match=words.replace("(", r"\(")):
        VLLM.check_settings(spec(text, gpus=gpus, role=role))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parallel: {tensr: 2}", "`parallel.tensr`; did you mean `tensor`?"),
        ("paralell: {tensor: 2}", "`paralell`; did you mean `parallel`?"),
        ("zebra: 1", "there is no setting `zebra`; there are: name, kind"),
        ("batch: {seats: 0}", "`batch.seats`: Expected `int` >= 1"),
        ("batch: {seats: many}", "`batch.seats`: Expected `int`"),
        ("batch: {order: lifo}", "`batch.order`: Invalid enum value 'lifo'"),
        ("batch: 3", "`batch`: Expected `object`"),
        ("kv_cache: {memory_ratio: 1.5}", "`kv_cache.memory_ratio`: Expected `float` <= 1"),
        ("eager: true, eager: false", "`eager` is there twice"),
    ],
)
def test_a_wrong_profile_is_refused_where_it_is_wrong(text: str, words: str) -> None:
    with pytest.raises(EngineError) as refused:
        profiles(text)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ["", "profiles", "profiles: {}", "- a", "profiles: []\nother: 1", "profiles: [3]", "a: [",
     "profiles: [{name: p}, {name: p}]", "profiles: [{name: 'a b'}]", "profiles: [{}]"],
)  # fmt: skip
def test_what_is_no_document_of_profiles_is_refused(text: str) -> None:
    with pytest.raises(EngineError, match="file"):
        parse_profiles(text, "file")


def test_kinds_refuse_what_they_do_not_know() -> None:
    found = profiles("kind: simulated, speculative: {method: ngram, tokens: 2}")
    with pytest.raises(
        EngineError, match=r"kind `simulated` have no setting `speculative\.method`"
    ):
        profile_options(found["p"].profile)
    with pytest.raises(EngineError, match="no engine kind `vlm`; did you mean `vllm`"):
        profile_options(profiles("kind: vlm")["p"].profile)
    other = EngineSpec(engine_id="s", kind="simulated", model="m", role="both", gpus=1, profile="p")
    with pytest.raises(EngineError, match="is for kind `vllm` and the engine is of kind"):
        with_profile(other, profiles("kind: vllm"))
    with pytest.raises(EngineError, match="no profile `q`; there are: p"):
        with_profile(msgspec.structs.replace(other, profile="q"), profiles("kind: vllm"))


def test_every_place_of_a_profile_is_known_to_vllm() -> None:
    assert set(VLLM.profile_options) == set(places())


def test_the_specs_own_options_stand_above_its_profile() -> None:
    made = spec("batch: {seats: 7}, context_tokens_max: 4096", max_num_seqs=9)
    argv = command(made)
    assert value_of(argv, "--max-num-seqs") == "9"
    assert value_of(argv, "--max-model-len") == "4096"
    assert made.profile == "p"


def test_every_profile_that_ships_can_be_started() -> None:
    shipped = built_in()
    assert len(shipped) >= 10
    for name, each in shipped.items():
        gpus = 1
        for place in ("parallel.tensor", "parallel.pipeline", "parallel.data"):
            gpus *= int(each.profile.settings().get(place, 1))
        made = EngineSpec(
            engine_id="e", kind=each.profile.kind, model="m", role="both", gpus=gpus, profile=name
        )
        kind_of(made).check_settings(with_profile(made, shipped))
        assert each.profile.about


# ---------------------------------------------------------------- at the agent


def test_a_nodes_engines_name_profiles_of_its_own_file(tmp_path: Path) -> None:
    own, engines = tmp_path / "profiles.yaml", tmp_path / "engines.yaml"
    own.write_text("profiles: [{name: mine, batch: {seats: 3}}]")
    engines.write_text(
        "[{engine_id: e, kind: vllm, model: m, role: both, gpus: 1, profile: mine},"
        " {engine_id: f, kind: vllm, model: m, role: both, gpus: 1, profile: plain}]"
    )
    first, second = read_engines(engines, known_profiles(own))
    assert first.options == {"max_num_seqs": 3}
    assert second.options["prefix_caching_hash_algo"] == "sha256_cbor"
    with pytest.raises(SettingsError, match="no profile `mine`"):
        read_engines(engines, known_profiles(None))
    own.write_text("profiles: [{name: plain}]")
    with pytest.raises(SettingsError, match="profile `plain` is built in"):
        known_profiles(own)


@pytest.mark.parametrize(
    ("attach", "words"),
    [
        ("https://127.0.0.1:8000", "it must be like"),
        ("http://127.0.0.1", "names no port"),
        ("http://u:p@127.0.0.1:8000", "can not carry a password"),
        ("http://127.0.0.1:8000/v1", "it must be like"),
    ],
)
def test_only_a_plain_server_can_be_attached(attach: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        VLLM.check(spec(attach=attach))


def test_an_attached_server_is_on_the_nodes_own_address() -> None:
    made = spec(attach="http://127.0.0.1:8123", executable="no-such-program")
    VLLM.check(made)
    assert VLLM.ports_given(made, "127.0.0.1") == [8123]
    assert VLLM.ports_given(spec(), "127.0.0.1") == []
    with pytest.raises(EngineError, match=r"names the host `127\.0\.0\.1`"):
        VLLM.ports_given(made, "10.0.0.7")
    assert "attach" in VLLM.local_options
