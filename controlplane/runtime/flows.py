"""Which workflows and calls live on which engine: their urgency and their load, summed up in the rows.

A workflow lives where its latest step went, from its first step until it ends, its deadline comes or it
has been silent for long; a call without a workflow for as long as it runs. Every change costs the same,
however many there are.
"""

from dataclasses import dataclass
from heapq import heappop, heappush

from controlplane.admission.commitments import IDLE_GAPS, IDLE_MS
from controlplane.domain.decision import Placement
from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.flow import (
    duty_ratio,
    step_ms_added,
    steps_left,
    urgency_micro_usd_per_s,
)
from controlplane.scheduler.tick_log import TickLog

# Workflows remembered at most, about 400 bytes each; of what comes beyond, only running calls count.
FLOWS_MAX = 100_000


@dataclass(slots=True)
class Flow:
    """What one workflow or call adds to a row, and until when it stays without a call in flight."""

    row: EngineRow
    micro_usd_per_s: float
    ms_per_step: float
    calls: int
    until_ms: float


@dataclass(slots=True)
class _Held:
    """A placement that was taken: kept whole, so that its identity is not given to another one."""

    placement: Placement
    flow: str
    is_last: bool
    prefill_micro_usd_per_s: float


class Flows:
    """The sums `flows_micro_usd_per_s` and `flows_ms_per_step` of all rows. Owned by `FleetState`."""

    def __init__(self, ticks: TickLog) -> None:
        self._ticks = ticks
        self._flows: dict[str, Flow] = {}
        self._held: dict[int, _Held] = {}
        self._prefilling: dict[int, _Held] = {}
        # Flows by row; sums are set to exactly zero when the last one leaves.
        self._counts: dict[int, int] = {}
        # When each silent flow may be over; entries of flows that went on are passed over.
        self._ends: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._flows)

    def taken(self, request: Request, placement: Placement, now_ms: float) -> None:
        """A call goes to its engines. Their rows are in the tick log already."""
        row = placement.decode
        duty = duty_ratio(request, placement.e2e_ms_predicted)
        urgency = urgency_micro_usd_per_s(request, int(now_ms))
        key = str(request.id if request.workflow is None else request.workflow)
        known = self._flows.get(key)
        if known is None and len(self._flows) >= FLOWS_MAX:
            key = str(request.id)
        calls = 1
        if known is not None:
            if known.row is not row:
                self._ticks.before_change(known.row)
            self._leave(known)
            calls += known.calls
        gap_ms = request.step_gap_ms
        until_ms = float(request.workflow_deadline_ms)
        self._flows[key] = flow = Flow(
            row, urgency * duty, step_ms_added(request, row) * duty, calls, until_ms
        )
        self._join(flow)
        held = _Held(placement, key, key == request.id or steps_left(request) == 0, 0.0)
        flow.until_ms = min(until_ms, now_ms + placement.e2e_ms_predicted + _silence_ms(gap_ms))
        self._held[id(placement)] = held
        prefill = placement.prefill
        if prefill is not None:
            # Who waits for a prompt to be computed is delayed by the next one in full.
            held.prefill_micro_usd_per_s = urgency
            self._add(prefill, urgency, 0.0, 1)
            self._prefilling[id(placement)] = held

    def released_prefill(self, placement: Placement) -> None:
        """The prompt's part is over. Its row is in the tick log already."""
        held = self._prefilling.pop(id(placement), None)
        if held is not None and placement.prefill is not None:
            self._add(placement.prefill, -held.prefill_micro_usd_per_s, 0.0, -1)

    def moved(self, before: Placement, after: Placement) -> None:
        """A call whose prefill failed goes on under another placement. Its rows are in the tick log."""
        held = self._held.pop(id(before), None)
        if held is None:
            return
        held.placement = after
        self._held[id(after)] = held
        if after.prefill is not None:
            self._add(after.prefill, held.prefill_micro_usd_per_s, 0.0, 1)
            self._prefilling[id(after)] = held

    def released(self, placement: Placement) -> None:
        """A call has ended; with it its flow, unless further steps are expected."""
        held = self._held.pop(id(placement), None)
        flow = None if held is None else self._flows.get(held.flow)
        if held is None or flow is None:
            return
        flow.calls -= 1
        if flow.calls > 0:
            return
        if held.is_last:
            self._end(held.flow)
        else:
            heappush(self._ends, (flow.until_ms, held.flow))

    def ended(self, workflow: str) -> None:
        """The workflow has ended; calls of it that still run are released later, to no effect."""
        if workflow in self._flows:
            self._end(workflow)

    def expire(self, now_ms: float) -> None:
        """End the flows whose time is over and that have no call in flight."""
        while self._ends and self._ends[0][0] <= now_ms:
            _, key = heappop(self._ends)
            flow = self._flows.get(key)
            if flow is None or flow.calls > 0:
                continue
            if flow.until_ms <= now_ms:
                self._end(key)
            else:
                heappush(self._ends, (flow.until_ms, key))

    # ------------------------------------------------------------ inside

    def _end(self, key: str) -> None:
        flow = self._flows.pop(key)
        self._ticks.before_change(flow.row)
        self._leave(flow)

    def _join(self, flow: Flow) -> None:
        self._add(flow.row, flow.micro_usd_per_s, flow.ms_per_step, 1)

    def _leave(self, flow: Flow) -> None:
        self._add(flow.row, -flow.micro_usd_per_s, -flow.ms_per_step, -1)

    def _add(self, row: EngineRow, micro_usd_per_s: float, ms_per_step: float, count: int) -> None:
        left = self._counts.get(id(row), 0) + count
        if left <= 0:
            self._counts.pop(id(row), None)
            row.flows_micro_usd_per_s = 0.0
            row.flows_ms_per_step = 0.0
            return
        self._counts[id(row)] = left
        row.flows_micro_usd_per_s += micro_usd_per_s
        row.flows_ms_per_step += ms_per_step


def _silence_ms(gap_ms: int) -> float:
    return float(max(IDLE_MS, IDLE_GAPS * gap_ms))
