"""What an agent says of engines of several ranks, of adapters, and of what an engine does not tell."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataplane.agent.disk import AgentDisk
from dataplane.agent.keeper import EngineKeeper, Refusal
from dataplane.agent.probe import Probe
from dataplane.agent.settings import AgentSettings
from dataplane.agent.supervisor import Supervisor
from dataplane.agent.telemetry import busy_of
from dataplane.engines.base import EngineCapacity, EngineError
from dataplane.engines.controls import Call, controls_of
from dataplane.engines.exposition import read_adapters, read_telemetry
from dataplane.engines.kinds import kind_of, with_profile
from dataplane.engines.llama_cpp import LlamaCppKind
from dataplane.engines.profiles import parse_profiles
from dataplane.protocol.messages import EngineSpec, EngineState, EngineTelemetry, Feature

SCRAPE = b"""vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 7.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 99.0
"""
LLAMA = b"""# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 45
llamacpp:prompt_tokens_cached_total 12
llamacpp:tokens_predicted_total 18
llamacpp:prompt_tokens_seconds 5391.8
llamacpp:requests_processing 2
llamacpp:requests_deferred 1
llamacpp:n_decode_total 21
"""


def spec(kind: str = "vllm", gpus: int = 2, **options: Any) -> EngineSpec:
    return EngineSpec(
        engine_id="v", kind=kind, model="m", role="both", gpus=gpus, options=options, profile="p"
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[AgentDisk]:
    disk = AgentDisk(tmp_path)
    yield disk
    disk.close()


def keeper(disk: AgentDisk, made: EngineSpec, **changes: Any) -> EngineKeeper:
    told: dict[str, Any] = {
        "host": "127.0.0.1", "owner": "o", "disk": disk, "probe": Probe("127.0.0.1"),
        "stop_grace_s": 1.0, "lent": lambda _: (True, 0), "stuck_s": 5.0,
        "on_change": lambda _: None, "on_crash_loop": lambda *_: None,
    }  # fmt: skip
    kept = EngineKeeper(made, kind_of(made), controls_of(made), **{**told, **changes})
    kept.capacity = EngineCapacity(
        seats=16, kv_tokens=9_600, block_tokens=32, context_tokens_max=4_096
    )
    return kept


def test_each_rank_is_declared_with_its_part(disk: AgentDisk) -> None:
    kept = keeper(disk, spec(data_parallel_size=2))
    first, second = kept.declared()
    assert (first.engine_id, second.engine_id) == ("v/0", "v/1")
    assert (first.rank, second.rank) == (0, 1)
    assert {(each.gpus, each.seats, each.kv_tokens) for each in (first, second)} == {(1, 8, 4_800)}
    assert kept.names() == ["v/0", "v/1"]
    alone = keeper(disk, spec()).declared()
    assert [(each.engine_id, each.rank, each.seats, each.gpus) for each in alone] == [
        ("v", -1, 16, 2)
    ]
    assert alone[0].profile == "p"


def test_each_rank_is_reported_by_its_own_numbers(disk: AgentDisk) -> None:
    del disk
    whole, first, second = (
        read_telemetry("v", SCRAPE), read_telemetry("v/0", SCRAPE, 0),
        read_telemetry("v/1", SCRAPE, 1),
    )  # fmt: skip
    assert (whole.running, first.running, second.running) == (4, 3, 1)
    assert (whole.waiting, first.waiting, second.waiting) == (2, 2, 0)
    assert (whole.kv_used_ratio, first.kv_used_ratio, second.kv_used_ratio) == (0.375, 0.5, 0.25)
    assert (first.drafts, first.draft_tokens_accepted) == (10, 7)
    assert (second.drafts, second.draft_tokens_accepted) == (30, 50)
    with pytest.raises(EngineError, match="metrics lack"):
        read_telemetry("v/2", SCRAPE, 2)


def test_a_rank_of_several_servers_that_had_no_call_yet_is_idle() -> None:
    config = b'vllm:cache_config_info{block_size="32",engine="%d",num_gpu_blocks="9"} 1.0\n'
    told = read_telemetry("v/2", SCRAPE + config % 2, 2)
    assert (told.running, told.waiting, told.kv_used_ratio) == (0, 0, 0.0)
    assert read_telemetry("v/1", SCRAPE + config % 1, 1).running == 1
    # Another rank's says nothing of it, and one that tells some of what is needed tells all.
    some = config % 2 + b'vllm:num_requests_running{engine="2"} 1.0\n'
    for text in (SCRAPE + config % 12, some):
        with pytest.raises(EngineError, match="metrics lack"):
            read_telemetry("v/2", text, 2)


def test_commands_name_engines_and_not_ranks(disk: AgentDisk, tmp_path: Path) -> None:
    settings = AgentSettings(node_id="n", nats_url="nats://x", data_dir=tmp_path)
    supervisor = Supervisor(settings, disk, lambda _: None)
    supervisor.keepers["v"] = keeper(disk, spec(data_parallel_size=2))
    assert [facts.engine_id for facts in supervisor.facts()] == ["v/0", "v/1"]
    with pytest.raises(EngineError, match="`v/1` is one rank of `v`; name the engine"):
        supervisor._get("v/1")
    with pytest.raises(EngineError, match="there is no engine `w/1`"):
        supervisor._get("w/1")


def test_an_engine_is_closed_when_all_its_ranks_are(disk: AgentDisk) -> None:
    lent = {"v/0": (True, 0), "v/1": (True, 0)}
    kept = keeper(disk, spec(data_parallel_size=2), lent=lent.__getitem__)
    assert kept._lent_now() == (True, 0)
    lent["v/1"] = (False, 3)
    assert kept._lent_now() == (False, 3)
    lent["v/0"] = (True, 4)
    assert kept._lent_now() == (False, 7)


def test_the_first_ranks_blocks_are_told_and_those_of_the_others_are_not(disk: AgentDisk) -> None:
    first, second = keeper(disk, spec(data_parallel_size=2)).declared()
    assert Feature.KV_EVENTS not in first.lacks
    assert Feature.KV_EVENTS in second.lacks


@pytest.mark.parametrize(("calls", "tokens"), [(0, 0), (2, 1_200), (16, 9_600), (99, 9_600)])
def test_what_an_engine_does_not_tell_is_counted_by_seats(
    disk: AgentDisk, calls: int, tokens: int
) -> None:
    """16 seats share 9,600 tokens: 600 for each call, and never more than there are."""
    [facts] = keeper(disk, spec()).declared()
    told = EngineTelemetry(engine_id="v", running=calls, waiting=0, kv_used_ratio=None)
    assert busy_of(told, facts) == (calls, tokens)
    told = EngineTelemetry(engine_id="v", running=1, waiting=2, kv_used_ratio=0.5)
    assert busy_of(told, facts) == (3, 4_800)


def test_a_command_uses_profiles_of_the_node_and_nothing_local_besides(
    disk: AgentDisk, tmp_path: Path
) -> None:
    known = parse_profiles(
        "profiles: [{name: p, kv_transfer: {connector: shared_folder, folder: /srv/kv}}]", "file"
    )
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    own = spec(gpus=1, executable=str(program))
    settings = AgentSettings(
        node_id="n", nats_url="nats://x", data_dir=tmp_path, profiles=known, engines=(own,)
    )
    supervisor = Supervisor(settings, disk, lambda _: None)
    supervisor._check_command(own)
    # What its profile was worked into may be told again, as when its role is changed.
    supervisor._check_command(with_profile(own, known))
    for options, words in (
        ({"kv_shared_folder": "/etc"}, "can not set option `kv_shared_folder`"),
        ({"attach": "http://127.0.0.1:1"}, "can not set option `attach`"),
        ({"executable": "/bin/sh"}, "can not set option `executable`"),
    ):
        with pytest.raises(Refusal, match=words):
            supervisor._check_command(spec(gpus=1, **{"executable": str(program), **options}))
    with pytest.raises(Refusal, match="no profile `q`"):
        supervisor._check_command(msgspec.structs.replace(own, profile="q"))


class Adapting(Probe):
    """A server that loads what it is told, and lists it."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1")
        self.loaded: list[str] = []

    async def get(self, port: int, path: str, timeout_s: float) -> bytes:
        assert (port, path, timeout_s > 0) == (0, "/v1/models", True)
        cards = [{"id": name, "parent": "m"} for name in self.loaded]
        return msgspec.json.encode({"data": [{"id": "m", "parent": None}, *cards]})

    async def call(self, port: int, call: Call, timeout_s: float) -> bytes:
        assert (port, timeout_s > 0) == (0, True)
        told = msgspec.json.decode(call.body)
        if call.path == "/v1/load_lora_adapter":
            self.loaded.append(told["lora_name"])
        else:
            self.loaded.remove(told["lora_name"])
        return b""


async def test_what_a_command_loads_is_known_when_the_command_is_done(disk: AgentDisk) -> None:
    told: list[frozenset[str]] = []
    made = spec(gpus=1, max_loras=1, lora_at_run_time=True)
    kept = keeper(disk, made, probe=Adapting(), on_change=lambda one: told.append(one.adapters))
    kept.state = EngineState.SERVING
    await kept.load_adapter("law", "/srv/law")
    assert told == [{"law"}]
    [facts] = kept.declared()
    assert (facts.adapters, facts.adapter_slots) == (["law"], 1)
    await kept.unload_adapter("law")
    assert told == [{"law"}, frozenset()]


def test_adapters_are_what_the_model_list_gives_a_parent() -> None:
    models = (
        b'{"data":[{"id":"m","parent":null,"max_model_len":4096},{"id":"law","parent":"m"},'
        b'{"id":"med","parent":"m"},{"id":"other"}]}'
    )
    assert read_adapters("v", models) == {"law", "med"}
    with pytest.raises(EngineError, match="unreadable"):
        read_adapters("v", b"[]")


def test_llama_cpp_tells_calls_and_tokens_and_no_more() -> None:
    told = LlamaCppKind().telemetry("l", LLAMA)
    assert (told.running, told.waiting, told.kv_used_ratio) == (2, 1, None)
    assert (told.prompt_tokens, told.generation_tokens) == (57, 18)
    assert (told.prefix_queries_tokens, told.prefix_hits_tokens) == (57, 12)
    assert (told.ttft_count, told.itl_count, told.steps) == (0, 0, 21)
    for text in (b"", LLAMA.replace(b"requests_deferred", b"x"), LLAMA.replace(b" 2\n", b" two\n")):
        with pytest.raises(EngineError):
            LlamaCppKind().telemetry("l", text)


def test_llama_cpp_keeps_prompts_apart_unless_told() -> None:
    kind = LlamaCppKind()
    made = spec("llama_cpp", 1, model_path="/m.gguf", seats=3, context_tokens_max=1_000)
    argv = list(kind.launch(made, "127.0.0.1", [8000]).argv)
    assert argv[argv.index("--ctx-size") + 1] == "3000"
    assert argv[argv.index("--parallel") + 1] == "3"
    assert "--no-cache-prompt" in argv
    assert "--no-slots" in argv
    assert Feature.PREFIX_CACHE in kind.traits(made).lacks
    shared = spec("llama_cpp", 1, enable_prefix_caching=True)
    assert "--no-cache-prompt" not in kind.launch(shared, "127.0.0.1", [8000]).argv
    assert Feature.PREFIX_CACHE not in kind.traits(shared).lacks
    assert Feature.CACHE_SALT in kind.traits(shared).lacks


async def test_llama_cpp_tells_the_context_of_one_seat() -> None:
    made = spec("llama_cpp", 1, seats=4, context_tokens_max=1_000)

    async def fetch(path: str) -> bytes:
        assert path == "/v1/models"
        return b'{"data":[{"id":"m","meta":{"n_ctx":1024}}]}'

    capacity = await LlamaCppKind().capacity(made, fetch)
    assert (capacity.seats, capacity.kv_tokens, capacity.context_tokens_max) == (4, 4_096, 1_024)

    async def other(path: str) -> bytes:
        del path
        return b'{"data":[{"id":"n"}]}'

    with pytest.raises(EngineError, match="it serves n, not `m`"):
        await LlamaCppKind().capacity(made, other)
