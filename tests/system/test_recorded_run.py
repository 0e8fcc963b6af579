"""A live run, recorded at the decision core's door and played again by the simulated world's Headway.

A replica serves calls over HTTP, with real stores, agents and engines. Everything that its desk, queue,
loads and fleet view were told is written down, in order, and then told to a `cli.simulate.headway.Headway`
that has seen nothing else. It must decide the same, call for call: engine, cost, predictions, waits and
refusals, to the last digit. What rules of dispatch said is replayed as it was; they are not simulated.
"""

import asyncio
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import httpx2
import pytest
import uvicorn

from cli.processes import LocalCluster
from cli.simulate.ablate import is_compiled
from cli.simulate.headway import Headway, HeadwayOptions, SimulatedJob, without
from controlplane.bootstrap import Replica, running_replica
from controlplane.domain.decision import Admit, Placement, Queue, Refuse
from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.reliability.retry_budget import RetryBudgets
from controlplane.runtime import admit, fleet_state
from controlplane.runtime.admit import Gate
from controlplane.runtime.call import Ticket, monotonic_ms, wall_ms
from controlplane.runtime.desk import Desk
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.pool_loads import PoolLoads
from controlplane.runtime.waiting_line import WaitingLine
from controlplane.scheduler.prefix_index import PrefixIndex
from controlplane.settings import Settings
from policies.documents import Admission

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

# Everything by which the core is told of the world. Calls among them are not told again.
DOORS: dict[type, tuple[str, ...]] = {
    FleetState: (
        "use_catalog", "use_overrides", "use_stretches_max", "use_kv_prices", "use_bid_price",
        "use_demand", "use_sleep", "hello", "beat", "bye", "telemetry", "silence", "grace", "granted",
        "attempted", "look_again", "pool", "progress", "use_load_times",
    ),
    Desk: (
        "begin", "ask", "retry", "try_retry", "release", "release_prefill", "ended", "workflow_ended",
        "use_rules", "tick", "turned_away", "first_token", "view", "cached", "elsewhere", "move",
        "goes_on", "leave_out", "unheld", "prefill_failed", "prefill_kept",
    ),
    PrefixIndex: ("follow", "unfollow", "told", "doubt", "undoubt", "forget", "settle"),
    WaitingLine: ("enter", "remove", "offer", "expire"),
    PoolLoads: ("use_replicas",),
    RetryBudgets: ("note_request",),
}  # fmt: skip
CALLS = 160


@dataclass(frozen=True)
class RowOf:
    engine_id: str


@dataclass(frozen=True)
class JobOf:
    id: str


@dataclass(frozen=True)
class Told:
    """One call through a door, the clocks as they stood, and what came back."""

    owner: type
    name: str
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    now_ms: float
    wall_ms: float
    answer: Any


@dataclass(frozen=True)
class Seen:
    """A ticket when the core first saw it."""

    request: Request
    ticket: Ticket


class Recorder:
    """Clocks stand still while the core works, so that they can be told again."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.jobs: dict[str, Seen] = {}
        self.rulings: list[Request | Refuse | None] = []
        self.decisions: list[Any] = []
        self.depth = 0
        self.now_ms = 0.0
        self.wall_ms = 0.0
        self.is_on = True

    def clock(self) -> float:
        return self.now_ms if self.depth else monotonic_ms()

    def wall(self) -> float:
        return self.wall_ms if self.depth else wall_ms()

    def door(self, owner: type, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def told(core: Any, *arguments: Any, **named: Any) -> Any:
            if self.depth or not self.is_on:
                return inner(core, *arguments, **named)
            self.now_ms, self.wall_ms = monotonic_ms(), wall_ms()
            kept = tuple(self.kept(each) for each in arguments)
            kept_named = {key: self.kept(each) for key, each in named.items()}
            self.depth += 1
            try:
                answer = inner(core, *arguments, **named)
            finally:
                self.depth -= 1
            self.told.append(
                Told(owner, name, kept, kept_named, self.now_ms, self.wall_ms, plain(answer))
            )
            return answer

        return told

    def kept(self, value: Any) -> Any:
        if isinstance(value, Ticket):
            self.jobs.setdefault(value.id, Seen(value.request, value))
            return JobOf(value.id)
        return RowOf(value.engine_id) if isinstance(value, EngineRow) else value


def plain(value: Any) -> Any:
    """An answer of the core in values that two cores can be compared by."""
    match value:
        case Placement():
            return (
                "placed", value.decode.engine_id, value.prefill and value.prefill.engine_id,
                value.cost_micro_usd, value.ttft_ms_predicted, value.e2e_ms_predicted,
                value.cached_tokens,
            )  # fmt: skip
        case Admit(placement):
            return plain(placement)
        case Refuse() | Queue():
            return value
        case list() | tuple():
            return tuple(plain(each) for each in value)
        case Ticket() | SimulatedJob():
            return value.id
        case None | bool() | int() | float() | str():
            return value
        case _:
            return type(value).__name__


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    with monkeypatch.context() as patch:
        for owner, names in DOORS.items():
            for name in names:
                patch.setattr(owner, name, recorder.door(owner, name, getattr(owner, name)))
        made, ruled, noted = FleetState.__init__, Gate._dispatched, Gate._record

        def make(fleet: FleetState, *arguments: Any, **named: Any) -> None:
            made(fleet, *arguments, **{**named, "wall_ms": recorder.wall})

        def rule(gate: Gate, ticket: Ticket, now_ms: float) -> Request | Refuse:
            ruling = ruled(gate, ticket, now_ms)
            recorder.rulings.append(None if ruling is ticket.request else ruling)
            return ruling

        def note(gate: Gate, ticket: Ticket, cached: Any, decision: Any, now_ms: float) -> None:
            if recorder.depth:
                recorder.decisions.append((ticket.id, plain(decision), dict(cached)))
            noted(gate, ticket, cached, decision, now_ms)

        patch.setattr(FleetState, "__init__", make)
        patch.setattr(Gate, "_dispatched", rule)
        patch.setattr(Gate, "_record", note)
        patch.setattr(admit, "monotonic_ms", recorder.clock)
        patch.setattr(fleet_state, "monotonic_ms", recorder.clock)
        yield recorder
        recorder.is_on = False


class Differs(AssertionError):
    """The simulated world decided otherwise than the live one."""


class Again:
    """The recording, told to the simulated world's Headway; `admission` stands for the rules that were told."""

    def __init__(
        self, recorder: Recorder, options: HeadwayOptions, admission: Admission | None = None
    ) -> None:
        self.headway = Headway(options)
        self._recorder = recorder
        self._admission = admission
        self._rulings = deque(recorder.rulings)
        self._jobs: dict[str, SimulatedJob] = {}
        self._now_ms = 0.0
        self.decisions: list[Any] = []
        headway = self.headway
        headway.desk.rule = self._rule
        headway.desk.record = self._note
        headway.desk.freed = lambda: None
        headway.line.place = lambda job, _: headway.desk.place(job, self._now_ms)
        headway.line.is_idle = lambda model, _: headway.desk.is_idle(model, self._now_ms)
        self._owners: dict[type, Any] = {
            FleetState: headway.fleet,
            PrefixIndex: headway.fleet.prefixes,
            Desk: headway.desk,
            WaitingLine: headway.line,
            PoolLoads: headway.loads,
            RetryBudgets: headway.desk.retries,
        }

    def play(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tell all of it. Raises Differs at the first answer, or decision, that is another one."""
        live = self._recorder.decisions
        with monkeypatch.context() as patch:
            patch.setattr(fleet_state, "monotonic_ms", lambda: self._now_ms)
            for told in self._recorder.told:
                self._now_ms, self.headway._now_ms = told.now_ms, told.wall_ms
                act = getattr(self._owners[told.owner], told.name)
                arguments = [self._own(each) for each in told.arguments]
                named = {key: self._own(each) for key, each in told.named.items()}
                answer = plain(act(*arguments, **named))
                count = len(self.decisions)
                if self.decisions[-1:] != live[count - 1 : count] or answer != told.answer:
                    raise Differs(told.name, told.answer, answer, live[count - 1 : count])
        if self.decisions != live:
            raise Differs(len(live), len(self.decisions))

    def _own(self, value: Any) -> Any:
        match value:
            case RowOf(engine_id):
                row = self.headway.fleet.row_of(engine_id)
                assert row is not None, engine_id
                return row
            case JobOf(id=name):
                return self._jobs.setdefault(name, self._job(name))
            case Admission():
                return self._admission or value
        return value

    def _job(self, name: str) -> SimulatedJob:
        seen = self._recorder.jobs[name]
        # No call of the simulated world: the desk reads of a job what the line and it name.
        job = SimulatedJob(None, seen.request, seen.ticket.terms)  # type: ignore[arg-type]
        job.prompt_bytes = seen.ticket.prompt_bytes
        job.queue_class = seen.ticket.queue_class
        job.idle_until_ms = seen.ticket.idle_until_ms
        job.rule = seen.ticket.rule
        return job

    def _rule(self, job: SimulatedJob, _: float) -> Request | Refuse:
        assert self._rulings, "more is asked of the rules than was"
        return self._rulings.popleft() or job.request

    def _note(self, job: SimulatedJob, cached: Any, decision: Any, _: float) -> None:
        self.decisions.append((job.id, plain(decision), dict(cached)))


# ------------------------------------------------------------ the live run


@asynccontextmanager
async def serving(cluster: LocalCluster) -> AsyncIterator[tuple[Replica, str]]:
    """A second replica of the cluster, in this process."""
    environment = cluster.serve_environment()
    settings = Settings.model_validate(
        {
            "DATABASE_URL": environment["DATABASE_URL"],
            "NATS_URL": environment["NATS_URL"],
            "pepper": environment["HEADWAY_PEPPER"],
            "nats_user": environment.get("HEADWAY_NATS_USER", ""),
            "nats_password": environment.get("HEADWAY_NATS_PASSWORD", ""),
            "drain_s_max": 5,
        }
    )
    async with running_replica(settings) as replica:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(replica.app, log_level="warning", lifespan="off"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(20):
                while not any(
                    row.is_accepting and row.seats_lent for row in replica.gate.live_rows()
                ):
                    await asyncio.sleep(0.05)
            yield replica, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
            listener.close()


async def call(http: httpx2.AsyncClient, content: str, tokens: int, **headers: str) -> int:
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "stream": False,
    }
    try:
        answer = await http.post("/v1/chat/completions", json=body, headers=headers)
    except httpx2.TimeoutException:
        return 0
    return answer.status_code


async def load(url: str, key: str) -> Counter[int]:
    """Workflows whose prompts grow, calls that come all at once, and clients that hang up."""
    auth = {"authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=url, headers=auth, timeout=20, trust_env=False) as http:

        async def workflow(number: int, deadline_s: float) -> list[int]:
            body = {
                "kind": "coding",
                "scope": "copilot",
                "steps_expected": 3,
                "deadline_s": deadline_s,
            }
            while (made := await http.post("/v1/workflows", json=body)).status_code == 503:
                # A small machine under load: the pool of connections was busy for a second.
                await asyncio.sleep(0.1)
            name = made.json()["id"]
            text, statuses = f"Mend the clock of tower {number}. " * 60, []
            for step in range(3):
                headers = {"x-headway-workflow": name, "x-headway-step": str(step)}
                statuses.append(await call(http, text, 40, **headers))
                text += f"And the wheel of step {step}. " * 40
            return statuses

        async def hang_up(number: int) -> int:
            try:
                async with asyncio.timeout(0.15):
                    return await call(http, f"Count the bells of {number}. " * 200, 800)
            except TimeoutError:
                return 0

        singles = [call(http, f"Question {number % 7}? " * 900, 200) for number in range(CALLS)]
        found = await asyncio.gather(
            *singles,
            *(workflow(number, (9.0, 0.7)[number % 2]) for number in range(24)),
            *(hang_up(n) for n in range(6)),
        )
    statuses: Counter[int] = Counter()
    for each in found:
        statuses.update(each if isinstance(each, list) else [each])
    return statuses


async def test_a_recorded_run_is_decided_the_same_in_the_simulated_world(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording(monkeypatch) as recorder:
        async with serving(cluster) as (replica, url):
            statuses = await load(url, cluster.tenant_keys["acme"])
            bundle = replica.gate.policies.policy.bundle
    assert statuses[200] > CALLS // 4, statuses
    decided = Counter(kind(decision) for _, decision, _ in recorder.decisions)
    refused = Counter(
        told.answer.reason
        for told in recorder.told
        if told.name in ("begin", "turned_away") and isinstance(told.answer, Refuse)
    )
    # All ways of a call were taken: how often depends on the machine.
    assert decided["placed"] > CALLS // 4, decided
    assert decided["queue"] > 0, decided
    assert refused, "load refused nobody"

    again = Again(recorder, HeadwayOptions(bundle=bundle))
    again.play(monkeypatch)
    assert not any(again.headway.gauges().values())

    # Another rule of admission is noticed, and so is one axis that costs nothing.
    unbounded = bundle.admission.model_copy(update={"is_bounding": False})
    other = Again(recorder, HeadwayOptions(bundle=bundle), unbounded)
    with pytest.raises(Differs):
        other.play(monkeypatch)
    if not is_compiled():
        options = without("gpu_type", HeadwayOptions(bundle=bundle))
        with pytest.raises(Differs):
            Again(recorder, options).play(monkeypatch)


def kind(decision: Any) -> str:
    return decision[0] if isinstance(decision, tuple) else type(decision).__name__.lower()
