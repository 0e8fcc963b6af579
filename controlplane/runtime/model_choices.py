"""Models by outcomes, live: policy, evidence of all replicas and the choice, which is remembered with its reasons.

Off, it asks nobody anything. Sampling beliefs takes milliseconds and happens in a thread.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, assert_never

import xxhash
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Model, Scope, Tenant
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.ids import ModelName, TenantId, WorkflowId
from controlplane.domain.outcome import WorkflowState
from controlplane.runtime.call import Call, wall_ms
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.workflow_state import WorkflowEntry
from controlplane.scheduler.model_choice import (
    NOTHING,
    Advice,
    Beliefs,
    Book,
    Chain,
    Choice,
    ChoiceClass,
    Evidence,
    Failed,
    Why,
    advise,
    affordable,
    beliefs_of,
    chain_views,
    choose,
    failed_of,
    fixed_rung,
    success_range,
)
from controlplane.store import model_choice as store
from controlplane.store import workflows
from controlplane.store.model_choice import ChoiceRecord, ChoiceRow
from controlplane.store.workflows import WorkflowRecord
from controlplane.telemetry.metrics import Metrics
from policies.documents import ModelChoice, ModelChoiceClass
from policies.evaluate import Policy, terms_for

AUTO: Final = "auto:"
LADDER: Final = "ladder:"
# How often outcomes are counted and evidence is read again.
CHOICE_INTERVAL_S: Final = 5.0
BELIEFS_KEPT: Final = 1_000
EVIDENCE_KEPT: Final = 100_000
# Rows of others may become visible a little after newer ones.
OVERLAP_S: Final = 10
# Chains that a record of a choice shows, the best first.
CHAINS_TOLD_MAX: Final = 8
_MICRO_USD: Final = 1e6
_MS_PER_S: Final = 1_000.0

# A tenant, and what it asked for.
Key = tuple[TenantId, str]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a name stands for to one tenant. `choice_class` None: a ladder that is only climbed."""

    name: str
    ladder: Chain
    default: ModelName
    choice_class: ChoiceClass | None
    policy_revision: str


@dataclass(frozen=True, slots=True)
class Standing:
    """How a class stands for one tenant: what is believed of it, and which models it may use."""

    asked: Asked
    beliefs: Beliefs
    usable: frozenset[ModelName]


@dataclass(slots=True)
class _Known:
    evidence: Evidence
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class _Kept:
    choice_class: ChoiceClass
    version: int
    beliefs: Beliefs


def names_a_choice(model: str) -> bool:
    return model.startswith((AUTO, LADDER))


class ModelChoices:
    """Belongs to one event loop. `refresh` is called every CHOICE_INTERVAL_S.

    `policy_for` names the policy that rules for a tenant, `policies` all that rule for some.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        fleet: FleetState,
        policy_for: Callable[[TenantId], Policy],
        policies: Callable[[], Iterable[Policy]],
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._fleet = fleet
        self._policy_for = policy_for
        self._policies = policies
        self._metrics = metrics
        self._evidence: OrderedDict[Key, dict[tuple[Failed, ModelName], _Known]] = OrderedDict()
        self._versions: dict[Key, int] = {}
        self._beliefs: OrderedDict[Key, _Kept] = OrderedDict()
        self._read_until: datetime | None = None
        self._reading = asyncio.Lock()

    # ------------------------------------------------------------ loop

    async def refresh(self) -> None:
        """Count what has ended and read what others counted. Raises StateUnavailable."""
        if not any(policy.bundle.model_choice.is_enabled for policy in self._policies()):
            return
        for counted in await store.count_outcomes(self._engine):
            self._metrics.model_outcomes.add(
                (counted.asked_model, counted.model, counted.outcome), counted.workflows
            )
        await self._read()

    async def _read(self) -> None:
        since = self._read_until
        rows = await store.evidence_since(
            self._engine, None if since is None else since - timedelta(seconds=OVERLAP_S)
        )
        for row in rows:
            key = (row.tenant, row.asked_model)
            of_key = self._evidence.setdefault(key, {})
            known = of_key.get((row.failed, row.model))
            if known is None or known.updated_at != row.updated_at:
                of_key[row.failed, row.model] = _Known(row.evidence, row.updated_at)
                self._versions[key] = self._versions.get(key, 0) + 1
                self._evidence.move_to_end(key)
            self._read_until = max(row.updated_at, self._read_until or row.updated_at)
        if since is None and self._read_until is None:
            self._read_until = datetime.fromtimestamp(0, UTC)
        while len(self._evidence) > EVIDENCE_KEPT:
            key, _ = self._evidence.popitem(last=False)
            self._versions.pop(key, None)

    # ------------------------------------------------------------ choosing

    async def choose(
        self,
        tenant: Tenant,
        name: str,
        *,
        workflow: WorkflowId,
        scope: Scope,
        deadline_s: float,
        budget_micro_usd: int | None,
        retry_of: WorkflowRecord | None = None,
    ) -> ChoiceRow | Refuse:
        """The model for a workflow that asks for `name`, to be written with it.

        `retry_of` is the failed workflow whose task it tries again. Raises StateUnavailable.
        """
        asked = self._asked(tenant, name)
        if isinstance(asked, Refuse):
            return asked
        usable = self._usable(tenant, asked, scope)
        if not usable:
            return Refuse(
                Reason.FORBIDDEN_BY_POLICY, f"no model of `{name}` may be used by this tenant"
            )
        failed, task_id = Failed(()), None
        if retry_of is not None:
            before = await store.get(self._engine, retry_of.id, tenant.id)
            if before is not None and before.asked_model == name:
                failed, task_id = failed_of((*before.failed, before.model)), before.task_id
        failed = failed_of(model for model in failed if model in asked.ladder)
        choice, record = await self._choice(
            tenant, asked, workflow, failed, usable, deadline_s, budget_micro_usd
        )
        self._metrics.model_choices.add((name, choice.model, choice.why))
        return ChoiceRow(
            task_id=task_id,
            asked_model=name,
            model=choice.model,
            default_model=asked.default,
            failed=failed,
            why=choice.why,
            propensity=choice.propensity,
            default_propensity=choice.default_propensity,
            can_climb=choice.can_climb,
            policy_revision=asked.policy_revision,
            record=record,
        )

    async def model_for(self, call: Call, entry: WorkflowEntry | None) -> Model | Refuse:
        """The model of a call that names a choice: its workflow's, chosen once and then kept.

        A call without a workflow can have no outcome, so it gets the default. Raises StateUnavailable.
        """
        tenant, name = call.principal.tenant, call.model
        if entry is None:
            asked = self._asked(tenant, name)
            if isinstance(asked, Refuse):
                return asked
            self._metrics.model_choices.add((name, asked.default, Why.NO_WORKFLOW))
            return self._model(asked.default)
        record = entry.record
        if record.model is None:
            choice = await self.choose(
                tenant,
                name,
                workflow=record.id,
                scope=record.scope,
                deadline_s=max(0.0, (record.deadline_epoch_ms - wall_ms()) / _MS_PER_S),
                budget_micro_usd=record.budget_limit_micro_usd,
            )
            if isinstance(choice, Refuse):
                return choice
            given = await store.give_model(self._engine, record.id, tenant.id, choice)
            if given is None:
                return Refuse(
                    Reason.WORKFLOW_NOT_FOUND, f"the workflow `{record.id}` does not exist"
                )
            # Another call may have read the record again meanwhile.
            entry.record = record = replace(entry.record, asked_model=given[0], model=given[1])
        if record.asked_model != name:
            return Refuse(
                Reason.INVALID_REQUEST,
                f"the workflow `{record.id}` has a model by `{record.asked_model}` already, and keeps"
                " it; name that or a model",
            )
        assert record.model is not None
        return self._model(record.model)

    async def advice(self, record: WorkflowRecord, tenant: Tenant) -> Advice | None:
        """What another try of a workflow that failed would be; None: there is none to advise."""
        ended = record.state in (WorkflowState.FAILED, WorkflowState.EXPIRED)
        if not ended or record.asked_model is None or record.model is None:
            return None
        asked = self._asked(tenant, record.asked_model)
        if isinstance(asked, Refuse):
            return None
        before = await store.get(self._engine, record.id, tenant.id)
        failed = failed_of((*(() if before is None else before.failed), record.model))
        failed = failed_of(model for model in failed if model in asked.ladder)
        usable = self._usable(tenant, asked, record.scope)
        if asked.choice_class is None:
            rung = fixed_rung(asked.ladder, failed, usable)
            if rung is None or rung.why is Why.TOP_OF_LADDER:
                return None
            return Advice(
                model=rung.model, is_advised=True, success_ratio=None, dollars_micro_usd=None
            )
        beliefs = await self._beliefs_of((tenant.id, asked.name), asked.choice_class)
        return advise(beliefs, failed, usable)

    async def standings(self, tenant: Tenant) -> list[Standing]:
        """Every class that a tenant may ask for, by name."""
        policy = self._policy_for(tenant.id)
        found = []
        for name in sorted(policy.bundle.model_choice.classes):
            asked = self._asked(tenant, AUTO + name)
            if isinstance(asked, Refuse) or asked.choice_class is None:
                continue
            beliefs = await self._beliefs_of((tenant.id, asked.name), asked.choice_class)
            found.append(Standing(asked, beliefs, self._usable(tenant, asked, Scope.AUTONOMOUS)))
        return found

    # ------------------------------------------------------------ inside

    def _asked(self, tenant: Tenant, name: str) -> Asked | Refuse:
        policy = self._policy_for(tenant.id)
        document = policy.bundle.model_choice
        unknown = Refuse(
            Reason.MODEL_NOT_FOUND,
            f"the model `{name[:100]}` does not exist; GET /v1/model-choice lists what is chosen by"
            " outcomes",
        )
        if not document.is_enabled:
            return unknown
        if name.startswith(AUTO):
            of_class = document.classes.get(name.removeprefix(AUTO))
            if of_class is None or not of_class.is_for(tenant.id, tenant.tenant_class):
                return unknown
            ladder = _names(document, of_class.ladder)
            return Asked(
                name,
                ladder,
                ModelName(of_class.default),
                _class_of(name, ladder, of_class),
                policy.revision,
            )
        rungs = _names(document, name.removeprefix(LADDER)) if name.startswith(LADDER) else ()
        return Asked(name, rungs, rungs[0], None, policy.revision) if rungs else unknown

    def _usable(self, tenant: Tenant, asked: Asked, scope: Scope) -> frozenset[ModelName]:
        """Models of the ladder that exist and that the tenant is entitled to."""
        bundle = self._policy_for(tenant.id).bundle
        return frozenset(
            model
            for model in asked.ladder
            if self._fleet.catalog.served(model) is not None
            and terms_for(bundle, tenant, model, scope).is_allowed
        )

    def _model(self, name: ModelName) -> Model | Refuse:
        model = self._fleet.catalog.served(name)
        if model is None:
            return Refuse(
                Reason.MODEL_NOT_FOUND, f"the model `{name}`, which was chosen, does not exist"
            )
        return model

    async def _choice(
        self,
        tenant: Tenant,
        asked: Asked,
        workflow: WorkflowId,
        failed: Failed,
        usable: frozenset[ModelName],
        deadline_s: float,
        budget_micro_usd: int | None,
    ) -> tuple[Choice, dict[str, Any]]:
        if asked.choice_class is None or asked.default not in usable:
            rung = fixed_rung(asked.ladder, failed, usable)
            assert rung is not None, "something is usable"
            return rung, {"chain": list(rung.chain)}
        beliefs = await self._beliefs_of((tenant.id, asked.name), asked.choice_class)
        fitting = affordable(
            beliefs, failed, deadline_s=deadline_s, budget_micro_usd=budget_micro_usd
        )
        # Of a first try the default is always one: it is what the tenant would have used.
        kept = usable & (fitting if failed else fitting | {asked.default})
        choice = choose(
            beliefs, tenant=tenant.id, workflow=workflow, failed=failed, usable=kept or usable
        )
        return choice, record_of(beliefs, choice, usable, kept)

    async def _beliefs_of(self, key: Key, choice_class: ChoiceClass) -> Beliefs:
        """Beliefs by the evidence as it was last read. Raises StateUnavailable the first time."""
        async with self._reading:
            if self._read_until is None:
                await self._read()
            version = self._versions.get(key, 0)
            kept = self._beliefs.get(key)
            if kept is None or kept.version != version or kept.choice_class != choice_class:
                book = self._book(key)
                prices = {
                    name: float(model.price_completion_micro_usd_per_mtok)
                    for name, model in self._fleet.catalog.models.items()
                    if name in choice_class.ladder
                }
                seed = xxhash.xxh3_64_intdigest("\0".join(key).encode())
                beliefs = await asyncio.to_thread(beliefs_of, choice_class, prices, book, seed)
                kept = self._beliefs[key] = _Kept(choice_class, version, beliefs)
                if len(self._beliefs) > BELIEFS_KEPT:
                    self._beliefs.popitem(last=False)
            return kept.beliefs

    def _book(self, key: Key) -> Book:
        now = datetime.fromtimestamp(wall_ms() / _MS_PER_S, UTC)
        return {
            which: known.evidence.aged((now - known.updated_at).total_seconds())
            for which, known in self._evidence.get(key, {}).items()
        }


def record_of(
    beliefs: Beliefs, choice: Choice, usable: frozenset[ModelName], fitting: frozenset[ModelName]
) -> dict[str, Any]:
    """What a choice was made by, in members of JSON."""
    return {
        "chain": list(choice.chain),
        "propensities": dict(choice.propensities),
        "follow_ratio": beliefs.follow_ratio,
        "not_allowed": sorted(set(beliefs.choice_class.ladder) - usable),
        "not_affordable": sorted(usable - fitting),
        "models": [model_view(beliefs, model) for model in beliefs.choice_class.ladder],
        "chains": [
            {
                "chain": list(view.chain),
                "success_ratio": view.success_ratio,
                "usd": view.dollars_micro_usd / _MICRO_USD,
                "holds_floor_ratio": view.holds_ratio,
            }
            for view in chain_views(beliefs)[:CHAINS_TOLD_MAX]
        ],
    }


def sentence_of(choice: ChoiceRecord) -> str:
    """Why a workflow has its model, in one sentence."""
    model, default = choice.model, choice.default_model
    match choice.why:
        case Why.LEARNED:
            words = f"the chain {_chain(choice)} costs least for a success among those that hold the floor"
        case Why.EXPLORED:
            words = "it is tried to learn what it does, as a share of the tasks is"
        case Why.HELD_OUT:
            words = "it is the default, which a share of the tasks keeps so that the saving can be measured"
        case Why.THIN_EVIDENCE:
            words = "it is the default: too few outcomes of the others were reported"
        case Why.FLOOR_OUT_OF_REACH:
            words = f"no chain holds the floor with confidence, so the default `{default}` is used"
        case Why.CLIMBED:
            words = f"{', '.join(f'`{name}`' for name in choice.failed)} failed before"
        case Why.TOP_OF_LADDER:
            words = "nothing of the ladder is above what failed before"
        case Why.FIXED_LADDER:
            words = "it is the next rung of the ladder"
        case Why.NO_WORKFLOW:
            words = "the call has no workflow and so no outcome"
        case _:
            assert_never(choice.why)
    return f"`{model}`: {words}"


def _chain(choice: ChoiceRecord) -> str:
    return " > ".join(choice.record.get("chain", [choice.model]))


def model_view(beliefs: Beliefs, model: ModelName, failed: Failed = ()) -> dict[str, Any]:
    """What is known of a model's tries; the range holds its rate of success with 95 % belief."""
    entry = beliefs.book.get((failed, model), NOTHING)
    low, high = success_range(entry, failed)
    return {
        "model": model,
        "tries": entry.tries,
        "successes": entry.successes,
        "reported": entry.reported,
        "success_ratio_low": low,
        "success_ratio_high": high,
        "usd": entry.spent_micro_usd / entry.tries / _MICRO_USD if entry.tries else None,
        "seconds": entry.seconds / entry.tries if entry.tries else None,
        "is_known": beliefs.is_known(model),
    }


def _names(document: ModelChoice, ladder: str) -> Chain:
    return tuple(ModelName(name) for name in document.ladders.get(ladder, ()))


def _class_of(name: str, ladder: Chain, of_class: ModelChoiceClass) -> ChoiceClass:
    return ChoiceClass(
        name=name,
        ladder=ladder,
        default=ModelName(of_class.default),
        success_floor_ratio=of_class.success_floor_ratio,
        margin_ratio=of_class.margin_ratio,
        confidence_ratio=of_class.confidence_ratio,
        outcomes_min=of_class.outcomes_min,
        explore_ratio=of_class.explore_ratio,
        holdout_ratio=of_class.holdout_ratio,
        tries_max=of_class.tries_max,
    )


async def retried(
    engine: AsyncEngine, workflow: WorkflowId, tenant: TenantId
) -> WorkflowRecord | Refuse:
    """The workflow that another one tries again. Refused unless it has failed or expired."""
    record = await workflows.get(engine, workflow, tenant)
    if record is None:
        return Refuse(Reason.WORKFLOW_NOT_FOUND, f"there is no workflow `{workflow}` to try again")
    if record.state not in (WorkflowState.FAILED, WorkflowState.EXPIRED):
        return Refuse(
            Reason.CONFLICT,
            f"the workflow `{workflow}` is {record.state}; what is tried again must have failed:"
            " report its outcome first",
        )
    return record
