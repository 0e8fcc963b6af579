"""A small declared world, and rows for the journal, for the tests of the store."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.domain.ids import ReplicaId, TenantId
from controlplane.store import catalog, replicas
from controlplane.store.cluster import ClusterDocument, parse_cluster
from controlplane.store.journal import AttemptRow, Charge, DecisionRow, OpenedRow, SettledRow

CLUSTER = """
regions: [eu, us]
gpu_types:
  - name: h100
    hbm_bytes: 80_000_000_000
    bandwidth_bytes_per_s: 3.35e+12
    flops_per_s: 9.89e+14
    price_micro_usd_per_hour: 2_500_000
    price_source: list
    price_date: "2026-11-01"
models:
  - name: org/small
    parameters: 8_000_000_000
    layers: 32
    hidden_size: 4096
    weights_bytes: 16_000_000_000
    kv_bytes_per_token: 131_072
    context_tokens_max: 32_768
    load_ms: 20_000
    price_prompt_micro_usd_per_mtok: 200_000
    price_cached_micro_usd_per_mtok: 50_000
    price_completion_micro_usd_per_mtok: 800_000
slo_classes:
  - {name: interactive, ttft_ms_max: 1000, tpot_ms_max: 50, e2e_ms_max: 30_000,
     value_micro_usd: 10_000, late_micro_usd_per_s: 100}
tenants:
  - {id: acme, name: Acme, tenant_class: gold, slo_class: interactive, budget_usd: 1.0}
  - {id: bolt, name: Bolt, tenant_class: bronze, slo_class: interactive, budget_usd: 0.00001}
nodes:
  - id: n1
    region: eu
    gpu_type: h100
    gpus: 8
    address: 10.0.0.1
    engines:
      - {engine_id: n1/0, kind: simulated, model: org/small, role: both, gpus: 1,
         options: {speed: 10}}
  - {id: n2, region: us, gpu_type: h100, gpus: 4, address: node2.internal}
"""
ACME, BOLT = TenantId("acme"), TenantId("bolt")
R1, R2 = ReplicaId("r1"), ReplicaId("r2")


def cluster() -> ClusterDocument:
    return parse_cluster(CLUSTER)


async def populate(engine: AsyncEngine) -> None:
    await catalog.apply_cluster(engine, cluster())
    await replicas.register(engine, R1)
    await replicas.register(engine, R2)


@dataclass(frozen=True)
class Rows:
    """Rows of one request, with what a test does not care about filled in."""

    id: str
    tenant: str = ACME
    replica: str = R1
    workflow: str | None = None
    workflow_budget: str | None = None
    step: int = 0
    at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def opened(self, reserved: int = 0) -> OpenedRow:
        return OpenedRow(
            id=self.id,
            tenant_id=self.tenant,
            key_id="k1",
            replica_id=self.replica,
            workflow_id=self.workflow,
            step=self.step,
            model="org/small",
            endpoint="chat",
            is_stream=True,
            reserved_micro_usd=reserved,
            opened_at=self.at,
        )

    def decided(self, number: int = 0) -> DecisionRow:
        return DecisionRow(
            request_id=self.id,
            number=number,
            replica_id=self.replica,
            verdict="admit",
            reason=None,
            decode_engine_id="n1/0",
            prefill_engine_id=None,
            cost_micro_usd=12.5,
            ttft_ms_predicted=33.25,
            cached_tokens_predicted=128,
            policy_revision="abc",
            decided_at=self.at,
            record=None,
        )

    def attempted(self, number: int = 0, detail: str = "") -> AttemptRow:
        return AttemptRow(self.id, number, "whole", "n1/0", "ok", detail)

    def settled(self, charged: int = 0, state: str = "succeeded") -> SettledRow:
        return SettledRow(
            id=self.id,
            state=state,
            reason=None,
            prompt_tokens=1000,
            cached_tokens=128,
            completion_tokens=50,
            is_usage_estimated=False,
            ttft_ms=31.5,
            tpot_ms=11.25,
            e2e_ms=600.0,
            queue_ms=0.0,
            settled_micro_usd=charged,
            ended_at=self.at,
            tenant_id=self.tenant,
            workflow_id=self.workflow,
            step=self.step,
            replica_id=self.replica,
            charges=(
                Charge(f"tenant:{self.tenant}", charged),
                *(() if self.workflow_budget is None else (Charge(self.workflow_budget, charged),)),
            ),
        )
