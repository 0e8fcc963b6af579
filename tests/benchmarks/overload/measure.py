"""Figures of a run: what the callers saw, joined with what PostgreSQL says that it cost."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

import psutil
from sqlalchemy import func, select, text

from controlplane.store.session import make_engine, transaction
from dataplane.engines.simulated.roofline import StepTimes
from tests.benchmarks.overload.fleet import LabCluster
from tests.benchmarks.overload.play import Ended, Fate
from tests.benchmarks.overload.sdk import Try
from tests.benchmarks.overload.workload import prefill_s

SETTLE_S_MAX = 20.0
SETTLE_PAUSE_S = 0.2
# Calls among which the weights' read of a step is shared when its time is told apart.
SEQUENCES_TYPICAL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One row of `requests`, with how many engines were asked and which one last."""

    id: str
    workflow: str | None
    step: int
    engine: str | None
    tenant: str
    state: str
    reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_ms: float
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run came to. Rates a second, shares in 0..1, of workflows that arrived while it counted."""

    name: str
    offered: float
    goodput: float
    arrived: int
    succeeded_ratio: float
    high_succeeded_ratio: float
    low_succeeded_ratio: float
    fates: dict[str, int]
    high_fates: dict[str, int]
    errors: dict[str, int]
    high_errors: dict[str, int]
    engine_s: float
    wasted_ratio: float
    late_kill_ratio: float
    next_try_admitted_ratio: float | None
    tries_after_refusal: int
    retry_after_s_p50: float
    retry_after_s_p99: float
    tries_per_call: float
    attempts_per_request: float
    cached_ratio: float
    at_home_ratio: float
    queue_ms_p50: float
    queue_ms_p99: float
    high_e2e_s_p50: float
    high_e2e_s_p99: float
    replica_cpu_ratio: float
    callers_cpu_ratio: float
    lateness_s_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One open-loop run as it was played. Only what arrived between the two instants counts."""

    offered: float
    counts_from_s: float
    counts_until_s: float
    ended: list[Ended]
    calls: list[Call]
    cpu: tuple[float, float]
    lateness_s_max: float

    def goodput(self, since_s: float, until_s: float) -> float:
        """Workflows that ended well between two instants, per second."""
        done = [end for end in self.ended if not end.has_died and since_s <= end.ended_s < until_s]
        return len(done) / (until_s - since_s)


@dataclass(slots=True)
class Cpu:
    """CPU of the replica and of this process since it was made, as shares of one core."""

    replica: psutil.Process
    callers: psutil.Process
    since_s: float = field(default_factory=time.monotonic)
    before: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, cluster: LabCluster) -> "Cpu":
        made = cls(psutil.Process(cluster.pids()["serve"]), psutil.Process())
        made.before = made._spent()
        return made

    def ratios(self) -> tuple[float, float]:
        wall_s = max(time.monotonic() - self.since_s, 1e-6)
        spent = self._spent()
        return (spent[0] - self.before[0]) / wall_s, (spent[1] - self.before[1]) / wall_s

    def _spent(self) -> tuple[float, float]:
        found = [process.cpu_times() for process in (self.replica, self.callers)]
        return found[0].user + found[0].system, found[1].user + found[1].system


async def database_now(cluster: LabCluster) -> datetime:
    """The instant by the clock that stamps requests."""
    engine = make_engine(cluster.database_url)
    try:
        async with transaction(engine) as connection:
            now = await connection.scalar(select(func.clock_timestamp()))
    finally:
        await engine.dispose()
    assert isinstance(now, datetime)
    return now


async def calls_since(cluster: LabCluster, since: datetime) -> list[Call]:
    """Every request opened since then, once all of them have ended. Raises TimeoutError."""
    engine = make_engine(cluster.database_url)
    try:
        async with asyncio.timeout(SETTLE_S_MAX):
            while True:
                async with cluster.operator_client() as api:
                    status = (await api.get("status")).json()
                async with transaction(engine) as connection:
                    left = await connection.scalar(
                        text("SELECT count(*) FROM requests WHERE state = 'open'")
                    )
                if not left and not status["journal"]["entries"]:
                    break
                await asyncio.sleep(SETTLE_PAUSE_S)
        async with transaction(engine) as connection:
            rows = await connection.execute(
                text(
                    """
                    SELECT r.id, r.workflow_id, r.step, r.tenant_id, r.state, r.reason, r.prompt_tokens,
                           r.cached_tokens, r.completion_tokens, r.queue_ms,
                           (SELECT count(*) FROM attempts a WHERE a.request_id = r.id) AS attempts,
                           (SELECT a.engine_id FROM attempts a WHERE a.request_id = r.id
                            ORDER BY a.number DESC LIMIT 1) AS engine
                    FROM requests r WHERE r.opened_at >= :since
                    """
                ),
                {"since": since},
            )
            return [
                Call(
                    id=row.id,
                    workflow=row.workflow_id,
                    step=row.step,
                    engine=row.engine,
                    tenant=row.tenant_id,
                    state=row.state,
                    reason=row.reason,
                    prompt_tokens=row.prompt_tokens,
                    cached_tokens=row.cached_tokens,
                    completion_tokens=row.completion_tokens,
                    queue_ms=row.queue_ms or 0.0,
                    attempts=row.attempts,
                )
                for row in rows
            ]
    finally:
        await engine.dispose()


def engine_s(call: Call, times: StepTimes) -> float:
    """Engine time that a call used up, by the roofline: its prompt, and its part of the decode steps."""
    if not call.attempts:
        return 0.0
    uncached = max(0, call.prompt_tokens - call.cached_tokens)
    context = call.prompt_tokens + call.completion_tokens / 2
    each_s = times.base_s / SEQUENCES_TYPICAL + times.step_s(1, round(context), 0) - times.base_s
    prompt_s = prefill_s(uncached, call.cached_tokens, times) - times.base_s
    return prompt_s + call.completion_tokens * each_s


def figures(name: str, run: Run, *, times: StepTimes) -> Figures:
    """The figures of the counted part of an open-loop run."""
    counted = [
        end for end in run.ended if run.counts_from_s <= end.plan.arrival_s < run.counts_until_s
    ]
    high = [end for end in counted if end.plan.tier.is_high]
    low = [end for end in counted if not end.plan.tier.is_high]
    costs: defaultdict[str, float] = defaultdict(float)
    own: list[Call] = []
    workflows = {end.workflow for end in counted if end.workflow}
    for call in run.calls:
        if call.workflow is not None and call.workflow in workflows:
            own.append(call)
            costs[call.workflow] += engine_s(call, times)
    total_s = sum(costs.values())
    wasted_s = sum(costs[end.workflow] for end in counted if end.has_died)
    died = [end for end in counted if end.has_died]
    tries = [each for end in counted for each in end.tries]
    again = after_refusals(tries)
    asked_s = [one.retry_after_s for each in tries for one in each if one.retry_after_s is not None]
    asked = [call for call in own if call.attempts]
    waits = [call.queue_ms for call in own]
    high_s = [end.ended_s - end.began_s for end in high if not end.has_died]
    return Figures(
        name=name,
        offered=run.offered,
        goodput=run.goodput(run.counts_from_s, run.counts_until_s),
        arrived=len(counted),
        succeeded_ratio=ratio(counted),
        high_succeeded_ratio=ratio(high),
        low_succeeded_ratio=ratio(low),
        fates=counts(end.fate for end in counted),
        high_fates=counts(end.fate for end in high),
        errors=counts(end.error for end in counted if end.error),
        high_errors=counts(end.error for end in high if end.error),
        engine_s=total_s,
        wasted_ratio=wasted_s / total_s if total_s else 0.0,
        late_kill_ratio=sum(end.is_late_kill for end in died) / len(died) if died else 0.0,
        next_try_admitted_ratio=sum(again) / len(again) if again else None,
        tries_after_refusal=len(again),
        retry_after_s_p50=quantile(asked_s, 0.5),
        retry_after_s_p99=quantile(asked_s, 0.99),
        tries_per_call=sum(map(len, tries)) / len(tries) if tries else 0.0,
        attempts_per_request=sum(call.attempts for call in asked) / len(asked) if asked else 0.0,
        cached_ratio=sum(call.cached_tokens for call in own)
        / max(1, sum(call.prompt_tokens for call in own)),
        at_home_ratio=at_home_ratio(own),
        queue_ms_p50=quantile(waits, 0.5),
        queue_ms_p99=quantile(waits, 0.99),
        high_e2e_s_p50=quantile(high_s, 0.5),
        high_e2e_s_p99=quantile(high_s, 0.99),
        replica_cpu_ratio=run.cpu[0],
        callers_cpu_ratio=run.cpu[1],
        lateness_s_max=run.lateness_s_max,
    )


def at_home_ratio(calls: Iterable[Call]) -> float:
    """Share of later steps that ran on the engine of the step before; 1 of none."""
    steps = sorted(
        (call.workflow, call.step, call.engine)
        for call in calls
        if call.workflow is not None and call.engine is not None
    )
    stayed = [now[2] == then[2] for now, then in pairwise(steps) if now[0] == then[0]]
    return sum(stayed) / len(stayed) if stayed else 1.0


def after_refusals(tries: Iterable[Sequence[Try]]) -> list[bool]:
    """Of every try that came after a pause the server had asked for: whether it was admitted."""
    return [
        then.is_admitted
        for each in tries
        for now, then in pairwise(each)
        if now.retry_after_s is not None
    ]


def ratio(ended: Sequence[Ended]) -> float:
    """Share that succeeded; 1 of none."""
    return sum(not end.has_died for end in ended) / len(ended) if ended else 1.0


def counts(values: Iterable[str | Fate]) -> dict[str, int]:
    return dict(Counter(map(str, values)).most_common())


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all are not above; 0 of none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
