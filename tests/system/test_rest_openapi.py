"""The API is as its OpenAPI document says: schemathesis tries a whole Headway, with every check, also in sequences.

`REST_EXAMPLES` is how many examples of each operation are made, `REST_COVERAGE` (1) adds every boundary of every
parameter, `REST_SEED` makes the run a new one; the default is small and always the same.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio.to_thread
import pytest

from cli.processes import LocalCluster
from controlplane.store.cluster import parse_cluster
from tests.ports import free_port

from .conftest import CLUSTER, check_invariants

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1_200)]

ROOT = Path(__file__).parents[2]
CONFIGURATION = Path(__file__).with_name("schemathesis.toml")
EXAMPLES = os.environ.get("REST_EXAMPLES", "1")
RUN_S_MAX = 1_100
TOLD_CHARACTERS_MAX = 6_000


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def tried(anyio_backend: str) -> AsyncIterator[LocalCluster]:
    """A cluster of its own: engines are stopped, tenants disabled and keys revoked in it."""
    folder = Path(tempfile.mkdtemp(prefix="headway-test-"))
    folder.chmod(0o755)
    local = LocalCluster(
        data_dir=folder / "cluster", port=free_port(), cluster=parse_cluster(CLUSTER)
    )
    await local.start()
    try:
        yield local
    finally:
        await local.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def test_the_api_is_as_its_document_says(tried: LocalCluster, tmp_path: Path) -> None:
    coverage = os.environ.get("REST_COVERAGE", "")
    phases = "examples,coverage,fuzzing,stateful" if coverage else "examples,fuzzing,stateful"
    seed = os.environ.get("REST_SEED", "")
    configuration = CONFIGURATION.read_text()
    if seed:
        configuration = configuration.replace("deterministic = true", "deterministic = false")
    (tmp_path / CONFIGURATION.name).write_text(configuration)
    arguments = [
        *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
        *("--config-file", str(tmp_path / CONFIGURATION.name)),
        *("run", f"{tried.url}/openapi.json", "--checks", "all", "--no-color"),
        *("--phases", phases, "--max-examples", EXAMPLES),
        *(("--seed", seed) if seed else ()),
    ]
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "tests.system.rest_hooks",
        "OPERATOR_KEY": tried.operator_key,
        "OWN_KEY_ID": tried.operator_key.split("-")[2],
        "TENANT_KEY": tried.tenant_keys["acme"],
        "PYTHONPATH": str(ROOT),
        "NO_PROXY": "127.0.0.1",
    }
    ran = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            arguments, env=environment, cwd=tmp_path, capture_output=True, text=True,
            timeout=RUN_S_MAX, check=False,
        )
    )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-TOLD_CHARACTERS_MAX:]
    assert "No issues found" in ran.stdout or "passed" in ran.stdout, ran.stdout[-500:]
    await check_invariants(tried)
