"""The load of every pool as this replica causes it, with the seats that the live fleet offers.

Joins `admission/load.py`, which knows no engine, with `FleetState`, which knows no workflow.
"""

from collections.abc import Callable, Iterator

from controlplane.admission.appointments import WAIT_MS_MAX, WAIT_MS_MIN
from controlplane.admission.load import PoolLoad, Room, stretch_first
from controlplane.admission.working_set import WorkingSets
from controlplane.domain.catalog import Role
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import ModelName, WorkflowId
from controlplane.domain.outcome import Usage
from controlplane.domain.request import Request
from controlplane.reliability.slow_start import is_held_back
from controlplane.runtime.fleet_state import FleetState
from controlplane.scheduler.legs import WHOLE
from controlplane.scheduler.perf_model import Forecast, alone_ms
from policies.documents import Admission

WORKING_SET_RETRY_MS = 2_000
# A pool has room to spare below this saturation, and while nobody waits for it.
IDLE_PERMILLE_MAX = 500


class PoolLoads:
    """One `PoolLoad` for each model that was asked for; catalogues hold few."""

    def __init__(self, fleet: FleetState, admission: Admission) -> None:
        self._fleet = fleet
        self._admission = admission
        self._pools: dict[ModelName, PoolLoad] = {}
        self._working_sets = WorkingSets()
        self._replicas = 1
        # Whether calls wait for a model; the gate knows.
        self.is_waiting: Callable[[ModelName], bool] = lambda _: False

    def use_replicas(self, count: int) -> None:
        """How many replicas share the fleet, this one included."""
        self._replicas = max(1, count)

    def use_rules(self, admission: Admission) -> None:
        self._admission = admission

    def of(self, model: ModelName) -> PoolLoad:
        load = self._pools.get(model)
        if load is None:
            load = self._pools[model] = PoolLoad(self._stretch_first)
        return load

    def all(self) -> Iterator[tuple[ModelName, PoolLoad]]:
        yield from self._pools.items()

    def is_overloaded(self, model: ModelName) -> bool:
        """Calls wait too long, or workflows have been told to come back."""
        load = self._pools.get(model)
        return load is not None and (load.levels.is_overloaded or len(load.appointments) > 0)

    def is_below_part(self, request: Request) -> bool:
        """Whether the tenant holds less than its part of a pool that its equals want too."""
        load = self._pools.get(request.model)
        if load is None:
            return False
        commitments = load.commitments
        if commitments.seats(request.priority + 1) > 0.0:
            return False
        part = commitments.shares.part(request.tenant)
        return part < 1.0 and commitments.shares.seats(request.tenant) <= part * commitments.seats()

    def may_exceed(self, request: Request) -> bool:
        """Whether a call may exceed its engine's pace a little: the seats are others' for the most part, or its
        time is up before one is free.
        """
        load = self._pools.get(request.model)
        return load is not None and (self.is_below_part(request) or load.is_urgent(request))

    # ------------------------------------------------------------ workflows

    def may_begin(self, request: Request, now_ms: int) -> Refuse | None:
        """Why a workflow, or a call without one, can not begin now; None commits the pool to it."""
        if not self._admission.is_shedding:
            return None
        room = self._room(request, now_ms)
        if room is None:
            # No engine at all: placement says why, and better.
            return None
        refuse = self._rules_out(request, now_ms) or self.of(request.model).may_begin(
            request, room, now_ms
        )
        if refuse is None and request.workflow is not None:
            self._working_sets.begun(request.model, request.workflow, request.prompt_tokens)
        return refuse

    def would_begin(self, request: Request, now_ms: int) -> bool:
        """What `may_begin` would say, without committing to anything."""
        room = self._room(request, now_ms)
        if room is None or not self._admission.is_shedding:
            return True
        return self._rules_out(request, now_ms) is None and self.of(request.model).would_begin(
            request, room, now_ms
        )

    def is_idle(self, model: ModelName, now_ms: float) -> bool:
        """Whether a model has capacity to spare for work that can wait."""
        is_full = self._fleet.pool(model, now_ms).saturation_permille >= IDLE_PERMILLE_MAX
        return not is_full and not self.is_waiting(model)

    def continues(self, request: Request, now_ms: int) -> None:
        """A later step has come."""
        room = self._room(request, now_ms)
        if room is None:
            return
        self.of(request.model).continues(request, room, now_ms)
        if request.workflow is not None:
            self._working_sets.grew(request.model, request.workflow, request.prompt_tokens)

    def waited(self, request: Request, wait_ms: float) -> None:
        load = self.of(request.model)
        load.levels.waited(wait_ms, request.ttft_ms_max)
        load.waited(request, wait_ms)

    def learn(
        self,
        request: Request,
        row: EngineRow,
        seat_ms: float,
        reusable_tokens: int,
        usage: Usage,
    ) -> None:
        """A call has held a seat of `row` for this long, and reused this much of what its home should have had."""
        size = (
            usage.prompt_tokens,
            usage.prompt_tokens - usage.cached_tokens,
            usage.completion_tokens,
        )
        self.of(request.model).served(
            request,
            seat_ms=seat_ms,
            alone_ms=alone_ms(row.rates, *size),
            published_ms=alone_ms(row.published, *size),
        )
        if request.is_begun and reusable_tokens:
            self._working_sets.observed(request.model, reusable_tokens, usage.cached_tokens)

    def step_ended(self, request: Request, now_ms: int, *, is_in_time: bool | None) -> None:
        """A call has ended, in time or not (None: that says nothing); the steps after it stay promised."""
        load = self.of(request.model)
        room = self._room(request, now_ms)
        if is_in_time is not None:
            load.ended(is_in_time=is_in_time)
        if room is None:
            load.dropped(request, now_ms)
        else:
            load.step_ended(request, room, now_ms)

    def dropped(self, request: Request, now_ms: int) -> None:
        """A workflow that never ran, or has ended: what was promised to it is free."""
        self.of(request.model).dropped(request, now_ms)
        if request.workflow is not None:
            self._working_sets.ended(request.model, request.workflow)

    def missed(self, request: Request) -> None:
        """A call that was let in ran out of time."""
        self.of(request.model).ended(is_in_time=False)

    def ended(self, workflow: WorkflowId, now_ms: int) -> None:
        """A workflow has ended, whatever models it called."""
        for model, load in self._pools.items():
            load.workflow_ended(workflow, now_ms)
            self._working_sets.ended(model, workflow)

    # ------------------------------------------------------------ time

    def tick(self, now_ms: int) -> None:
        """Let time pass, and pace the engines by what it showed. Several times a second."""
        admission = self._admission
        for model, load in self._pools.items():
            load.tick(
                now_ms,
                admission.tpot_stretch_ratio_min,
                admission.tpot_stretch_ratio_max,
                self._seats_at(model),
            )
            self._working_sets.use_capacity(model, self._kv_tokens(model))
        for model in self._fleet.catalog.models:
            pool = self._pools.get(model)
            ratio = self._stretch_first if pool is None else pool.stretch_ratio
            self._fleet.use_stretch(model, ratio if admission.is_bounding else None)

    # ------------------------------------------------------------ inside

    @property
    def _stretch_first(self) -> float:
        admission = self._admission
        return stretch_first(admission.tpot_stretch_ratio_min, admission.tpot_stretch_ratio_max)

    def _rules_out(self, request: Request, now_ms: int) -> Refuse | None:
        """What speaks against a first step before the load is asked: a pool that warms up, a full KV cache."""
        if self._is_held_back(request, now_ms):
            warm_in_ms = self._fleet.pool(request.model, now_ms).warm_in_ms
            wait_ms = min(WAIT_MS_MAX, max(WAIT_MS_MIN, warm_in_ms))
            if request.workflow is not None and now_ms + wait_ms >= request.workflow_deadline_ms:
                return Refuse(
                    Reason.SHED_OVERLOAD,
                    f"the engines of `{request.model}` are new and warm up with work of higher priority"
                    " for longer than this workflow has time; send it later with a new deadline",
                    is_final=True,
                )
            return Refuse(
                Reason.SHED_OVERLOAD,
                f"the engines of `{request.model}` are new and warm up with work of higher priority;"
                " come back when they are warm",
                wait_ms,
            )
        if not self._working_sets.may_begin(request.model, request.prompt_tokens):
            return Refuse(
                Reason.SHED_OVERLOAD,
                f"the contexts of running workflows fill the KV cache of `{request.model}`; come back"
                " when some have ended",
                WORKING_SET_RETRY_MS,
            )
        return None

    def _is_held_back(self, request: Request, now_ms: int) -> bool:
        """The lowest priorities begin on a pool that warms up only while it has room to spare."""
        ramp_ratio = self._fleet.pool_ramp_ratio(request.model, now_ms)
        return is_held_back(ramp_ratio, request.priority) and not self.is_idle(
            request.model, now_ms
        )

    def _kv_tokens(self, model: ModelName) -> int:
        return sum(
            row.kv_tokens_capacity
            for row in self._fleet.rows_for(model)
            if row.is_accepting and row.role is not Role.PREFILL
        )

    def _seats_at(self, model: ModelName) -> Callable[[float], float]:
        """Seats that may be filled here, by how far calls stretch each other."""
        return lambda stretch: self._fleet.seats_at(model, stretch) / self._replicas

    def _room(self, request: Request, now_ms: int) -> Room | None:
        """Seats that may be filled here, and a call's time on an engine; None when nothing accepts."""
        best: EngineRow | None = None
        seats, taken = 0.0, 0
        for row in self._fleet.rows_for(request.model):
            if row.role is Role.PREFILL or not row.is_accepting or row.is_suspect:
                continue
            seats += seats_for(row, self._replicas)
            taken += row.seats_taken
            if best is None or row.decode_ms_base < best.decode_ms_base:
                best = row
        if best is None or seats <= 0.0:
            return None
        forecast = Forecast(request, best, 0, now_ms, WHOLE, 0.0)
        is_full = self.is_waiting(request.model)
        return Room(seats, forecast.e2e_ms, 1.0 if is_full else min(1.0, taken / seats))


def seats_for(row: EngineRow, replicas: int) -> float:
    """Seats of an engine that one of `replicas` can fill: what it holds, or its share where that is more.

    A replica borrows only what it needs, so what it holds while it is idle says little.
    """
    if row.seats_lent <= 0:
        return row.seats_capacity / replicas
    bound_of_all = row.seats_bound * row.seats_capacity / row.seats_lent
    share = min(float(row.seats_capacity), bound_of_all) / replicas
    return max(float(min(row.seats_lent, row.seats_bound)), share)
