"""From what the wire said to what the core decides on: terms, workflow, estimates, one frozen request.

Knows who may ask for what and under which limits; takes no money and no credits, and decides nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import xxhash

from controlplane.domain.catalog import Model, Scope, SloClass
from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.fleet import EngineRow
from controlplane.domain.ids import EngineId, ModelName, RequestId, SloClassName, WorkflowId
from controlplane.domain.request import UNLIMITED_MICRO_USD, Request
from controlplane.runtime.call import Call, Ticket, wall_ms
from controlplane.runtime.estimates import Estimates
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.workflow_state import WorkflowEntry, WorkflowStates
from controlplane.scheduler.prefix_index import chain
from controlplane.store.budgets import tenant_budget_id
from policies.evaluate import Terms, terms_for
from policies.load import Bundle

RIGHTS_KEPT: Final = 10_000
SESSIONS_KEPT: Final = 50_000
# A call that asks for a lower tier weighs this much of its class; none can ask for more than its class.
FLEX_WEIGHT_RATIO: Final = 0.5


@dataclass(frozen=True, slots=True)
class Rights:
    """Terms of a (tenant, model, scope), with the masks and SLO class they come to in this catalogue."""

    terms: Terms
    slo: SloClass
    regions: int
    gpu_types: int


@dataclass(slots=True)
class Prepared:
    """A call that can be decided on. `refuse` is set when its terms rule it out beforehand."""

    ticket: Ticket
    workflow: WorkflowEntry | None
    refuse: Refuse | None


class Intake:
    """Prepares calls. Rights are worked out once for each (tenant, model, scope) and catalogue."""

    def __init__(
        self,
        *,
        replica_id: str,
        fleet: FleetState,
        workflows: WorkflowStates,
        estimates: Estimates,
        bundle: Bundle,
    ) -> None:
        self._replica_id = replica_id
        self._fleet = fleet
        self._workflows = workflows
        self._estimates = estimates
        self._bundle = bundle
        self._rights: OrderedDict[tuple[str, str, str], Rights] = OrderedDict()
        self._rights_catalog = -1
        self._homes: OrderedDict[tuple[str, str], EngineId] = OrderedDict()
        self._calls = 0

    async def prepare(self, call: Call) -> Prepared | Refuse:
        """The call as the core sees it. A refusal that comes alone has nothing to explain.

        Awaits only for a workflow that is not remembered. Raises StateUnavailable.
        """
        model = self._fleet.catalog.models.get(ModelName(call.model))
        if model is None:
            return Refuse(
                Reason.MODEL_NOT_FOUND,
                f"the model `{call.model[:100]}` does not exist; GET /v1/models lists what does",
            )
        entry: WorkflowEntry | None = None
        if call.workflow is not None:
            found = await self._workflow(call, call.workflow)
            if isinstance(found, Refuse):
                return found
            entry = found
        rights = self._rights_of(call, entry)
        ticket = self._make_ticket(call, model, rights, entry)
        return Prepared(ticket, entry, _ruled_out(ticket))

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

    def _rights_of(self, call: Call, entry: WorkflowEntry | None) -> Rights:
        catalog = self._fleet.catalog
        if catalog.revision != self._rights_catalog:
            self._rights.clear()
            self._rights_catalog = catalog.revision
        tenant = call.principal.tenant
        scope = Scope.CHAT if entry is None else entry.record.scope
        asked = "" if entry is None else entry.record.slo_class
        # Everything of the tenant that terms depend on, so that a change of it is seen at once.
        who = f"{tenant.id}\0{tenant.tenant_class}\0{tenant.slo_class}\0{asked}"
        key = (who, call.model, scope)
        rights = self._rights.get(key)
        if rights is None:
            terms = terms_for(self._bundle, tenant, ModelName(call.model), scope)
            name = SloClassName(asked or terms.slo_class or tenant.slo_class)
            rights = self._rights[key] = Rights(
                terms=terms,
                slo=catalog.slo_classes.get(name) or catalog.slo_classes[tenant.slo_class],
                regions=self._fleet.region_mask(terms.region_names),
                gpu_types=self._fleet.gpu_mask(terms.gpu_type_names),
            )
            if len(self._rights) > RIGHTS_KEPT:
                self._rights.popitem(last=False)
        return rights

    def _home(self, call: Call, entry: WorkflowEntry | None) -> EngineRow | None:
        """The engine that holds the context, as long as it takes calls for this model."""
        engine_id = None if entry is None else entry.home
        if engine_id is None and call.session is not None:
            engine_id = self._homes.get((call.principal.tenant.id, call.session))
        row = None if engine_id is None else self._fleet.row_of(engine_id)
        return row if row is not None and row.is_accepting and row.model == call.model else None

    def _make_ticket(
        self, call: Call, model: Model, rights: Rights, entry: WorkflowEntry | None
    ) -> Ticket:
        tenant = call.principal.tenant
        terms, slo = rights.terms, rights.slo
        received_ms = call.received_ms
        prompt_tokens = self._estimates.prompt_tokens(model.name, call.prompt_bytes)
        room = max(1, model.context_tokens_max - prompt_tokens)
        asked = call.completion_tokens_max or terms.completion_tokens_default
        completion_max = max(1, min(asked, terms.completion_tokens_max, room))
        expected = self._estimates.completion_tokens(
            tenant.id, model.name, completion_max, call.completion_tokens_hint
        )
        salt = xxhash.xxh3_64_intdigest(
            f"{tenant.cache_salt}\0{model.name}".encode(), call.tools_digest
        )
        digests, boundaries = chain(call.prefix_bytes, salt)
        ratio = prompt_tokens / max(1, call.prompt_bytes)
        deadline_ms = received_ms + (
            slo.e2e_ms_max if call.deadline_ms is None else call.deadline_ms
        )
        home, step, steps, workflow_deadline_ms = self._home(call, entry), 0, 1, deadline_ms
        spent = in_flight = gap_ms = 0
        remaining = UNLIMITED_MICRO_USD
        workflow: WorkflowId | None = None
        if entry is not None:
            record = entry.record
            workflow = record.id
            step = entry.step_last + 1 if call.step is None else call.step
            steps = record.steps_expected
            workflow_deadline_ms = entry.deadline_ms
            deadline_ms = min(deadline_ms, workflow_deadline_ms)
            spent = record.spent_micro_usd + entry.spent_here_micro_usd
            in_flight = entry.calls_in_flight
            gap_ms = terms.step_gap_ms if step + 1 < steps else 0
            if record.budget_limit_micro_usd is not None:
                remaining = max(0, record.budget_limit_micro_usd - spent)
        is_flex = call.priority_hint is not None and call.priority_hint < 0
        request = Request(
            id=call.request_id or self.new_id(),
            tenant=tenant.id,
            model=model.name,
            arrival_ms=int(received_ms),
            prompt_tokens=prompt_tokens,
            completion_tokens_max=completion_max * call.n,
            completion_tokens_expected=expected * call.n,
            prefix=digests,
            prefix_tokens=tuple(int(boundary * ratio) for boundary in boundaries),
            regions=rights.regions,
            gpu_types=rights.gpu_types,
            weight=terms.weight * FLEX_WEIGHT_RATIO if is_flex else terms.weight,
            ttft_ms_max=slo.ttft_ms_max,
            tpot_ms_max=slo.tpot_ms_max,
            deadline_ms=int(deadline_ms),
            value_micro_usd=slo.value_micro_usd,
            late_micro_usd_per_s=slo.late_micro_usd_per_s,
            scope=Scope.CHAT if entry is None else entry.record.scope,
            workflow=workflow,
            step=step,
            steps_expected=steps,
            workflow_deadline_ms=int(workflow_deadline_ms),
            workflow_spent_micro_usd=spent,
            workflow_remaining_micro_usd=remaining,
            calls_in_flight=in_flight,
            fan_out_max=terms.fan_out_max,
            step_gap_ms=gap_ms,
            home=None if home is None else home.engine_id,
            is_single_engine=call.is_single_engine or not terms.may_disaggregate,
            priority=terms.priority,
            is_begun=step > 0,
            not_before_ms=0,
            waits_for_idle=False,
        )
        cost = model.cost_micro_usd(
            prompt=prompt_tokens, cached=0, completion=request.completion_tokens_max
        )
        return Ticket(
            call=call,
            request=request,
            model=model,
            terms=terms,
            completion_tokens_max=completion_max,
            cache_salt=tenant.cache_salt,
            reserved_micro_usd=max(1, int(cost * terms.reserve_ratio)),
            tenant_budget=tenant_budget_id(tenant.id),
            workflow_budget=None if entry is None else entry.record.budget_id,
            opened_at_s=wall_ms() / 1000.0,
        )


def _ruled_out(ticket: Ticket) -> Refuse | None:
    """What can be said of a call before any engine is looked at."""
    request, terms = ticket.request, ticket.terms
    if not terms.is_allowed:
        return Refuse(
            Reason.FORBIDDEN_BY_POLICY,
            f"the rule `{terms.denied_by}` does not allow `{request.model}` to this tenant",
        )
    context_tokens_max = ticket.model.context_tokens_max
    if request.prompt_tokens + 1 > context_tokens_max:
        return Refuse(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has about {request.prompt_tokens} tokens; `{request.model}` takes"
            f" {context_tokens_max}",
        )
    return None
