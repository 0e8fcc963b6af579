"""Running workflows in memory: who they belong to, their deadline, their home engine, their calls in flight."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.ids import EngineId, ModelName, TenantId, WorkflowId
from controlplane.domain.outcome import WorkflowState
from controlplane.runtime.call import monotonic_ms, wall_ms
from controlplane.store import workflows
from controlplane.store.workflows import WorkflowRecord

WORKFLOWS_MAX = 100_000
# Another replica may have ended the workflow: ask again after this time.
RECORD_MS_MAX = 5_000

_ENDED_BY_TENANT = frozenset({WorkflowState.SUCCEEDED, WorkflowState.FAILED})


@dataclass(slots=True)
class WorkflowEntry:
    record: WorkflowRecord
    read_ms: float
    deadline_ms: float
    home: EngineId | None = None
    calls_in_flight: int = 0
    step_last: int = -1
    # Charged here since the record was read.
    spent_here_micro_usd: int = 0
    # That of its latest call here.
    model: ModelName | None = None


def _nobody(entry: WorkflowEntry) -> None:
    del entry


class WorkflowStates:
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._entries: OrderedDict[WorkflowId, WorkflowEntry] = OrderedDict()
        # Told once of each workflow that ran here and whose tenant has said how it ended.
        self.on_ended: Callable[[WorkflowEntry], None] = _nobody

    def recall(self, workflow: str, tenant: TenantId) -> WorkflowEntry | None:
        """The entry when it is fresh and belongs to `tenant`; it is asked for again otherwise."""
        entry = self._entries.get(WorkflowId(workflow))
        if entry is None or monotonic_ms() - entry.read_ms > RECORD_MS_MAX:
            return None
        return entry if entry.record.tenant == tenant else None

    async def find(self, workflow: str, tenant: TenantId) -> WorkflowEntry | None:
        """The workflow of this tenant, or None. Raises StateUnavailable."""
        entry = self.recall(workflow, tenant)
        if entry is not None:
            return entry
        record = await workflows.get(self._engine, WorkflowId(workflow), tenant)
        if record is None:
            return None
        return self.remember(record)

    def remember(self, record: WorkflowRecord) -> WorkflowEntry:
        now_ms = monotonic_ms()
        entry = self._entries.get(record.id)
        deadline_ms = now_ms + (record.deadline_epoch_ms - wall_ms())
        if entry is None:
            entry = self._entries[record.id] = WorkflowEntry(record, now_ms, deadline_ms)
            if len(self._entries) > WORKFLOWS_MAX:
                self._evict()
        else:
            has_ended = self.is_running(entry) and record.state in _ENDED_BY_TENANT
            entry.record = record
            entry.read_ms = now_ms
            entry.deadline_ms = deadline_ms
            entry.spent_here_micro_usd = 0
            if has_ended:
                self.on_ended(entry)
        self._entries.move_to_end(record.id)
        return entry

    def entry(self, workflow: WorkflowId) -> WorkflowEntry | None:
        """What is known of a workflow here, however old."""
        return self._entries.get(workflow)

    def is_running(self, entry: WorkflowEntry) -> bool:
        return entry.record.state is WorkflowState.RUNNING

    def in_flight(self) -> int:
        return sum(entry.calls_in_flight for entry in self._entries.values())

    def _evict(self) -> None:
        for workflow_id, entry in self._entries.items():
            if entry.calls_in_flight == 0:
                del self._entries[workflow_id]
                return
