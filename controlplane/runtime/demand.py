"""The demand of every class, as the planner is to see it: measured over all replicas, and forecast.

Reads what requests were journalled, whichever replica served them; remembers nothing that PostgreSQL
does not hold.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from math import sqrt
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Catalog, Scope
from controlplane.domain.ids import ModelName, SloClassName
from controlplane.scheduler.planner.problem import CLASSES_MAX, Demand, RecentWorkflow
from controlplane.store import demand as store
from controlplane.store.demand import ClassCounts, ClassKey
from policies.evaluate import Policy

# Rates and sizes are measured over this time, the highest need and the burstiness over bins of a minute.
WINDOW_S: Final = 300
HISTORY_S: Final = 900
BIN_S: Final = 60
# One slot of the profile of a week.
SLOT_S: Final = 900
SLOTS_KEPT_S: Final = 35 * 86_400
# A client of the OpenAI SDK that is refused comes back twice (its default of `max_retries`), so about
# this many refusals are one workflow.
REFUSALS_PER_WORKFLOW: Final = 3.0
# What a call is taken to need where none of its class has ended yet.
PROMPT_TOKENS_USUAL: Final = 1_000.0
COMPLETION_TOKENS_USUAL: Final = 200.0
# A burst of one class counts as no more than this times the variance of a Poisson stream.
DISPERSION_RATIO_MAX: Final = 50.0
# What a class usually needs is a mean over about so many of its last workflows: agents' sizes differ so much
# that those of a few minutes say little.
USUAL_WORKFLOWS_MAX: Final = 200.0
# A class from which less than one workflow in a day is expected is not planned for.
ARRIVALS_PER_S_MIN: Final = 1.0 / 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One class as it was measured, before any forecast. Rates are workflows per second."""

    counts: ClassCounts
    arrivals_per_s: float
    arrivals_per_s_recent_max: float
    dispersion_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandSeen:
    """What came in the last minutes, by the database's clock."""

    at: datetime
    classes: tuple[Observed, ...]
    recent: tuple[store.RecentWorkflowRow, ...]


async def look(engine: AsyncEngine, *, recent_max: int = store.RECENT_MAX) -> DemandSeen:
    """Measure every class that came in the last HISTORY_S seconds. Raises StateUnavailable."""
    at = await store.now(engine)
    counted = await store.counts(engine, at - timedelta(seconds=WINDOW_S), at)
    bins = await store.arrivals(engine, at - timedelta(seconds=HISTORY_S), at, BIN_S)
    recent = await store.recent(engine, at - timedelta(seconds=HISTORY_S), at, recent_max)
    return DemandSeen(
        at=at,
        classes=tuple(observed(counts, bins.get(counts.key, {})) for counts in counted),
        recent=tuple(recent),
    )


def observed(counts: ClassCounts, bins: Mapping[int, int]) -> Observed:
    """A class with its rates. `bins` are the workflows begun in each minute of HISTORY_S, by number.

    Refused work is counted in: what is turned away today would be served by a larger fleet.
    """
    begun_per_s = counts.begun / WINDOW_S
    refused_per_s = counts.refused / REFUSALS_PER_WORKFLOW / WINDOW_S
    numbers = [float(bins.get(number, 0)) for number in range(HISTORY_S // BIN_S)]
    mean = sum(numbers) / len(numbers)
    variance = sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)
    dispersion = variance / mean if mean > 0.0 else 1.0
    return Observed(
        counts=counts,
        arrivals_per_s=begun_per_s + refused_per_s,
        arrivals_per_s_recent_max=max(numbers) / BIN_S + refused_per_s,
        dispersion_ratio=min(DISPERSION_RATIO_MAX, max(1.0, dispersion)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a class is expected to bring when a move made now has taken effect, workflows per second."""

    arrivals_per_s: float
    spread_per_s: float
    dispersion_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one workflow of a class needs; tokens of one step."""

    steps: float
    uncached_tokens: float
    context_tokens: float
    completion_tokens: float
    gap_s: float
    deadline_s: float


def sizes(counts: ClassCounts, catalog: Catalog, policy: Policy) -> Sizes | None:
    """Measured where calls have ended, else the usual. None: the catalogue lacks its SLO class."""
    slo_class = catalog.slo_classes.get(counts.slo_class)
    if slo_class is None:
        return None
    ended = counts.calls_ended
    steps = counts.steps_expected or 1.0
    if counts.begun > 0 and counts.calls > 0:
        # What came of each is nearer the truth than what was announced.
        steps = max(1.0, counts.calls / counts.begun)
    prompt = counts.prompt_tokens / ended if ended else PROMPT_TOKENS_USUAL
    cached = counts.cached_tokens / ended if ended else 0.0
    completion = counts.completion_tokens / ended if ended else COMPLETION_TOKENS_USUAL
    gap_s = counts.gap_s
    if gap_s is None:
        limits = policy.bundle.scopes.scopes.get(counts.key.scope)
        gap_s = 0.0 if limits is None or steps <= 1.0 else limits.step_gap_ms / 1000.0
    deadline_s = counts.deadline_s
    if deadline_s is None or deadline_s <= 0.0:
        deadline_s = slo_class.e2e_ms_max / 1000.0
    return Sizes(
        steps=steps,
        uncached_tokens=max(1.0, prompt - cached),
        context_tokens=max(1.0, prompt),
        completion_tokens=max(1.0, completion),
        gap_s=gap_s,
        deadline_s=deadline_s,
    )


def demands(
    seen: DemandSeen,
    expected: Mapping[str, Expected],
    usual: Mapping[str, "Slot"],
    catalog: Catalog,
    policy: Policy,
) -> tuple[Demand, ...]:
    """The classes as the planner takes them; those of models that are not declared are left out.

    Where nothing is forecast of a class, it is expected to go on as it is, give or take a Poisson
    stream's deviation over the window. What a class needs is what it `usual`ly did and what was measured
    of it lately, each by its number of workflows; one that brought nothing lately and is expected to come
    again needs what it usually did.
    """
    found = []
    for entry in seen.classes:
        needs = sizes(entry.counts, catalog, policy)
        if needs is None:
            continue
        known = usual.get(entry.counts.key.class_id)
        if known is not None:
            measured = float(entry.counts.begun) if entry.counts.calls_ended else 0.0
            needs = mixed(known.needs, known.workflows, needs, measured)
        ahead = expected.get(entry.counts.key.class_id) or Expected(
            arrivals_per_s=entry.arrivals_per_s,
            spread_per_s=sqrt(entry.arrivals_per_s * entry.dispersion_ratio / WINDOW_S),
            dispersion_ratio=entry.dispersion_ratio,
        )
        found.append(_demand(entry, entry.counts.slo_class, needs, ahead, catalog, policy))
    came = {entry.counts.key.class_id for entry in seen.classes}
    for class_id in sorted(expected.keys() - came):
        slot = usual.get(class_id)
        if slot is None or expected[class_id].arrivals_per_s < ARRIVALS_PER_S_MIN:
            continue
        found.append(_demand(slot, slot.slo_class, slot.needs, expected[class_id], catalog, policy))
    return tuple(demand for demand in found if demand is not None)[:CLASSES_MAX]


def _demand(
    source: "Observed | Slot",
    slo_class_name: str,
    needs: Sizes,
    ahead: Expected,
    catalog: Catalog,
    policy: Policy,
) -> Demand | None:
    key = source.counts.key if isinstance(source, Observed) else source.key
    rights = policy.bundle.tenant_classes.classes.get(key.tenant_class)
    slo_class = catalog.slo_classes.get(SloClassName(slo_class_name))
    if rights is None or slo_class is None or key.model not in catalog.models:
        return None
    return Demand(
        class_id=key.class_id,
        model=key.model,
        priority=rights.priority,
        weight=rights.weight,
        arrivals_per_s_now=source.arrivals_per_s if isinstance(source, Observed) else 0.0,
        arrivals_per_s_forecast=ahead.arrivals_per_s,
        arrivals_per_s_spread=ahead.spread_per_s,
        arrivals_per_s_recent_max=source.arrivals_per_s_recent_max
        if isinstance(source, Observed)
        else 0.0,
        arrivals_seen_s=float(WINDOW_S),
        arrivals_recent_s=float(BIN_S),
        dispersion_ratio=ahead.dispersion_ratio,
        steps=needs.steps,
        uncached_tokens=needs.uncached_tokens,
        context_tokens=needs.context_tokens,
        completion_tokens=needs.completion_tokens,
        gap_s=needs.gap_s,
        deadline_s=needs.deadline_s,
        # An SLO class says what a finished call is worth; a workflow is all of its calls.
        value_micro_usd=slo_class.value_micro_usd * needs.steps,
    )


def recent_workflows(
    seen: DemandSeen, catalog: Catalog, policy: Policy, models: frozenset[ModelName]
) -> tuple[RecentWorkflow, ...]:
    """The workflows of the last minutes for the replay that finds how far engines may be filled."""
    found = []
    for row in seen.recent:
        slo_class = catalog.slo_classes.get(row.slo_class)
        rights = policy.bundle.tenant_classes.classes.get(row.key.tenant_class)
        if slo_class is None or rights is None or row.key.model not in models:
            continue
        found.append(
            RecentWorkflow(
                model=row.key.model,
                arrival_s=row.arrival_s,
                steps=row.steps,
                uncached_tokens=max(1.0, row.prompt_tokens - row.cached_tokens),
                context_tokens=max(1.0, row.prompt_tokens),
                completion_tokens=max(1.0, row.completion_tokens),
                gap_s=row.gap_s,
                deadline_s=row.deadline_s or slo_class.e2e_ms_max / 1000.0,
                value=rights.weight * slo_class.value_micro_usd * row.steps,
            )
        )
    return tuple(sorted(found, key=lambda workflow: workflow.arrival_s))


# ---------------------------------------------------------------- slots of a quarter of an hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What one class brought in a slot: workflows, and what each needed."""

    key: ClassKey
    slo_class: str
    started_at: datetime
    workflows: float
    needs: Sizes

    def body(self) -> dict[str, Any]:
        return {
            "model": self.key.model,
            "tenant_class": self.key.tenant_class,
            "scope": str(self.key.scope),
            "slo_class": self.slo_class,
            "workflows": self.workflows,
            **asdict(self.needs),
        }


def mixed(known: Sizes, weight: float, lately: Sizes, lately_weight: float) -> Sizes:
    """The mean of two measurements by their numbers of workflows; without any, the first."""
    part = lately_weight / (weight + lately_weight) if lately_weight > 0.0 else 0.0
    return Sizes(
        **{
            one.name: (1.0 - part) * getattr(known, one.name) + part * getattr(lately, one.name)
            for one in fields(Sizes)
        }
    )


def remembered(known: Slot | None, slot: Slot) -> Slot:
    """What a class usually needs, after one slot more: a mean in which old slots fade.

    `workflows` is the number that the mean stands for, at most `USUAL_WORKFLOWS_MAX`.
    """
    if known is None:
        return replace(slot, workflows=min(slot.workflows, USUAL_WORKFLOWS_MAX))
    weight = max(0.0, min(known.workflows, USUAL_WORKFLOWS_MAX - slot.workflows))
    return replace(
        slot,
        needs=mixed(known.needs, weight, slot.needs, slot.workflows),
        workflows=min(weight + slot.workflows, USUAL_WORKFLOWS_MAX),
    )


def slot_of(record: store.SlotRecord) -> Slot:
    body = record.body
    return Slot(
        key=ClassKey(
            model=ModelName(body["model"]),
            tenant_class=body["tenant_class"],
            scope=Scope(body["scope"]),
        ),
        slo_class=body["slo_class"],
        started_at=record.started_at,
        workflows=float(body["workflows"]),
        needs=Sizes(**{one.name: float(body[one.name]) for one in fields(Sizes)}),
    )


def slot_start(at: datetime) -> datetime:
    """The start of the slot that `at` lies in."""
    epoch_s = int(at.timestamp())
    return datetime.fromtimestamp(epoch_s - epoch_s % SLOT_S, UTC)


@dataclass(slots=True)
class SlotBook:
    """Writes down each slot once it is over; a slot that nobody led through is written later."""

    engine: AsyncEngine
    slots_per_pass_max: int = 8
    _last: datetime | None = field(default=None, init=False)

    async def close(
        self, epoch: int, at: datetime, catalog: Catalog, policy: Policy
    ) -> list[tuple[datetime, dict[str, Slot]]]:
        """Write the slots that are over by `at`, oldest first. Returns those that this call wrote."""
        current = slot_start(at)
        if self._last is None:
            self._last = await store.last_slot(self.engine)
        if self._last is None:
            # What came before the first slot that is seen as a whole is not known.
            self._last = current - timedelta(seconds=SLOT_S)
        written = []
        for _ in range(self.slots_per_pass_max):
            start = self._last + timedelta(seconds=SLOT_S)
            if start + timedelta(seconds=SLOT_S) > at:
                break
            counted = await store.counts(self.engine, start, start + timedelta(seconds=SLOT_S))
            slots = {
                slot.key.class_id: slot
                for counts in counted
                if (slot := _slot(counts, start, catalog, policy)) is not None
            }
            bodies = {class_id: slot.body() for class_id, slot in slots.items()}
            if await store.add_slot(self.engine, epoch, start, bodies):
                written.append((start, slots))
            self._last = start
        if written:
            await store.forget_slots(self.engine, at - timedelta(seconds=SLOTS_KEPT_S))
        return written


def _slot(counts: ClassCounts, start: datetime, catalog: Catalog, policy: Policy) -> Slot | None:
    needs = sizes(counts, catalog, policy)
    if needs is None:
        return None
    return Slot(
        key=counts.key,
        slo_class=counts.slo_class,
        started_at=start,
        workflows=counts.begun + counts.refused / REFUSALS_PER_WORKFLOW,
        needs=needs,
    )
