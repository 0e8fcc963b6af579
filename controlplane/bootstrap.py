"""The composition root: builds stores, bus, core, gate, loops and the HTTP server, and closes them in reverse."""

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from urllib.parse import urlsplit

from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.api.app import create_app
from controlplane.api.services import Services, SettingView
from controlplane.bus import Bus
from controlplane.domain.errors import StateUnavailable
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import ReplicaId
from controlplane.gateway.hot_path import HotPath
from controlplane.gateway.server import make_server
from controlplane.gateway.sweeper import Sweeper
from controlplane.gateway.upstream import Upstream
from controlplane.runtime import gauges
from controlplane.runtime.accounts import Accounts
from controlplane.runtime.admit import Gate
from controlplane.runtime.agents import Agents
from controlplane.runtime.call import monotonic_ms
from controlplane.runtime.credits import CreditKeeper
from controlplane.runtime.decision_log import DecisionLog
from controlplane.runtime.estimate_keeper import EstimateKeeper
from controlplane.runtime.estimates import Estimates
from controlplane.runtime.figures import FIGURES_INTERVAL_S, Figures
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.idempotency import Idempotency
from controlplane.runtime.intake import Intake
from controlplane.runtime.kv_view import SETTLE_INTERVAL_S, KvView
from controlplane.runtime.loops import Leadership, Loops, every
from controlplane.runtime.model_choices import CHOICE_INTERVAL_S, ModelChoices
from controlplane.runtime.plan_moves import PlanMoves
from controlplane.runtime.plan_view import PlanView
from controlplane.runtime.plan_view import watch as watch_plan
from controlplane.runtime.planner_loop import PlannerLoop, PlannerSettings, planner_loops
from controlplane.runtime.planner_problem import Growth
from controlplane.runtime.policy_compile import PolicyCompiler
from controlplane.runtime.policy_news import PolicyNews
from controlplane.runtime.policy_state import PolicyState
from controlplane.runtime.pool_loads import PoolLoads
from controlplane.runtime.principals import Principals
from controlplane.runtime.queue_pump import QueuePump
from controlplane.runtime.rate_limits import RateLimits
from controlplane.runtime.retention import Retention
from controlplane.runtime.wake import WAKE_INTERVAL_S, WakeOnDemand
from controlplane.runtime.workflow_state import WorkflowStates
from controlplane.scheduler.batch import warm_up
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.scheduler.tick_log import TickLog
from controlplane.settings import Settings
from controlplane.store import breakers, replicas, weight_loads
from controlplane.store.catalog import load_catalog
from controlplane.store.journal import Journal
from controlplane.store.retention import Forgettable
from controlplane.store.session import make_engine
from controlplane.telemetry.metrics import Metrics
from controlplane.telemetry.observer import GateObserver
from controlplane.telemetry.otlp import OtlpMetrics, resource_of, span_processor
from controlplane.telemetry.spans import SpanMaker
from controlplane.telemetry.tracing import Sampling, Tracing
from policies.load import bundle_of, files_of

log = logging.getLogger(__name__)

START_RETRY_S = 0.5
JOURNAL_DRAIN_S_MAX = 10.0
CANCEL_AGAIN_S = 0.5
# Rarely run: the request path makes few cycles (the constants are those of a measured gateway).
GC_THRESHOLDS = (50_000, 20, 50)


@dataclass(frozen=True, slots=True)
class Replica:
    """A running replica, for the process that serves it and for tests that look inside."""

    id: ReplicaId
    gate: Gate
    fleet: FleetState
    journal: Journal
    accounts: Accounts
    metrics: Metrics
    sweeper: Sweeper
    app: HotPath


async def _until_reachable(
    engine: AsyncEngine,
    replica_id: ReplicaId,
    fleet: FleetState,
    *,
    files: Mapping[str, str],
    where: str,
    metrics: Metrics,
    compiler: PolicyCompiler,
) -> PolicyState:
    """Register, read the catalogue and the policies that rule, as soon as Postgres is there."""
    while True:
        try:
            await replicas.register(engine, replica_id)
            fleet.use_catalog(await load_catalog(engine))
            fleet.use_overrides(await breakers.load(engine))
            fleet.use_load_times(await weight_loads.load_all(engine))
            return await PolicyState.start(
                engine,
                files,
                where=where,
                replica_id=replica_id,
                metrics=metrics,
                compiler=compiler,
            )
        except StateUnavailable as error:
            log.warning("waiting_for_postgres", extra={"fields": {"why": str(error)}})
            await asyncio.sleep(START_RETRY_S)


def _where(settings: Settings) -> str:
    return (
        "the policies that ship" if settings.policies_path is None else str(settings.policies_path)
    )


@asynccontextmanager
async def running_replica(settings: Settings) -> AsyncIterator[Replica]:
    """A replica without its HTTP server: everything is started, and stopped in order at the end.

    Raises ConfigurationError when the policy bundle can not be used.
    """
    replica_id = ReplicaId(secrets.token_hex(4))
    files = files_of(settings.policies_path)
    bundle_of(files)
    # The first calls that wait together should not wait for an import.
    await asyncio.to_thread(warm_up)
    metrics = Metrics()
    database_url = settings.database_url.get_secret_value()
    pepper = settings.pepper.get_secret_value().encode()
    async with AsyncExitStack() as stack:
        engine = make_engine(database_url)
        stack.push_async_callback(engine.dispose)
        fleet = FleetState(
            PrefixIndex(),
            TickLog(),
            engine_ramp_ms=settings.engine_ramp_s * 1000.0,
            pool_ramp_ms=settings.pool_ramp_s * 1000.0,
        )
        compiler = PolicyCompiler()
        stack.push_async_callback(compiler.end)
        await compiler.start()
        policies = await _until_reachable(
            engine,
            replica_id,
            fleet,
            files=files,
            where=_where(settings),
            metrics=metrics,
            compiler=compiler,
        )

        journal = Journal(database_url)
        accounts = Accounts(engine, replica_id, settings.budget_slice_micro_usd)
        principals = Principals(engine, pepper)
        decisions = DecisionLog(fleet, journal, replica_id)
        bus = Bus(
            settings.nats_url,
            user=settings.nats_user,
            password=settings.nats_password.get_secret_value(),
            name=f"control-{replica_id}",
        )
        keeper = CreditKeeper(bus, fleet, replica_id)
        pump = QueuePump(
            keeper,
            calls_max=settings.queue_calls_max,
            bytes_max=settings.queue_bytes_max,
            wait_ms_max=settings.queue_wait_ms_max,
        )
        workflows, estimates = WorkflowStates(engine), Estimates()
        workflows.on_ended = estimates.learn_workflow
        sizes = EstimateKeeper(engine, estimates)
        with contextlib.suppress(StateUnavailable):
            await sizes.read_all()
        intake = Intake(
            replica_id=replica_id,
            fleet=fleet,
            workflows=workflows,
            estimates=estimates,
            policy_for=policies.policy_for,
            ruled=policies.shadow,
        )
        intake.generation = lambda: accounts.generation
        choices = intake.choices = ModelChoices(
            engine,
            fleet=fleet,
            policy_for=policies.policy_for,
            policies=policies.ruling,
            metrics=metrics,
        )
        waker = WakeOnDemand(engine, fleet, pump.depths)
        loads = PoolLoads(fleet, policies.policy.bundle.admission)
        gate = Gate(
            replica_id=replica_id,
            fleet=fleet,
            accounts=accounts,
            principals=principals,
            workflows=workflows,
            policies=policies,
            intake=intake,
            journal=journal,
            decisions=decisions,
            estimates=estimates,
            pump=pump,
            rates=RateLimits(),
            loads=loads,
            observer=GateObserver(metrics),
        )
        gauges.watch(metrics, gate, journal)
        news = PolicyNews(policies, bus)
        policies.on_taken_back = news.changed
        kv_view = KvView(bus, fleet, metrics)
        agents = Agents(bus, fleet, keeper, pump, engine, kv_view)
        leader = Leadership(engine, replica_id, settings.leader_ttl_s)
        loops = Loops(
            engine=engine,
            bus=bus,
            fleet=fleet,
            agents=agents,
            accounts=accounts,
            principals=principals,
            decisions=decisions,
            gate=gate,
            leader=leader,
            replica_id=replica_id,
            replica_ttl_s=settings.replica_ttl_s,
            node_silence_ms_max=settings.node_silence_s_max * 1000.0,
        )
        figures = Figures(
            engine,
            metrics=metrics,
            fleet=fleet,
            is_leading=lambda: leader.epoch is not None,
            is_bus_connected=lambda: bus.is_connected,
            replica_ttl_s=settings.replica_ttl_s,
            version=version("headway"),
        )
        gate.on_workflow_ended = figures.workflow_ended
        loops.on_reaped = figures.reaped
        retention = Retention(
            engine,
            leader,
            metrics,
            {
                Forgettable.DECISIONS: settings.decisions_kept_days,
                Forgettable.ATTEMPTS: settings.attempts_kept_days,
                Forgettable.COMMANDS: settings.commands_kept_days,
                Forgettable.REQUESTS: settings.requests_kept_days,
            },
        )
        author = f"replica:{replica_id}"
        plan_view = PlanView(
            fleet,
            stretch_ratio_min=lambda: policies.policy.bundle.admission.tpot_stretch_ratio_min,
        )
        watch_plan(metrics, plan_view)
        planner = PlannerLoop(
            engine=engine,
            bus=bus,
            fleet=fleet,
            leader=leader,
            view=plan_view,
            metrics=metrics,
            policy=lambda: policies.policy,
            author=author,
            settings=PlannerSettings(
                interval_s=settings.planner_interval_s,
                solve_s_max=settings.planner_solve_s_max,
                growth=Growth(
                    nodes_more_max=settings.planner_nodes_more_max,
                    provision_s=settings.planner_provision_s,
                ),
            ),
        )
        stack.push_async_callback(planner.close)
        plan_moves = PlanMoves(
            engine=engine, fleet=fleet, leader=leader, metrics=metrics, author=author
        )
        sweeper = Sweeper()
        upstream = Upstream(sweeper)
        stack.callback(upstream.close)
        fleet.on_leaving = partial(_leave, fleet, upstream, settings.stream_leave_s)
        tracing = _tracing(stack, settings, metrics, replica_id)
        services = Services(
            engine=engine,
            pepper=pepper,
            gate=gate,
            fleet=fleet,
            replica_id=replica_id,
            settings=_told(settings),
            metrics=metrics,
            explain=decisions.explain,
            journal=journal,
            bus=bus,
            leader=leader,
            planner=planner,
            plan_view=plan_view,
            choices=choices,
            compiler=compiler,
            policies_changed=news.changed,
        )
        idempotency = Idempotency(engine, replica_id)
        app = HotPath(
            gate,
            upstream,
            metrics,
            create_app(services),
            tracing=tracing,
            idempotency=idempotency,
        )

        async def converse() -> None:
            await bus.connect()
            await agents.join()
            await kv_view.join()
            await news.join()
            await plan_view.join(bus)
            await keeper.run(pump.offer)

        writer = asyncio.create_task(journal.run())
        tasks = [
            asyncio.create_task(loop)
            for loop in (
                *loops.all(),
                *sizes.loops(),
                retention.run(),
                every(FIGURES_INTERVAL_S, "figures", figures.look),
                *planner_loops(planner, plan_moves, plan_view),
                every(CHOICE_INTERVAL_S, "model_choice", choices.refresh),
                every(WAKE_INTERVAL_S, "wake", waker.look),
                every(SETTLE_INTERVAL_S, "kv_view", kv_view.settle),
                sweeper.run(),
                converse(),
            )
        ]
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        try:
            yield Replica(replica_id, gate, fleet, journal, accounts, metrics, sweeper, app)
        finally:
            gate.is_draining = True
            await _until_empty(gate, settings.drain_s_max)
            await keeper.give_back()
            await _end(tasks)
            await journal.drain(JOURNAL_DRAIN_S_MAX)
            await idempotency.drain(JOURNAL_DRAIN_S_MAX)
            with contextlib.suppress(StateUnavailable):
                await sizes.share()
                await accounts.surrender_all()
                await replicas.retire(engine, replica_id)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            kv_view.close()
            await bus.close()


def _told(settings: Settings) -> tuple[SettingView, ...]:
    """The settings for operators, by name: no secret, and no password that stands in a URL."""
    prefix = str(Settings.model_config.get("env_prefix", ""))
    found = []
    for name, field in sorted(Settings.model_fields.items()):
        value = getattr(settings, name)
        is_secret = isinstance(value, SecretStr)
        alias = field.validation_alias
        text = "" if value is None else str(value)
        if not is_secret and "://" in text:
            address = urlsplit(text)
            if address.password is not None or address.username is not None:
                host = address.netloc.rpartition("@")[2]
                text = address._replace(netloc=f"…@{host}").geturl()
        found.append(
            SettingView(
                name=name,
                variable=alias if isinstance(alias, str) else f"{prefix}{name}".upper(),
                value=None if is_secret else text,
                is_secret=is_secret,
                is_set=bool(value.get_secret_value()) if is_secret else value not in (None, ""),
                source="environment" if name in settings.model_fields_set else "default",
            )
        )
    return tuple(found)


def _tracing(
    stack: AsyncExitStack, settings: Settings, metrics: Metrics, replica_id: ReplicaId
) -> Tracing:
    """Spans and series over OTLP when an endpoint is configured; else contexts are only passed on, and calls
    that are kept are told in the log.
    """
    resource = resource_of(version("headway"), replica_id)
    is_exporting = bool(settings.otlp_endpoint)
    if is_exporting:
        pushing = OtlpMetrics(metrics, resource)
        stack.callback(pushing.shutdown)
    count = metrics.traces.add
    maker = SpanMaker(span_processor() if is_exporting else None, resource, count)
    stack.callback(maker.shutdown)
    sampling = Sampling(
        ratio=settings.trace_sample_ratio,
        slow_ms=settings.trace_slow_ms,
        ttft_slow_ms=settings.trace_ttft_slow_ms,
        kept_per_s_max=settings.trace_kept_per_s_max,
    )
    return Tracing(maker, sampling, is_exporting=is_exporting, now_ms=monotonic_ms, count=count)


def _leave(fleet: FleetState, upstream: Upstream, after_s: float, row: EngineRow) -> None:
    """An engine is drained: what runs there may end in the time that it has, or go on elsewhere."""
    asyncio.get_running_loop().call_later(after_s, upstream.leave, fleet.address_of(row))


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel until all have ended: an answer that arrives with a cancellation can swallow it."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _until_empty(gate: Gate, seconds_max: float) -> None:
    """Let calls in flight finish, up to a limit."""
    deadline_s = asyncio.get_running_loop().time() + seconds_max
    while gate.in_flight and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.sleep(0.05)


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is in flight."""
    async with running_replica(settings) as replica:
        server = make_server(
            replica.app,
            replica.sweeper,
            replica.metrics,
            new_id=replica.gate.new_id,
            host=settings.host,
            port=settings.port,
        )
        stopping = asyncio.Event()
        running_loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            running_loop.add_signal_handler(number, stopping.set)
        serving = asyncio.create_task(server.serve())
        log.info("serving", extra={"fields": {"replica": replica.id, "port": settings.port}})
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        replica.gate.is_draining = True
        await _until_empty(replica.gate, settings.drain_s_max)
        server.should_exit = True
        await serving
        stopped.cancel()
