"""What the HTTP surfaces are given by the composition root.

They build nothing and read no environment.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.bus import Bus
from controlplane.domain.decision import Explanation
from controlplane.domain.ids import ReplicaId
from controlplane.runtime.admit import Gate
from controlplane.runtime.fleet_state import FleetState
from controlplane.runtime.loops import Leadership
from controlplane.runtime.model_choices import ModelChoices
from controlplane.runtime.plan_view import PlanView
from controlplane.runtime.planner_loop import PlannerLoop
from controlplane.runtime.policy_compile import PolicyCompiler
from controlplane.store.journal import Journal
from controlplane.telemetry.metrics import Metrics
from policies.evaluate import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingView:
    """One setting as operators may see it: `value` is None for a secret."""

    name: str
    variable: str
    value: str | None
    is_secret: bool
    is_set: bool
    source: Literal["environment", "default"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Collaborators of one replica. `explain` recomputes a decision that this replica remembers,
    else None. `policies_changed` tells all replicas that the rollout was changed here, with the bundle
    when one came with it.
    """

    engine: AsyncEngine
    pepper: bytes
    gate: Gate
    fleet: FleetState
    journal: Journal
    metrics: Metrics
    bus: Bus
    leader: Leadership
    planner: PlannerLoop
    plan_view: PlanView
    choices: ModelChoices
    compiler: PolicyCompiler
    replica_id: ReplicaId
    settings: tuple[SettingView, ...] = ()
    explain: Callable[[str], Explanation | None]
    policies_changed: Callable[[Policy | None], Awaitable[None]]
