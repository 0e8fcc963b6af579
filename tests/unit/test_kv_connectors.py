"""KV connectors of vLLM: the flags of each, and what the engine then declares."""

import json
from typing import Any

import pytest

from dataplane.engines.base import EngineError
from dataplane.engines.kv_connectors import transfer_of
from dataplane.engines.simulated.adapter import SimulatedKind
from dataplane.engines.vllm import VllmKind
from dataplane.protocol.messages import EngineSpec, KvTransfer

KIND = VllmKind()
PORTS = [8000, 5600]


def spec(role: str = "prefill", gpus: int = 1, **options: Any) -> EngineSpec:
    given = {"executable": "true", **options}
    return EngineSpec(engine_id="e1", kind="vllm", model="m", role=role, gpus=gpus, options=given)


def config_of(asked: EngineSpec) -> tuple[dict[str, Any], dict[str, str]]:
    launch = KIND.launch(asked, "127.0.0.1", PORTS)
    argv = list(launch.argv)
    return json.loads(argv[argv.index("--kv-transfer-config") + 1]), dict(launch.environment)


def test_half_a_role_has_nixl() -> None:
    config, environment = config_of(spec("prefill"))
    assert config == {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    config, _ = config_of(spec("decode", kv_lease_s=60))
    assert config == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 60},
    }
    assert transfer_of(KIND, spec("decode"), PORTS) == KvTransfer(connector="nixl", lease_s=30.0)


def test_a_whole_role_moves_kv_only_when_told_to() -> None:
    assert "--kv-transfer-config" not in KIND.launch(spec("both"), "127.0.0.1", [8000]).argv
    assert KIND.ports_needed(spec("both")) == 1
    assert transfer_of(KIND, spec("both"), [8000]) is None
    both = spec("both", kv_connector="nixl")
    assert config_of(both)[0]["kv_role"] == "kv_both"
    assert KIND.ports_needed(both) == 2
    assert transfer_of(KIND, both, PORTS) is not None


def test_a_push_that_never_comes_is_not_waited_for_longer_than_the_lease() -> None:
    config, _ = config_of(spec("decode", kv_connector="nixl_push"))
    assert config["kv_connector"] == "NixlPushConnector"
    assert config["kv_connector_extra_config"] == {"push_registration_timeout": 30}


def test_mooncake_is_found_by_engine_and_port() -> None:
    asked = spec("prefill", kv_connector="mooncake")
    config, environment = config_of(asked)
    assert (config["kv_connector"], config["engine_id"]) == ("MooncakeConnector", "e1")
    assert environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "5600"
    assert transfer_of(KIND, asked, PORTS) == KvTransfer(
        connector="mooncake", lease_s=480.0, engine_id="e1", bootstrap_port=5600
    )


def test_a_shared_folder_is_a_domain_of_its_own() -> None:
    asked = spec("prefill", kv_connector="shared_folder", kv_shared_folder="/kv")
    config, _ = config_of(asked)
    assert config["kv_connector"] == "ExampleConnector"
    assert config["kv_connector_extra_config"] == {"shared_storage_path": "/kv"}
    assert KIND.ports_needed(asked) == 1
    found = transfer_of(KIND, asked, [8000])
    assert found is not None
    assert (found.connector, found.domain) == ("shared_folder", "/kv")
    # A command from afar may not say where a node writes.
    assert "kv_shared_folder" in KIND.local_options


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (spec(kv_connector="pigeon"), "no KV connector `pigeon`"),
        (spec(kv_connector="shared_folder"), "kv_shared_folder"),
        (spec(kv_shared_folder="/kv"), "kv_shared_folder"),
        (
            spec(gpus=2, kv_connector="shared_folder", kv_shared_folder="/kv"),
            "one GPU",
        ),
        (spec(kv_load_failure_policy="hope"), "recompute"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(asked: EngineSpec, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        KIND.check(asked)


def test_an_engine_without_ports_declares_nothing() -> None:
    assert transfer_of(KIND, spec("prefill"), []) is None
    assert transfer_of(object(), spec("prefill"), PORTS) is None


def test_simulated_engines_move_kv_unless_told_not_to() -> None:
    kind = SimulatedKind()
    plain = EngineSpec(engine_id="s", kind="simulated", model="m", role="both", gpus=1)
    assert transfer_of(kind, plain, [1]) == KvTransfer(connector="nixl", lease_s=30.0)
    alone = EngineSpec(
        engine_id="s", kind="simulated", model="m", role="both", gpus=1,
        options={"kv_connector": ""},
    )  # fmt: skip
    assert transfer_of(kind, alone, [1]) is None
