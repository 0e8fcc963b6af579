"""The fleet under test: four slow simulated engines on two nodes, sized so that two cores carry them.

At real speed an engine computes a step of its batch in 25 ms and up, so tens of calls a second
saturate the fleet while the replica and its callers are nearly idle. Contexts are large for the KV cache
and expensive to compute again, as they are for agents on real GPUs.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import yaml

from cli.processes import LOG_FOLDER, LocalCluster
from controlplane.domain.errors import ConfigurationError
from controlplane.store.cluster import ClusterDocument, parse_cluster
from dataplane.engines.simulated.options import SimulatedOptions
from dataplane.engines.simulated.roofline import StepTimes, step_times
from policies import load as policy_files
from tests.ports import free_port

MODEL = "lab"
NODES = ("n1", "n2")
ENGINES_PER_NODE = 2
KV_TOKENS = 32_768
CONTEXT_TOKENS_MAX = 8_192
ENGINE_SEATS = 64
START_S_MAX = 60.0
FAULT_S_MAX = 5.0
LOG_LINES_TOLD = 15
# Hardware of the catalogue: the replica predicts with what the engines are built from.
_GPU = {"hbm_bytes": 48_000_000_000, "bandwidth_bytes_per_s": 1.0e12, "flops_per_s": 1.9e14}
_MODEL = {
    "parameters": 18_000_000_000,
    "layers": 64,
    "hidden_size": 6_144,
    "weights_bytes": 18_700_000_000,
    "kv_bytes_per_token": 800_000,
    "context_tokens_max": CONTEXT_TOKENS_MAX,
    "load_ms": 500,
}
# Sticky first come, first served: arrivals in order, engines take whatever comes, nobody is refused for load.
BASELINE_ADMISSION = {
    "kind": "admission",
    "version": 1,
    "order": "arrival",
    "is_shedding": False,
    "is_bounding": False,
}


def document(tenants: Mapping[str, str]) -> ClusterDocument:
    """The cluster with these tenants, by id, and their classes."""
    slo = {"ttft_ms_max": 3_000, "tpot_ms_max": 300, "e2e_ms_max": 60_000}
    content = {
        "regions": ["lab"],
        "gpu_types": [
            {
                "name": "slow",
                **_GPU,
                "price_micro_usd_per_hour": 1_000_000,
                "price_source": "laboratory",
                "price_date": "2026-11-01",
            }
        ],
        "models": [
            {
                "name": MODEL,
                **_MODEL,
                "price_prompt_micro_usd_per_mtok": 200_000,
                "price_cached_micro_usd_per_mtok": 50_000,
                "price_completion_micro_usd_per_mtok": 600_000,
            }
        ],
        "slo_classes": [
            {"name": "high", **slo, "value_micro_usd": 40_000, "late_micro_usd_per_s": 2_000},
            {"name": "low", **slo, "value_micro_usd": 10_000, "late_micro_usd_per_s": 500},
        ],
        "tenants": [
            {
                "id": tenant,
                "name": tenant,
                "tenant_class": tenant_class,
                "slo_class": "high" if tenant_class == "gold" else "low",
                "budget_usd": 1_000_000.0,
            }
            for tenant, tenant_class in tenants.items()
        ],
        "nodes": [
            {
                "id": node,
                "region": "lab",
                "gpu_type": "slow",
                "gpus": ENGINES_PER_NODE,
                "address": "127.0.0.1",
                "engines": [
                    {
                        "engine_id": f"{node}-{number}",
                        "kind": "simulated",
                        "model": MODEL,
                        "role": "both",
                        "gpus": 1,
                        "options": {
                            "kv_tokens": KV_TOKENS,
                            "max_num_seqs": ENGINE_SEATS,
                            "allow_faults": True,
                        },
                    }
                    for number in range(ENGINES_PER_NODE)
                ],
            }
            for node in NODES
        ],
    }
    return parse_cluster(yaml.safe_dump(content))


def engine_times() -> StepTimes:
    """What a step of one engine takes."""
    options = SimulatedOptions(**_GPU, **_MODEL, kv_tokens=KV_TOKENS, max_num_seqs=ENGINE_SEATS)
    return step_times(options, gpus=1)


class LabCluster(LocalCluster):
    """A local cluster that runs a policy folder of its own, in a folder that goes with it."""

    def __init__(self, *, folder: Path, tenants: Mapping[str, str], policies: Path) -> None:
        super().__init__(
            data_dir=folder / "data",
            port=free_port(),
            cluster=document(tenants),
            ready_s_max=START_S_MAX,
        )
        self._policies = policies
        # Stores of its own, whatever the environment names.
        self.database_url = self.nats_url = ""

    def serve_environment(self) -> dict[str, str]:
        return {**super().serve_environment(), "HEADWAY_POLICIES_PATH": str(self._policies)}

    def operator_client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=f"{self.url}/operator/v1/",
            headers={"authorization": f"Bearer {self.operator_key}"},
            timeout=10.0,
            trust_env=False,
        )

    async def engines(self) -> list[dict[str, Any]]:
        async with self.operator_client() as api:
            response = await api.get("engines", params={"limit": 500})
            response.raise_for_status()
            rows: list[dict[str, Any]] = response.json()["data"]
            return rows

    async def fault(self, **faults: float) -> None:
        """Give every engine these faults and no others."""
        ports = [engine["port"] for engine in await self.engines()]
        async with httpx2.AsyncClient(timeout=FAULT_S_MAX, trust_env=False) as http:
            for response in await asyncio.gather(
                *(http.post(f"http://127.0.0.1:{port}/fault", json=faults) for port in ports)
            ):
                response.raise_for_status()

    async def cordon(self, node: str, *, is_cordoned: bool) -> None:
        async with self.operator_client() as api:
            action = "cordon" if is_cordoned else "uncordon"
            (await api.post(f"nodes/{node}/{action}")).raise_for_status()


def write_policies(folder: Path, admission: Mapping[str, object] | None) -> Path:
    """The shipped bundle in `folder`, with another `admission` document when one is given."""
    shipped = Path(policy_files.__file__).parent / "default"
    shutil.copytree(shipped, folder)
    if admission is not None:
        (folder / "admission.yaml").write_text(yaml.safe_dump(dict(admission)))
    return folder


def log_tails(cluster: LabCluster) -> str:
    """The last lines of every process, for whoever asks why a cluster did not start."""
    tails = []
    for path in sorted((cluster.data_dir / LOG_FOLDER).glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-LOG_LINES_TOLD:]
        tails.append("\n".join([f"--- {path.name}", *lines]))
    return "\n".join(tails)


@asynccontextmanager
async def running(
    tenants: Mapping[str, str], *, admission: Mapping[str, object] | None = None
) -> AsyncIterator[LabCluster]:
    """A cluster of its own ports and folder, ended and removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="headway-lab-"))
    # PostgreSQL's own account must be able to reach it.
    folder.chmod(0o755)
    cluster = LabCluster(
        folder=folder, tenants=tenants, policies=write_policies(folder / "policies", admission)
    )
    try:
        try:
            await cluster.start()
        except ConfigurationError as error:
            raise RuntimeError(f"{error}\n{log_tails(cluster)}") from error
        try:
            yield cluster
        finally:
            await cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
