"""The bundles that this replica rules with: the active one, and the candidate of a rollout beside it.

PostgreSQL says which they are. `refresh` follows it: a bundle is compiled aside and comes into use by the
change of one reference, so a call sees either the old or the new one. A bundle that can not be used
never replaces one that can.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import xxhash
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.catalog import Scope, Tenant
from controlplane.domain.errors import ConfigurationError, StateUnavailable
from controlplane.domain.ids import ModelName, ReplicaId, TenantId
from controlplane.runtime.call import monotonic_ms
from controlplane.runtime.policy_compile import (
    PolicyCompiler,
    checked,
    checker,
    compile_files,
    report_from,
)
from controlplane.store import policies as store
from controlplane.store.policies import Mode, Rollout, RolloutConflict
from controlplane.telemetry.metrics import Metrics
from policies.documents import Phase
from policies.evaluate import Policy, Ruling
from policies.facts import LiveFacts, StaticFacts
from policies.replay import Judge, verdict_of
from policies.rollout import RolloutWatch, change_of

log = logging.getLogger(__name__)

# How often `refresh` is called when nobody wakes it. With the time to compile it bounds how late a replica is.
POLICY_INTERVAL_S = 0.5
# Compiled bundles kept: the active one, the candidate, and those to go back to.
POLICIES_KEPT = 4
_PERCENT = 100


@dataclass(frozen=True, slots=True)
class InUse:
    """What rules at one generation of the rollout."""

    generation: int
    active: Policy
    candidate: Policy | None
    mode: Mode
    percent: int


class PolicyState:
    """Belongs to one event loop. Made by `start`, then `refresh` is called every POLICY_INTERVAL_S."""

    def __init__(
        self,
        engine: AsyncEngine,
        policy: Policy,
        *,
        replica_id: ReplicaId,
        metrics: Metrics,
        compiler: PolicyCompiler,
        clock_ms: Callable[[], float] = monotonic_ms,
    ) -> None:
        self._engine = engine
        self._compiler = compiler
        self._author = f"replica:{replica_id}"
        self._metrics = metrics
        self._clock_ms = clock_ms
        self._in_use = InUse(0, policy, None, Mode.NONE, 0)
        # The generation that `refresh` has dealt with, well or badly.
        self._seen_generation = -1
        self._kept: dict[str, Policy] = {policy.revision: policy}
        self._judges: tuple[Judge, Judge] | None = None
        self._watch = RolloutWatch()
        self._watched_digest: str | None = None
        # Set when the rollout has changed: the next `refresh` need not wait for its time.
        self.woken = asyncio.Event()
        # Called after this replica itself has changed the rollout.
        self.on_taken_back: Callable[[], Awaitable[None]] | None = None
        self.is_loaded = False
        self.problem = ""
        metrics.policy_disagreements.watch(self._disagreements)

    @classmethod
    async def start(
        cls,
        engine: AsyncEngine,
        files: Mapping[str, str],
        *,
        where: str,
        replica_id: ReplicaId,
        metrics: Metrics,
        compiler: PolicyCompiler,
        clock_ms: Callable[[], float] = monotonic_ms,
    ) -> "PolicyState":
        """The state of a replica whose folder holds `files`, which rule when no bundle does yet.

        Raises ConfigurationError when they can not be used, StateUnavailable.
        """
        policy = await asyncio.to_thread(compile_files, files, where)
        state = cls(
            engine,
            policy,
            replica_id=replica_id,
            metrics=metrics,
            compiler=compiler,
            clock_ms=clock_ms,
        )
        row = await store.bootstrap(
            engine, policy.revision, files, author=state._author, check=checked(policy)
        )
        if row.active_digest != policy.revision:
            log.info(
                "policy_folder_not_used",
                extra={"fields": {"path": where, "version": row.active_digest}},
            )
        await state.refresh()
        return state

    # ------------------------------------------------------------ for the gate

    @property
    def policy(self) -> Policy:
        """The active bundle."""
        return self._in_use.active

    @property
    def candidate(self) -> Policy | None:
        """The bundle on trial. While there is one, each call is also told to `shadow`."""
        return self._in_use.candidate

    def ruling(self) -> tuple[Policy, ...]:
        """The bundles that rule for some tenant."""
        in_use = self._in_use
        return (in_use.active,) if in_use.candidate is None else (in_use.active, in_use.candidate)

    @property
    def in_use(self) -> InUse:
        return self._in_use

    @property
    def watch(self) -> RolloutWatch:
        """What was counted of the candidate at this replica."""
        return self._watch

    def policy_for(self, tenant_id: TenantId) -> Policy:
        """The bundle that rules for a tenant."""
        in_use = self._in_use
        if in_use.candidate is None or not in_canary(tenant_id, in_use.percent):
            return in_use.active
        return in_use.candidate

    def shadow(
        self,
        tenant: Tenant,
        model: ModelName,
        scope: Scope,
        phase: Phase,
        static: StaticFacts,
        live: LiveFacts,
        ruling: Ruling | None,
    ) -> None:
        """Tell how the bundle that rules for the tenant ruled; None: it gave no entitlement.

        The other bundle of the rollout rules on the same facts, without effect, and the two are compared.
        """
        judges = self._judges
        if judges is None:
            return
        active, candidate = judges
        is_canary = in_canary(tenant.id, self._in_use.percent)
        try:
            other = _ruling(
                active if is_canary else candidate, tenant, model, scope, phase, static, live
            )
        except Exception:
            # It is asked for comparison only: whatever it does, the call goes on.
            log.exception("policy_comparison_failed")
            if not is_canary:
                self._watch.erred("(an unexpected failure)")
            return
        by_active, by_candidate = (other, ruling) if is_canary else (ruling, other)
        if by_candidate is not None and by_candidate.errors:
            self._watch.erred(by_candidate.errors[0])
        change = change_of(active_denies=_denies(by_active), candidate_denies=_denies(by_candidate))
        self._watch.note(change, int(self._clock_ms()))
        self._metrics.policy_comparisons.add((change,))

    # ------------------------------------------------------------ following PostgreSQL

    def keep(self, policy: Policy) -> None:
        """A bundle that was compiled elsewhere in this process, and which PostgreSQL is about to name."""
        self._kept.setdefault(policy.revision, policy)

    async def refresh(self) -> None:
        """Follow what PostgreSQL says, and take a candidate back that must not stay.

        Raises StateUnavailable; what rules here then stays as it is.
        """
        row = await store.rollout(self._engine)
        if row.generation != self._seen_generation:
            # Whatever comes of it, the same bundles are not compiled again and again.
            self._seen_generation = row.generation
            try:
                await self._use(row)
            except StateUnavailable:
                self._seen_generation = -1
                raise
        why = self._watch.why_back(int(self._clock_ms())) if self.candidate is not None else ""
        if why:
            await self._take_back(why)

    async def _use(self, row: Rollout) -> None:
        assert row.active_digest is not None, "`start` has stored a first bundle"
        try:
            active = await self._compiled(row.active_digest)
        except ConfigurationError as error:
            self._failed(row.active_digest, error)
            return
        candidate, problem = None, ""
        if row.candidate_digest is not None:
            try:
                candidate = await self._compiled(row.candidate_digest)
            except ConfigurationError as error:
                problem = self._failed(row.candidate_digest, error)
        if candidate is not None and (
            row.mode is Mode.SHADOW or row.candidate_digest != self._watched_digest
        ):
            self._watch = RolloutWatch()
            self._watched_digest = row.candidate_digest
        self._judges = None if candidate is None else (Judge(active), Judge(candidate))
        self._in_use = InUse(
            row.generation,
            active,
            candidate,
            row.mode if candidate is not None else Mode.NONE,
            row.canary_percent if candidate is not None else 0,
        )
        self.is_loaded, self.problem = True, problem
        for digest in list(self._kept)[:-POLICIES_KEPT]:
            del self._kept[digest]
        log.info(
            "policy_in_use",
            extra={"fields": {"version": row.active_digest, "kind": str(row.mode)}},
        )

    async def _compiled(self, digest: str) -> Policy:
        """The bundle with this digest, moved to the end of those that are kept."""
        policy = self._kept.pop(digest, None)
        if policy is None:
            revision = await store.get_revision(self._engine, digest)
            if revision is None:
                raise ConfigurationError(f"there is no revision {digest}")
            where = f"revision {digest[:12]}"
            report = report_from(await store.report_of(self._engine, digest, checker()))
            policy = await self._compiler.compile(revision.files, where, report=report)
            if report is None and policy.revision == digest:
                # Replicas of the same program need not try the rules out again.
                with contextlib.suppress(StateUnavailable):
                    await store.keep_check(self._engine, digest, checked(policy))
        self._kept[digest] = policy
        return policy

    async def _take_back(self, why: str) -> None:
        """Drop the candidate, unless the rollout was changed in the meantime."""
        generation = self._in_use.generation
        try:
            row = await store.roll_back(
                self._engine, author=self._author, reason=f"automatic: {why}", generation=generation
            )
        except RolloutConflict:
            # Another replica or an operator was first; the next pass follows.
            return
        self._metrics.policy_rollbacks.add()
        log.error("policy_candidate_taken_back", extra={"fields": {"why": why}})
        self._seen_generation = row.generation
        await self._use(row)
        if self.on_taken_back is not None:
            await self.on_taken_back()

    def _failed(self, digest: str, error: ConfigurationError) -> str:
        self.problem = f"revision {digest[:12]} can not be used here: {error}"
        self._metrics.policy_load_failures.add()
        log.error("policy_load_failed", extra={"fields": {"version": digest, "why": str(error)}})
        return self.problem

    def _disagreements(self) -> dict[tuple[str, ...], float]:
        in_use = self._in_use
        total = in_use.active.disagreements
        if in_use.candidate is not None:
            total += in_use.candidate.disagreements
        return {(): float(total)}


def in_canary(tenant_id: TenantId, percent: int) -> bool:
    """Whether a tenant is among the `percent` that a candidate rules. A higher percentage only adds."""
    return percent > 0 and xxhash.xxh3_64_intdigest(tenant_id.encode()) % _PERCENT < percent


def _ruling(
    judge: Judge,
    tenant: Tenant,
    model: ModelName,
    scope: Scope,
    phase: Phase,
    static: StaticFacts,
    live: LiveFacts,
) -> Ruling | None:
    terms = judge.terms(tenant, model, scope)
    return judge.ruling(terms, phase, static, live) if terms.is_allowed else None


def _denies(ruling: Ruling | None) -> bool:
    """Whether a call is turned away; None: it has no entitlement."""
    return ruling is None or verdict_of(ruling).is_denied
