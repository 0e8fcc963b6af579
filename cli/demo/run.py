"""Plays the demo: starts a cluster, sends the load, kills an engine, waits for all to settle."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from cli.client import JsonObject
from cli.demo.cost import SECONDS_PER_HOUR, cost_per_success_usd, fleet_usd_per_hour
from cli.demo.load import TenantLoad, WorkflowPlan, plan_load
from cli.demo.play import Player
from cli.failure import CommandFailure, ExitCode
from cli.processes import LocalCluster
from cli.running import run_until_signal
from controlplane.domain.errors import ConfigurationError
from controlplane.domain.money import usd
from controlplane.store import records
from controlplane.store.session import make_engine, transaction

# Two cores carry about this many workflows a second, seven calls each.
WORKFLOWS_PER_S = 2.5
# Arrivals end here, so that most workflows end inside the load period.
ARRIVAL_WINDOW_RATIO = 0.75
KILL_AT_RATIO = 0.5
# How long to wait for an engine that has calls to lose.
KILL_S_MAX = 3.0
KILL_PROBE_PAUSE_S = 0.02
WORKFLOW_BUDGET_USD = 0.25
FINISH_S_MAX = 45.0
SETTLE_S_MAX = 20.0
PROBE_PAUSE_S = 0.2
OPERATOR_S_MAX = 10.0
EXPLAINED_OF = 60

# Class of a tenant: rank of its share of the load, burstiness of its arrivals, slack of its
# deadlines. The least important tenant sends most and in bursts.
LOADS = {"bronze": (1, 3.95, 10.0), "silver": (2, 1.21, 6.0), "gold": (3, 1.03, 4.0)}


@dataclass(frozen=True, slots=True)
class Played:
    """What the load left behind, and the engine that was killed under it."""

    wall_s: float
    player: Player
    killed: str


def run(local: LocalCluster, console: Console, *, seconds: float, seed: int) -> dict[str, Any]:
    """Plays the demo on `local` and returns what `demo.json` holds. Raises CommandFailure."""
    result = run_until_signal(lambda: _demo(local, console, seconds, seed))
    if result is None:
        raise CommandFailure(ExitCode.FAILED, "stopped before the load had ended")
    return result


async def _demo(local: LocalCluster, console: Console, seconds: float, seed: int) -> dict[str, Any]:
    await local.start()
    try:
        since = await _database_now(local)
        played = await _play(local, console, seconds, seed)
        async with _operator(local) as api:
            console.print("[dim]waiting for the journal to settle[/]")
            status = await _settled(api)
            result = await _result(local, api, played, status=status, since=since, seed=seed)
        _write(local.data_dir / "demo.json", result)
        return result
    finally:
        await local.stop()


async def _play(local: LocalCluster, console: Console, seconds: float, seed: int) -> Played:
    plans = _plans(local, seconds, seed)
    player = Player(
        url=local.url,
        keys=local.tenant_keys,
        models=_models(local),
        seed=seed,
        budget_usd=WORKFLOW_BUDGET_USD,
    )
    start = time.monotonic()
    killed = ""
    load = asyncio.create_task(player.play(plans))
    progress = Progress(
        SpinnerColumn(),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )
    try:
        with progress:
            bar = progress.add_task("", total=len(plans))
            while not load.done() and time.monotonic() - start < seconds + FINISH_S_MAX:
                elapsed = time.monotonic() - start
                if not killed and elapsed > seconds * KILL_AT_RATIO:
                    killed = await _kill_an_engine(local)
                    progress.console.print(f"[bold yellow]killed engine {killed} (SIGKILL)[/]")
                tally = player.tally
                progress.update(
                    bar,
                    completed=tally.succeeded + tally.failed + tally.refused,
                    description=(
                        f"{tally.in_flight} running, {tally.calls} calls,"
                        f" [green]{tally.succeeded} ok[/] [red]{tally.failed} failed[/]"
                        f" {tally.refused} refused"
                    ),
                )
                await asyncio.wait({load}, timeout=PROBE_PAUSE_S)
        if not load.done():
            load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        if not load.cancelled() and (error := load.exception()):
            raise error
    finally:
        load.cancel()
        await player.close()
    return Played(time.monotonic() - start, player, killed)


def _plans(local: LocalCluster, seconds: float, seed: int) -> tuple[WorkflowPlan, ...]:
    loads = []
    for tenant in local.cluster.tenants:
        if tenant.tenant_class not in LOADS:
            raise ConfigurationError(
                f"tenant `{tenant.id}`: the demo has no load for class `{tenant.tenant_class}`,"
                f" only for {', '.join(LOADS)}"
            )
        rank, cv, slack = LOADS[tenant.tenant_class]
        loads.append(TenantLoad(tenant=tenant.id, rank=rank, arrival_cv=cv, slack=slack))
    window_s = seconds * ARRIVAL_WINDOW_RATIO
    return plan_load(
        seed=seed,
        window_s=window_s,
        workflows=max(len(loads), round(window_s * WORKFLOWS_PER_S)),
        tenants=tuple(loads),
        speedup=_speedup(local),
    )


def _models(local: LocalCluster) -> dict[str, str]:
    """The smallest and the largest model of the document, by the words that plans use."""
    by_size = sorted(local.cluster.models, key=lambda model: model.parameters)
    return {"small": by_size[0].name, "large": by_size[-1].name}


def _speedup(local: LocalCluster) -> float:
    """The speed-up that all simulated engines share. Raises ConfigurationError when they differ."""
    found = {
        float(engine.options.get("speedup", 1.0))
        for node in local.cluster.nodes
        for engine in node.engines
    }
    if len(found) != 1:
        raise ConfigurationError(
            f"the demo needs engines with one speed-up; the document has {sorted(found)}"
        )
    return found.pop()


async def _kill_an_engine(local: LocalCluster) -> str:
    """Kills the engine of the small model that has the most calls, as soon as one has any."""
    small = _models(local)["small"]
    pids = local.engine_pids()
    deadline = time.monotonic() + KILL_S_MAX
    async with _operator(local) as api:
        while True:
            rows = (await _get(api, "engines", limit=500))["data"]
            busiest = max(
                (row for row in rows if row["model"] == small and row["id"] in pids),
                key=lambda row: (row["seats_taken"], row["id"]),
                default=None,
            )
            if busiest is None:
                raise ConfigurationError(f"no engine of {small} is running that could be killed")
            if busiest["seats_taken"] or time.monotonic() > deadline:
                os.kill(pids[busiest["id"]], signal.SIGKILL)
                return str(busiest["id"])
            await asyncio.sleep(KILL_PROBE_PAUSE_S)


@asynccontextmanager
async def _operator(local: LocalCluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(
        base_url=f"{local.url}/operator/v1/",
        headers={"authorization": f"Bearer {local.operator_key}"},
        timeout=OPERATOR_S_MAX,
        trust_env=False,
    ) as client:
        yield client


async def _get(api: httpx2.AsyncClient, path: str, **query: str | int) -> JsonObject:
    response = await api.get(path, params=query)
    response.raise_for_status()
    document: JsonObject = response.json()
    return document


async def _settled(api: httpx2.AsyncClient) -> JsonObject:
    """The status once nothing is in flight or waits in the journal; else the last one seen."""
    deadline = time.monotonic() + SETTLE_S_MAX
    while True:
        status = await _get(api, "status")
        is_settled = status["journal"]["entries"] == 0 and not any(status["gauges"].values())
        if is_settled or time.monotonic() > deadline:
            return status
        await asyncio.sleep(PROBE_PAUSE_S)


async def _result(
    local: LocalCluster,
    api: httpx2.AsyncClient,
    played: Played,
    *,
    status: JsonObject,
    since: datetime,
    seed: int,
) -> dict[str, Any]:
    """What `demo.json` holds: the load's own counts, and what PostgreSQL says of everything since
    its start.
    """
    engine = make_engine(local.database_url)
    try:
        summary = await records.demo_summary(engine, since)
        invariants = await _invariants(engine)
    finally:
        await engine.dispose()
    tally, speedup = played.player.tally, _speedup(local)
    prices = {entry.name: entry.price_micro_usd_per_hour for entry in local.cluster.gpu_types}
    usd_per_hour = fleet_usd_per_hour(
        (node.gpus, usd(prices[node.gpu_type])) for node in local.cluster.nodes
    )
    return {
        "seed": seed,
        "seconds": round(played.wall_s, 1),
        "speedup": speedup,
        "workflows": {
            "started": tally.started,
            "succeeded": tally.succeeded,
            "failed": tally.failed,
            "refused": tally.refused,
        },
        "workflow_states": summary.workflows,
        "calls": tally.calls,
        "calls_failed": dict(tally.calls_failed),
        "steps_retried": tally.steps_retried,
        "failed_by": {"quality": tally.failed_by_quality, "calls": tally.failed_by_calls},
        "requests": summary.requests,
        "cpst_usd": cost_per_success_usd(usd_per_hour, played.wall_s, speedup, tally.succeeded),
        "fleet_usd": usd_per_hour * played.wall_s * speedup / SECONDS_PER_HOUR,
        "settled_usd": usd(summary.settled_micro_usd),
        "wasted_usd": usd(summary.wasted_micro_usd),
        "ttft_ms": {"p50": summary.ttft_ms.p50, "p99": summary.ttft_ms.p99},
        "tpot_ms": {"p50": summary.tpot_ms.p50, "p99": summary.tpot_ms.p99},
        "cached_token_ratio": summary.cached_token_ratio,
        "refusals": summary.refusals,
        "killed_engine": played.killed,
        "explained": await _explained(api),
        "invariants": {**invariants, "I3": _is_at_rest(status)},
    }


async def _invariants(engine: AsyncEngine) -> dict[str, bool]:
    """The invariants once they hold, or as they are after SETTLE_S_MAX.

    I1 holds at rest: what a process of an earlier run left open is ended by the reaper, soon.
    """
    deadline = time.monotonic() + SETTLE_S_MAX
    while True:
        found = await records.invariants(engine)
        if all(found.values()) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(PROBE_PAUSE_S)


def _is_at_rest(status: JsonObject) -> bool:
    """Every gauge of the replica is back at zero, and no engine lent more than it has."""
    return not any(status["gauges"].values()) and status["are_credits_within_capacity"]


async def _explained(api: httpx2.AsyncClient) -> JsonObject | None:
    """The explanation of a recent decision that had the most candidates to choose from."""
    recent = (await _get(api, "requests", limit=EXPLAINED_OF))["data"]
    best: JsonObject | None = None
    for request in recent:
        response = await api.get(f"requests/{request['id']}/explain")
        if not response.is_success:
            continue
        document: JsonObject = response.json()
        if best is None or len(document["candidates"]) > len(best["candidates"]):
            best = document
    return best


async def _database_now(local: LocalCluster) -> datetime:
    """The instant by PostgreSQL's clock, which stamps everything that the summary counts."""
    engine = make_engine(local.database_url)
    try:
        async with transaction(engine) as connection:
            now = await connection.scalar(select(func.clock_timestamp()))
    finally:
        await engine.dispose()
    assert isinstance(now, datetime)
    return now


def _write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n")
