"""Adapters as models: declared, listed, priced, kept apart in the prefix view, placed as their model."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from controlplane.domain.catalog import Model
from controlplane.domain.ids import ModelName
from controlplane.runtime.call import Call, monotonic_ms
from controlplane.runtime.intake import Prepared
from controlplane.store.catalog import load_catalog
from controlplane.store.session import make_engine
from dataplane.protocol.messages import EngineFacts, EngineState, Hello
from tests.integration.surfaces import Surfaces, running_surfaces

LAW = {"name": "llama-law", "adapter_of": "llama-3.1-8b", "path": "/srv/law"}
MED = {**LAW, "name": "llama-med", "path": "/srv/med", "price_completion_micro_usd_per_mtok": 7}


@pytest.fixture
async def surfaces(clean_database_url: str, nats_control_url: str) -> AsyncIterator[Surfaces]:
    async with running_surfaces(clean_database_url, nats_control_url) as running:
        response = await running.operate("POST", "cluster", {"adapters": [LAW, MED]})
        assert response.is_success, response.text
        assert response.json()["adapters"] == 2
        engine = make_engine(clean_database_url)
        running.replica.fleet.use_catalog(await load_catalog(engine))
        await engine.dispose()
        yield running


def known(surfaces: Surfaces, name: str) -> Model:
    model = surfaces.replica.gate.knows_model(name)
    assert model is not None
    return model


async def test_an_adapter_has_its_models_sizes_and_its_own_prices(surfaces: Surfaces) -> None:
    base, law, med = (known(surfaces, name) for name in ("llama-3.1-8b", "llama-law", "llama-med"))
    assert (law.base, law.adapter_of, law.adapter_path) == (base.name, base.name, "/srv/law")
    assert (base.base, base.adapter_of) == (base.name, None)
    assert law.context_tokens_max == base.context_tokens_max
    used = {"prompt": 10_000_000, "cached": 0, "completion": 1_000_000}
    assert law.cost_micro_usd(**used) == base.cost_micro_usd(**used)
    prompt = base.cost_micro_usd(**{**used, "completion": 0})
    assert med.cost_micro_usd(**used) == prompt + 7
    # Plans are made of models; an adapter is none.
    assert set(surfaces.replica.fleet.catalog.models) == {"llama-3.1-8b", "llama-3.3-70b"}


async def test_tenants_and_operators_see_it_as_a_model(surfaces: Surfaces) -> None:
    told = (await surfaces.call("GET", "/v1/models", surfaces.tenants["aurora"])).json()
    assert {"llama-law", "llama-3.1-8b"} <= {model["id"] for model in told["data"]}
    listed = (await surfaces.operate("GET", "models?limit=500")).json()["data"]
    by_name = {model["name"]: model for model in listed}
    assert by_name["llama-law"]["adapter_of"] == "llama-3.1-8b"
    assert by_name["llama-3.1-8b"]["adapter_of"] is None


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({**LAW, "adapter_of": "no-such-model"}, "declare it first"),
        ({**LAW, "name": "llama-3.3-70b"}, "is a model and can not be an adapter too"),
        ({**LAW, "path": ""}, "path"),
        ({**LAW, "adapter_off": "x"}, "adapter_off"),
        ({**LAW, "name": "llama-vet", "adapter_of": "llama-law"}, "declare it first"),
    ],
)
async def test_what_can_not_be_an_adapter_is_refused(
    surfaces: Surfaces, adapter: dict[str, Any], words: str
) -> None:
    before = (await surfaces.operate("GET", "models?limit=500")).json()
    refused = await surfaces.operate("POST", "cluster", {"adapters": [adapter]})
    assert refused.status_code in {400, 422}
    assert words in refused.text
    assert (await surfaces.operate("GET", "models?limit=500")).json() == before


async def prepared(surfaces: Surfaces, model: str, text: bytes) -> Prepared:
    gate = surfaces.replica.gate
    principal = await gate.authenticate(surfaces.tenants["aurora"].encode())
    assert principal is not None
    made = await gate._intake.prepare(
        Call(
            principal=principal, endpoint="chat", model=model, is_stream=False,
            prompt_bytes=len(text), prefix_bytes=text, tools_digest=0,
            completion_tokens_max=50, n=1, workflow=None, step=None, session=None,
            deadline_ms=None, completion_tokens_hint=None, priority_hint=None, client_retries=0,
            is_single_engine=False, received_ms=monotonic_ms(),
        )
    )  # fmt: skip
    assert isinstance(made, Prepared)
    return made


async def test_a_call_is_placed_as_its_model_and_its_prefix_is_its_own(surfaces: Surfaces) -> None:
    text = b'[{"role":"user","content":"' + b"why is that so, and since when? " * 300 + b'"}'
    made = {
        name: await prepared(surfaces, name, text)
        for name in ("llama-3.1-8b", "llama-law", "llama-med")
    }
    requests = {name: each.ticket.request for name, each in made.items()}
    assert {request.model for request in requests.values()} == {"llama-3.1-8b"}
    assert [request.adapter for request in requests.values()] == ["", "llama-law", "llama-med"]
    assert all(request.prefix for request in requests.values())
    digests = [set(request.prefix) for request in requests.values()]
    assert not digests[0] & digests[1]
    assert not digests[1] & digests[2]
    # The engine is asked for the adapter, and money is counted by its name.
    assert made["llama-law"].ticket.model.name == "llama-law"


async def test_only_engines_that_have_it_are_asked(surfaces: Surfaces) -> None:
    base: dict[str, Any] = {
        "model": "llama-3.1-8b", "role": "both", "port": 9000, "kind": "vllm",
        "state": EngineState.SERVING, "gpus": 1, "seats": 8, "kv_tokens": 100_000,
        "block_tokens": 16, "context_tokens_max": 32_768, "started_ms": 1, "adapter_slots": 2,
    }  # fmt: skip
    fleet = surfaces.replica.fleet
    told = [
        EngineFacts(engine_id="a", **base),
        EngineFacts(engine_id="b", **base, adapters=["llama-law"]),
    ]
    assert fleet.hello(Hello(node_id="us-l40s", agent_epoch=1, version="0", engines=told), 1.0)
    rows = {row.engine_id: row for row in fleet.rows_for(ModelName("llama-3.1-8b"))}
    assert (rows["a"].adapters, rows["b"].adapters) == (frozenset(), {"llama-law"})
    told[0] = EngineFacts(engine_id="a", **base, adapters=["llama-law", "llama-med"])
    assert fleet.hello(Hello(node_id="us-l40s", agent_epoch=1, version="0", engines=told), 2.0)
    assert rows["a"].adapters == {"llama-law", "llama-med"}
