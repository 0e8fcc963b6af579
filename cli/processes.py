"""A whole Headway on one machine: stores, one control-plane replica, an agent per node, kept alive.

`headway up` stays with it, `headway demo` and the fault tests use it as a library.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

from cli.client import OPERATOR_FILE, write_connection
from controlplane.domain.catalog import GpuType, Model, OperatorRole
from controlplane.domain.errors import ConfigurationError
from controlplane.domain.ids import TenantId
from controlplane.embedded.lock import FolderLock
from controlplane.embedded.nats import EmbeddedNats, NatsUser, agent_user, control_user
from controlplane.embedded.postgres import EmbeddedPostgres
from controlplane.embedded.process import kept_secret, write_private
from controlplane.embedded.supervise import Child, Program, keep_alive
from controlplane.scheduler.perf_model import flops_per_s
from controlplane.store import keys, migrate
from controlplane.store.catalog import apply_cluster
from controlplane.store.cluster import ClusterDocument, EngineDocument, NodeDocument
from controlplane.store.session import make_engine

POSTGRES_FOLDER = "postgres"
NATS_FOLDER = "nats"
LOG_FOLDER = "logs"
AGENTS_FOLDER = "agents"
KEYS_FILE = "keys.json"
SIMULATED = "simulated"
HOST = "127.0.0.1"
READY_S_MAX = 60.0
PROBE_PAUSE_S = 0.1
PROBE_S_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a child: a line for people."""

    child: str
    text: str


class LocalCluster:
    """Started and stopped once. Only one runs in a data folder at a time."""

    def __init__(
        self,
        *,
        data_dir: Path,
        port: int,
        cluster: ClusterDocument,
        on_event: Callable[[Event], None] = lambda _: None,
        ready_s_max: float = READY_S_MAX,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.cluster = cluster
        self.url = f"http://{HOST}:{port}"
        self.operator_key = ""
        self.tenant_keys: dict[str, str] = {}
        self.database_url = os.environ.get("DATABASE_URL", "")
        self.nats_url = os.environ.get("NATS_URL", "")
        self._port = port
        self._on_event = on_event
        self._ready_s_max = ready_s_max
        self._lock = FolderLock(self.data_dir)
        self._pepper = ""
        # In the order of their start; they are stopped in the reverse order.
        self._children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Starts everything and returns when requests can be served.

        Raises ConfigurationError when folder or port is taken, or something does not come up.
        """
        self._lock.acquire()
        try:
            check_port(self._port)
            await self._start_stores()
            await self._declare()
            await self._start_replica_and_agents()
            await self._until_ready()
            write_connection(self.data_dir, self.url, self.operator_key)
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def stop(self) -> None:
        """Stops the replica first, while its engines can still finish streams, and the stores
        last.
        """
        agents = [name for name in self._keepers if name.startswith("agent ")]
        for stage in (["serve"], agents, ["nats"], ["postgres"]):
            await self._end([name for name in stage if name in self._keepers])
        if self._lock.is_held:
            (self.data_dir / OPERATOR_FILE).unlink(missing_ok=True)
        self._lock.release()

    async def wait(self) -> None:
        """Returns only when a keeper ends, which none does by itself."""
        await asyncio.wait(self._keepers.values(), return_when=asyncio.FIRST_COMPLETED)

    def pids(self) -> dict[str, int]:
        """Process ids of the children that live: `postgres`, `nats`, `serve`, `agent NODE`."""
        found = {}
        for name, child in self._children.items():
            pid: int | None = getattr(child, "pid", None)
            if pid is not None:
                found[name] = pid
        return found

    def engine_pids(self) -> dict[str, int]:
        """Process ids of engines that live, by engine id, as their agents keep them on disk."""
        found = {}
        for path in self.data_dir.glob(f"{AGENTS_FOLDER}/*/engines/*/process.json"):
            try:
                pid = int(json.loads(path.read_bytes())["pid"])
            except (FileNotFoundError, ValueError, KeyError):
                continue
            if pid and psutil.pid_exists(pid):
                found[path.parent.name] = pid
        return found

    # ------------------------------------------------------------ stores

    async def _start_stores(self) -> None:
        self._pepper = os.environ.get("HEADWAY_PEPPER") or kept_secret(self.data_dir / "pepper")
        if not self.database_url:
            postgres = EmbeddedPostgres(self.data_dir / POSTGRES_FOLDER)
            self._say("postgres", "starting PostgreSQL")
            self.database_url = await postgres.start()
            self._keep("postgres", postgres)
        self._say("postgres", "bringing the schema up to date")
        await asyncio.to_thread(migrate.upgrade, self.database_url)
        if not self.nats_url:
            nats = EmbeddedNats(self.data_dir / NATS_FOLDER, self._nats_users())
            self._say("nats", "starting NATS")
            self.nats_url = await nats.start()
            self._keep("nats", nats)

    def _nats_users(self) -> list[NatsUser]:
        folder = self.data_dir / NATS_FOLDER
        return [control_user(folder), *(agent_user(folder, node.id) for node in self.cluster.nodes)]

    # ------------------------------------------------------------ declarations and keys

    async def _declare(self) -> None:
        """Applies the cluster document, and makes the keys that are not there yet."""
        path = self.data_dir / KEYS_FILE
        stored = _read_keys(path)
        pepper = self._pepper.encode()
        engine = make_engine(self.database_url)
        try:
            await apply_cluster(engine, self.cluster)
            operator = stored.get("operator", "")
            if not operator or not await keys.find_operator(engine, keys.digest(pepper, operator)):
                _, operator = await keys.create_operator_key(
                    engine, pepper, OperatorRole.ADMIN, "headway up"
                )
            tenants = {}
            for tenant in self.cluster.tenants:
                key = stored.get(f"tenant {tenant.id}", "")
                if not key or not await keys.find_principal(engine, keys.digest(pepper, key)):
                    _, key = await keys.create_tenant_key(
                        engine, pepper, TenantId(tenant.id), "headway up"
                    )
                tenants[tenant.id] = key
        finally:
            await engine.dispose()
        self.operator_key, self.tenant_keys = operator, tenants
        named = {f"tenant {tenant}": key for tenant, key in tenants.items()}
        write_private(path, json.dumps({"operator": operator, **named}, indent=2) + "\n")

    # ------------------------------------------------------------ replica and agents

    async def _start_replica_and_agents(self) -> None:
        self._say("serve", "starting the control plane")
        await self._launch("serve", ["serve"], self.serve_environment())
        for node in self.cluster.nodes:
            self._say(f"agent {node.id}", f"starting the agent of {node.id}")
            await self._launch(f"agent {node.id}", ["agent"], self._agent_environment(node))

    def serve_environment(self) -> dict[str, str]:
        """What a `headway serve` of this cluster is started with; another replica takes another port."""
        environment = {
            "DATABASE_URL": self.database_url,
            "NATS_URL": self.nats_url,
            "HEADWAY_PEPPER": self._pepper,
            "HEADWAY_HOST": HOST,
            "HEADWAY_PORT": str(self._port),
        }
        # A NATS of the operator's own: what it needs is in the environment already.
        if "nats" in self._children:
            user = control_user(self.data_dir / NATS_FOLDER)
            environment["HEADWAY_NATS_USER"] = user.name
            environment["HEADWAY_NATS_PASSWORD"] = user.password
        return environment

    def _agent_environment(self, node: NodeDocument) -> dict[str, str]:
        folder = self.data_dir / AGENTS_FOLDER / node.id
        folder.mkdir(parents=True, exist_ok=True)
        engines = self.data_dir / AGENTS_FOLDER / f"{node.id}.json"
        engines.write_text(json.dumps([self._engine(node, engine) for engine in node.engines]))
        environment = {
            "NATS_URL": self.nats_url,
            "HEADWAY_NODE_ID": node.id,
            "HEADWAY_AGENT_DATA": str(folder),
            "HEADWAY_AGENT_ENGINES": str(engines),
            "HEADWAY_BIND_ADDRESS": node.address,
        }
        if "nats" in self._children:
            user = agent_user(self.data_dir / NATS_FOLDER, node.id)
            environment["HEADWAY_AGENT_PASSWORD"] = user.password
        return environment

    def _engine(self, node: NodeDocument, engine: EngineDocument) -> dict[str, Any]:
        """An engine for its agent. A simulated one has the physics of the catalogue, unless it
        says otherwise.
        """
        spec = engine.model_dump()
        if engine.kind == SIMULATED:
            spec["options"] = {**self._physics(node, engine), **spec["options"]}
        return spec

    def _physics(self, node: NodeDocument, engine: EngineDocument) -> dict[str, int | float]:
        gpu_types = {entry.name: entry for entry in self.cluster.gpu_types}
        models = {entry.name: entry for entry in self.cluster.models}
        gpu_type, model = gpu_types.get(node.gpu_type), models.get(engine.model)
        if gpu_type is None or model is None:
            raise ConfigurationError(
                f"engine `{engine.engine_id}`: the document must declare GPU type `{node.gpu_type}`"
                f" and model `{engine.model}`, which it simulates"
            )
        return {
            "hbm_bytes": gpu_type.hbm_bytes,
            "bandwidth_bytes_per_s": gpu_type.bandwidth_bytes_per_s,
            "flops_per_s": flops_per_s(
                Model(**model.model_dump()), GpuType(**gpu_type.model_dump())
            ),
            "parameters": model.parameters_active or model.parameters,
            "layers": model.layers,
            "hidden_size": model.hidden_size,
            "weights_bytes": model.weights_bytes,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "context_tokens_max": model.context_tokens_max,
            "load_ms": model.load_ms,
        }

    async def _launch(self, name: str, arguments: list[str], environment: dict[str, str]) -> None:
        log = self.data_dir / LOG_FOLDER / f"{name.replace(' ', '-')}.log"
        program = Program(
            [sys.executable, "-m", "cli", *arguments], log=log, environment=environment
        )
        await program.start()
        self._keep(name, program)

    # ------------------------------------------------------------ keeping and ending

    def _keep(self, name: str, child: Child) -> None:
        self._children[name] = child
        self._keepers[name] = asyncio.create_task(keep_alive(name, child, self._ended))

    def _ended(self, name: str, status: int | None, pause_s: float) -> None:
        what = "could not be started" if status is None else f"ended with status {status}"
        self._say(name, f"{name} {what}; starting it again in {pause_s:g} s")

    async def _end(self, names: list[str]) -> None:
        keepers = [self._keepers.pop(name) for name in names]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    def _say(self, child: str, text: str) -> None:
        self._on_event(Event(child, text))

    # ------------------------------------------------------------ readiness

    async def _until_ready(self) -> None:
        """Waits for the replica to be ready and for every engine of the document to take work."""
        engines = sum(len(node.engines) for node in self.cluster.nodes)
        missing = "the control plane does not answer"
        headers = {"authorization": f"Bearer {self.operator_key}"}
        async with httpx2.AsyncClient(
            base_url=self.url, headers=headers, timeout=PROBE_S_MAX, trust_env=False
        ) as client:
            try:
                async with asyncio.timeout(self._ready_s_max):
                    while missing:
                        with contextlib.suppress(httpx2.TransportError):
                            missing = await _missing(client, engines)
                        await asyncio.sleep(PROBE_PAUSE_S)
            except TimeoutError:
                raise ConfigurationError(
                    f"not ready after {self._ready_s_max:g} s: {missing};"
                    f" the logs are in `{self.data_dir / LOG_FOLDER}`"
                ) from None


async def _missing(client: httpx2.AsyncClient, engines: int) -> str:
    """What is still missing, in words; empty when nothing is."""
    ready = (await client.get("/health/ready")).json()
    if ready["status"] != "ready":
        return "; ".join(ready["problems"])
    response = await client.get("/operator/v1/engines", params={"limit": 500})
    response.raise_for_status()
    accepting = [
        engine
        for engine in response.json()["data"]
        if engine["is_accepting"] and engine["seats_lent"]
    ]
    if len(accepting) < engines:
        return f"{len(accepting)} of {engines} engines take work"
    return ""


def check_port(port: int) -> None:
    """Raises ConfigurationError, naming who has it where that can be seen, when `port` can not be
    bound.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError:
            raise ConfigurationError(
                f"port {port} needs more rights than this user has:"
                " choose one above 1023 with --port"
            ) from None
        except OSError:
            raise ConfigurationError(
                f"port {port} is taken{_holder(port)}: choose another one with --port"
            ) from None


def free_port(preferred: int) -> int:
    """`preferred` when it can be bound, else one that the kernel finds."""
    with contextlib.suppress(ConfigurationError):
        check_port(preferred)
        return preferred
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.laddr
                and connection.laddr.port == port
                and connection.status == psutil.CONN_LISTEN
                and connection.pid
            ):
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except psutil.Error:
        pass
    return ""


def _read_keys(path: Path) -> dict[str, str]:
    """Keys of an earlier `up`; none when the file is not there or not whole."""
    try:
        document = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {str(name): str(value) for name, value in document.items()}
