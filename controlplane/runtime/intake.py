"""From what the wire said to what the core decides on: terms, rules, workflow, estimates, one frozen request.

Knows who may ask for what and under which limits; takes no money and no credits, and decides nothing.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import xxhash

from controlplane.admission.budget import Hold, Unit
from controlplane.admission.queue import QUEUE_CLASS
from controlplane.domain.catalog import Model, Scope, SloClass, Tenant
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import (
    EngineId,
    ModelName,
    RequestId,
    SloClassName,
    TenantId,
    WorkflowId,
)
from controlplane.domain.request import UNLIMITED_MICRO_USD, Request
from controlplane.runtime.accounts import Held
from controlplane.runtime.call import Call, Ticket, monotonic_ms, wall_ms
from controlplane.runtime.estimates import Estimates
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.model_choices import ModelChoices, names_a_choice
from controlplane.runtime.rulings import (
    Clock,
    PoolView,
    Sizes,
    joined,
    live_facts,
    refusal,
    static_facts,
)
from controlplane.runtime.workflow_state import WorkflowEntry, WorkflowStates
from controlplane.store.budgets import tenant_budget_id, unit_of
from controlplane.store.replicas import FIRST_GENERATION
from policies.documents import Phase
from policies.evaluate import Defer, Policy, Ruling, StaticPart, Terms, terms_for
from policies.facts import LiveFacts, StaticFacts

RIGHTS_KEPT: Final = 10_000
PARTS_KEPT: Final = 1_000
SESSIONS_KEPT: Final = 50_000
# A call that asks for a lower tier weighs this much of its class; none can ask for more than its class.
FLEX_WEIGHT_RATIO: Final = 0.5
# One call in so many is not refused for the least that its answer takes, so that answers which got
# shorter are noticed.
CALLS_PER_TRIAL: Final = 32
MS_PER_S: Final = 1_000
PERMILLE: Final = 1_000

# Told how the rules of a tenant ruled on a call; None: nothing entitles it.
Ruled = Callable[[Tenant, ModelName, Scope, Phase, StaticFacts, LiveFacts, Ruling | None], None]


@dataclass(frozen=True, slots=True)
class Rights:
    """Terms of a (tenant, model, scope) under one policy, with the masks and SLO class they come to.

    `parts` are the policy's rules for each kind of call that has come: what is known beforehand.
    """

    policy: Policy
    terms: Terms
    slo: SloClass
    regions: int
    gpu_types: int
    parts: dict[tuple[object, ...], tuple[StaticFacts, StaticPart]] = field(default_factory=dict)


@dataclass(slots=True)
class Prepared:
    """A call that can be decided on. `refuse` is set when its terms or rules rule it out beforehand."""

    ticket: Ticket
    workflow: WorkflowEntry | None
    refuse: Refuse | None


class Intake:
    """Prepares calls. Rights are worked out once for each (tenant, model, scope), policy and catalogue.

    `policy_for` names the bundle that rules for a tenant, `view` what rules may read of a pool; `ruled`
    is told of each ruling. `generation` names the life of this replica, whose money holds are of.
    """

    def __init__(
        self,
        *,
        replica_id: str,
        fleet: FleetState,
        workflows: WorkflowStates,
        estimates: Estimates,
        policy_for: Callable[[TenantId], Policy],
        ruled: Ruled,
    ) -> None:
        self._replica_id = replica_id
        self._fleet = fleet
        self._workflows = workflows
        self._estimates = estimates
        self._policy_for = policy_for
        self._ruled = ruled
        self.view: Callable[[ModelName], PoolView] = _unknown_pool
        self.generation: Callable[[], int] = lambda: FIRST_GENERATION
        # Chooses for calls that name a class of tasks instead of a model.
        self.choices: ModelChoices | None = None
        # Calls in flight by tenant; the gate counts them.
        self.tenant_calls: Counter[str] = Counter()
        self._clock = Clock()
        self._rights: OrderedDict[tuple[str, str, str], Rights] = OrderedDict()
        self._rights_catalog = -1
        self._homes: OrderedDict[tuple[str, str], EngineId] = OrderedDict()
        self._calls = 0

    async def prepare(self, call: Call) -> Prepared | Refuse:
        """The call as the core sees it. A refusal that comes alone has nothing to explain.

        Awaits only for a workflow that is not remembered. Raises StateUnavailable.
        """
        model = self.model_of(call)
        if isinstance(model, Refuse) and not names_a_choice(call.model):
            return model
        entry: WorkflowEntry | None = None
        if call.workflow is not None:
            found = await self._workflow(call, call.workflow)
            if isinstance(found, Refuse):
                return found
            entry = found
        if isinstance(model, Refuse):
            if self.choices is None:
                return model
            model = await self.choices.model_for(call, entry)
            if isinstance(model, Refuse):
                return model
        rights = self.rights_of(call, model, entry)
        sizes = self._sizes(call, model, rights, entry)
        static, part = self._part(call, model, rights, entry)
        live = live_facts(
            call,
            sizes,
            self.view(model.base),
            self.tenant_calls[call.principal.tenant.id],
            self._clock.read(),
        )
        ruling = self._rule(call, model, rights, entry, sizes, static, part, live)
        is_begun = entry is not None and sizes.step > 0
        refuse = _not_entitled(rights, model) or refusal(ruling, is_begun=is_begun)
        if refuse is None and ruling.model and ruling.model != model.name:
            moved = self._move(call, entry, ruling)
            if isinstance(moved, Refuse):
                refuse = moved
            else:
                model, rights = moved
                sizes = self._sizes(call, model, rights, entry)
        ticket = self._make_ticket(call, model, rights, entry, sizes, ruling, static, part, live)
        return Prepared(ticket, entry, refuse or _too_long(ticket))

    def model_of(self, call: Call) -> Model | Refuse:
        model = self._fleet.catalog.served(ModelName(call.model))
        if model is None:
            return Refuse(
                Reason.MODEL_NOT_FOUND,
                f"the model `{call.model[:100]}` does not exist; GET /v1/models lists what does",
            )
        return model

    def remember_home(self, ticket: Ticket) -> None:
        """The engine of a finished call holds its context: the session's next call goes there."""
        session = ticket.call.session
        if session is None:
            return
        key = (ticket.request.tenant, session)
        self._homes[key] = ticket.placement.decode.engine_id
        self._homes.move_to_end(key)
        if len(self._homes) > SESSIONS_KEPT:
            self._homes.popitem(last=False)

    def new_id(self) -> RequestId:
        self._calls += 1
        return RequestId(f"req-{self._replica_id}-{self._calls:x}")

    def rights_of(self, call: Call, model: Model, entry: WorkflowEntry | None) -> Rights:
        catalog = self._fleet.catalog
        if catalog.revision != self._rights_catalog:
            self._rights.clear()
            self._rights_catalog = catalog.revision
        tenant = call.principal.tenant
        policy = self._policy_for(tenant.id)
        scope = Scope.CHAT if entry is None else entry.record.scope
        asked = "" if entry is None else entry.record.slo_class
        # Everything that terms depend on, so that a change of it is seen at once.
        who = f"{tenant.id}\0{tenant.tenant_class}\0{tenant.slo_class}\0{asked}\0{policy.revision}"
        key = (who, model.name, scope)
        rights = self._rights.get(key)
        if rights is None:
            terms = terms_for(policy.bundle, tenant, model.name, scope)
            name = SloClassName(asked or terms.slo_class or tenant.slo_class)
            rights = self._rights[key] = Rights(
                policy=policy,
                terms=terms,
                slo=catalog.slo_classes.get(name) or catalog.slo_classes[tenant.slo_class],
                regions=self._fleet.region_mask(terms.region_names),
                gpu_types=self._fleet.gpu_mask(terms.gpu_type_names),
            )
            if len(self._rights) > RIGHTS_KEPT:
                self._rights.popitem(last=False)
        return rights

    # ------------------------------------------------------------ rules

    def _part(
        self, call: Call, model: Model, rights: Rights, entry: WorkflowEntry | None
    ) -> tuple[StaticFacts, StaticPart]:
        """The rules as far as key, model and flags decide them; worked out once for each kind of call."""
        kind = None if entry is None else entry.record.kind
        key = (
            call.principal.key_id,
            call.endpoint,
            call.is_stream,
            call.tools_digest != 0,
            kind,
        )
        found = rights.parts.get(key)
        if found is None:
            static = static_facts(call, model, rights.terms, rights.slo.name, entry)
            if len(rights.parts) >= PARTS_KEPT:
                rights.parts.clear()
            found = rights.parts[key] = (static, rights.policy.static_part(static))
        return found

    def _rule(
        self,
        call: Call,
        model: Model,
        rights: Rights,
        entry: WorkflowEntry | None,
        sizes: Sizes,
        static: StaticFacts,
        part: StaticPart,
        live: LiveFacts,
    ) -> Ruling:
        policy = rights.policy
        ruling = policy.rule(Phase.ADMIT, part, live)
        scope = Scope.CHAT if entry is None else entry.record.scope
        asked = ruling if rights.terms.is_allowed else None
        self._ruled(call.principal.tenant, model.name, scope, Phase.ADMIT, static, live, asked)
        if entry is not None and sizes.step > 0:
            of_step = policy.rule(Phase.STEP, part, live)
            asked = of_step if rights.terms.is_allowed else None
            self._ruled(call.principal.tenant, model.name, scope, Phase.STEP, static, live, asked)
            ruling = joined(ruling, of_step, policy.bundle.admission)
        return ruling

    def _move(
        self, call: Call, entry: WorkflowEntry | None, ruling: Ruling
    ) -> tuple[Model, Rights] | Refuse:
        """The model that a rule names instead, which the tenant must be entitled to as well."""
        by = ruling.fired[0] if ruling.fired else ""
        model = self._fleet.catalog.served(ModelName(ruling.model))
        if model is None:
            return Refuse(
                Reason.POLICY_ERROR,
                f"a rule routes this call to the model `{ruling.model}`, which does not exist; tell"
                " the operator",
                rule=by,
            )
        rights = self.rights_of(call, model, entry)
        return _not_entitled(rights, model) or (model, rights)

    # ------------------------------------------------------------ inside

    async def _workflow(self, call: Call, workflow: str) -> WorkflowEntry | Refuse:
        tenant = call.principal.tenant.id
        entry = await self._workflows.find(workflow, tenant)
        if entry is None:
            return Refuse(
                Reason.WORKFLOW_NOT_FOUND,
                f"the workflow `{workflow[:64]}` does not exist; POST /v1/workflows creates one",
            )
        if not self._workflows.is_running(entry):
            return Refuse(
                Reason.WORKFLOW_ENDED,
                f"the workflow `{entry.record.id}` is {entry.record.state}; create another one",
            )
        return entry

    def _home(self, call: Call, model: Model, entry: WorkflowEntry | None) -> EngineRow | None:
        """The engine that holds the context, as long as it takes calls for this model."""
        engine_id = None if entry is None else entry.home
        if engine_id is None and call.session is not None:
            engine_id = self._homes.get((call.principal.tenant.id, call.session))
        row = None if engine_id is None else self._fleet.row_of(engine_id)
        if row is None or not row.is_accepting or row.model != model.base:
            return None
        return row if model.adapter_of is None or model.name in row.adapters else None

    def _sizes(
        self, call: Call, model: Model, rights: Rights, entry: WorkflowEntry | None
    ) -> Sizes:
        terms = rights.terms
        prompt_tokens = self._estimates.prompt_tokens(model.base, call.prompt_bytes)
        room = max(1, model.context_tokens_max - prompt_tokens)
        asked = call.completion_tokens_max or terms.completion_tokens_default
        completion_max = max(1, min(asked, terms.completion_tokens_max, room))
        cost = model.cost_micro_usd(
            prompt=prompt_tokens, cached=0, completion=completion_max * call.n
        )
        deadline_ms = call.received_ms + (
            rights.slo.e2e_ms_max if call.deadline_ms is None else call.deadline_ms
        )
        home = self._home(call, model, entry)
        if entry is None:
            return Sizes(
                prompt_tokens,
                completion_max,
                cost,
                0,
                1,
                0,
                UNLIMITED_MICRO_USD,
                int(deadline_ms - call.received_ms),
                0,
                deadline_ms,
                home,
            )
        record = entry.record
        spent = record.spent_micro_usd + entry.spent_here_micro_usd
        limit = record.budget_limit_micro_usd
        return Sizes(
            prompt_tokens,
            completion_max,
            cost,
            entry.step_last + 1 if call.step is None else call.step,
            record.steps_expected,
            spent,
            UNLIMITED_MICRO_USD if limit is None else max(0, limit - spent),
            int(entry.deadline_ms - call.received_ms),
            entry.calls_in_flight,
            deadline_ms,
            home,
        )

    def _make_ticket(
        self,
        call: Call,
        model: Model,
        rights: Rights,
        entry: WorkflowEntry | None,
        sizes: Sizes,
        ruling: Ruling,
        static: StaticFacts,
        part: StaticPart,
        live: LiveFacts,
    ) -> Ticket:
        tenant = call.principal.tenant
        terms, slo = rights.terms, rights.slo
        received_ms = call.received_ms
        prompt_tokens = sizes.prompt_tokens
        completion_max = sizes.completion_tokens_max
        if ruling.completion_tokens_max is not None:
            completion_max = min(completion_max, ruling.completion_tokens_max)
        n = call.n if ruling.n_max is None else min(call.n, ruling.n_max)
        scope = Scope.CHAT if entry is None else entry.record.scope
        expected = self._estimates.completion_tokens(
            tenant.id, model.base, completion_max, call.completion_tokens_hint, scope
        )
        salt = xxhash.xxh3_64_intdigest(
            f"{tenant.cache_salt}\0{model.name}".encode(), call.tools_digest
        )
        digests, boundaries = self._fleet.prefixes.chain(call.prefix_bytes, salt)
        prompt_tokens, prefix_tokens = self._fleet.prefixes.tokens_at(
            digests, boundaries, call.prompt_bytes, prompt_tokens
        )
        deadline_ms, home = sizes.deadline_ms, sizes.home
        workflow_deadline_ms = deadline_ms
        gap_ms = 0
        workflow: WorkflowId | None = None
        if entry is not None:
            workflow = entry.record.id
            entry.model = model.base
            workflow_deadline_ms = entry.deadline_ms
            deadline_ms = min(deadline_ms, workflow_deadline_ms)
            gap_ms = terms.step_gap_ms if sizes.step + 1 < sizes.steps_expected else 0
        is_flex = call.priority_hint is not None and call.priority_hint < 0
        queue_class = ruling.queue_class or QUEUE_CLASS
        not_before_ms, waits_for_idle, idle_until_ms = _postponed(ruling.defer, received_ms)
        priority = self._priority(rights, ruling, queue_class)
        is_begun = workflow is not None and sizes.step > 0
        request = Request(
            id=call.request_id or self.new_id(),
            tenant=tenant.id,
            model=model.base,
            arrival_ms=int(received_ms),
            prompt_tokens=prompt_tokens,
            completion_tokens_max=completion_max * n,
            completion_tokens_expected=expected * n,
            prefix=digests,
            prefix_tokens=prefix_tokens,
            regions=rights.regions & self._fleet.region_mask(ruling.region_names),
            gpu_types=rights.gpu_types & self._fleet.gpu_mask(ruling.gpu_type_names),
            weight=terms.weight * FLEX_WEIGHT_RATIO if is_flex else terms.weight,
            ttft_ms_max=slo.ttft_ms_max,
            tpot_ms_max=slo.tpot_ms_max,
            deadline_ms=int(deadline_ms),
            value_micro_usd=slo.value_micro_usd,
            late_micro_usd_per_s=slo.late_micro_usd_per_s,
            scope=scope,
            workflow=workflow,
            step=sizes.step,
            steps_expected=sizes.steps_expected,
            workflow_deadline_ms=int(workflow_deadline_ms),
            workflow_spent_micro_usd=sizes.spent_micro_usd,
            workflow_remaining_micro_usd=sizes.remaining_micro_usd,
            calls_in_flight=sizes.calls_in_flight,
            fan_out_max=terms.fan_out_max,
            step_gap_ms=gap_ms,
            home=None if home is None else home.engine_id,
            is_single_engine=call.is_single_engine or not terms.may_disaggregate,
            priority=priority,
            is_begun=is_begun,
            not_before_ms=not_before_ms,
            waits_for_idle=waits_for_idle,
            is_preferred=False,
            completion_tokens_high=n
            * self._estimates.completion_tokens_high(tenant.id, model.base, completion_max, scope),
            completion_tokens_least=1
            if self._calls % CALLS_PER_TRIAL == 0
            else self._estimates.completion_tokens_least(
                tenant.id, model.base, completion_max, scope
            ),
            adapter="" if model.adapter_of is None else model.name,
        )
        completions = self._completions_held(request, call, model, ruling, terms, n)
        cost = model.cost_micro_usd(prompt=prompt_tokens, cached=0, completion=completions)
        reserved = max(1, cost)
        return Ticket(
            call=call,
            request=request,
            model=model,
            terms=terms,
            policy=rights.policy,
            static=static,
            part=part,
            live=live,
            completion_tokens_max=completion_max,
            n=n,
            cache_salt=tenant.cache_salt,
            reserved_micro_usd=reserved,
            tokens_held=completions,
            holds=_holds(call, entry, reserved, prompt_tokens + completions, self.generation()),
            queue_class=queue_class,
            idle_until_ms=idle_until_ms,
            rule=ruling.denied_by or ruling.shed_by or ruling.defer_by,
            warnings=ruling.warnings,
            ruling=ruling,
            opened_at_s=wall_ms() / 1000.0,
        )

    def _priority(self, rights: Rights, ruling: Ruling, queue_class: str) -> int:
        priority = rights.terms.priority
        if ruling.priority is not None:
            priority = min(priority, ruling.priority)
        known = rights.policy.bundle.admission.queue_classes.get(queue_class)
        return priority if known is None else min(priority, known.priority_max)

    def _completions_held(
        self, request: Request, call: Call, model: Model, ruling: Ruling, terms: Terms, n: int
    ) -> int:
        """Completion tokens that money is held for. A stream's hold grows with it, so the usual length
        will do; a whole answer can not be stopped on its way.
        """
        most = request.completion_tokens_max
        if ruling.reserve_permille is not None:
            return max(1, most * ruling.reserve_permille // PERMILLE)
        if call.is_stream:
            high = self._estimates.completion_tokens_high(
                request.tenant, model.base, most // max(1, n), request.scope
            )
            most = min(most, high * n)
        return max(1, int(most * terms.reserve_ratio))


def _holds(
    call: Call, entry: WorkflowEntry | None, micro_usd: int, tokens: int, generation: int
) -> tuple[Hold, ...]:
    """What is held for a call: the same in each account of a unit."""
    tenant = call.principal.tenant
    accounts = [tenant_budget_id(tenant.id)]
    if tenant.token_budget is not None:
        accounts.append(tenant.token_budget)
    accounts += call.principal.key_budgets
    if entry is not None:
        record = entry.record
        accounts += [
            each for each in (record.budget_id, record.token_budget_id) if each is not None
        ]
    return tuple(
        Held(account, Unit.MICRO_USD, micro_usd, generation)
        if unit_of(account) is Unit.MICRO_USD
        else Held(account, Unit.TOKENS, tokens, generation)
        for account in accounts
    )


def _postponed(defer: Defer | None, received_ms: float) -> tuple[int, bool, int]:
    """From when a call may run, whether only on idle capacity, and until when that is waited for."""
    if defer is None:
        return 0, False, 0
    opens_in_ms = defer.opens_in_ms(int(wall_ms()))
    not_before_ms = int(monotonic_ms() + opens_in_ms) if opens_in_ms else 0
    idle_until_ms = (
        0 if defer.wait_s_max is None else int(received_ms) + defer.wait_s_max * MS_PER_S
    )
    return not_before_ms, defer.waits_for_idle, idle_until_ms


def _unknown_pool(_: ModelName) -> PoolView:
    return PoolView(0, 0, 0, 0, "closed", is_overloaded=False)


def _not_entitled(rights: Rights, model: Model) -> Refuse | None:
    terms = rights.terms
    if terms.is_allowed:
        return None
    return Refuse(
        Reason.FORBIDDEN_BY_POLICY,
        f"the rule `{terms.denied_by}` does not allow `{model.name}` to this tenant",
        rule=terms.denied_by,
    )


def _too_long(ticket: Ticket) -> Refuse | None:
    """A prompt that leaves no room for an answer."""
    request = ticket.request
    context_tokens_max = ticket.model.context_tokens_max
    if request.prompt_tokens + 1 > context_tokens_max:
        return Refuse(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has about {request.prompt_tokens} tokens; `{request.model}` takes"
            f" {context_tokens_max}",
        )
    return None
