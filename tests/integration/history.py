"""A made-up past in the database: workflows, calls, refusals, with the plain values that they were made of."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

ENGINES = ("l40s-8b-a", "l40s-8b-b", "a100-70b")
TENANTS = ("aurora", "borealis", "cumulus")
STATES = ("succeeded", "succeeded", "failed", "expired", "cancelled")
MODEL = "llama-3.1-8b"


@dataclass
class Past:
    """What was written. Money in micro-dollars."""

    workflows: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[dict[str, Any]] = field(default_factory=list)


def write_past(database_url: str, replica_id: str, *, seed: int, minutes: float = 240.0) -> Past:
    """Twelve workflows of three calls, some lone calls, and refusals, within the last `minutes`."""
    random, past, now = Random(seed), Past(), datetime.now(UTC)

    def instant() -> datetime:
        return now - timedelta(minutes=random.uniform(0.1, minutes))

    for number in range(12):
        began = instant()
        past.workflows.append(
            {
                "id": f"wf-{seed}-{number}",
                "tenant": random.choice(TENANTS),
                "state": random.choice(STATES),
                "began": began,
                "ended": min(now, began + timedelta(seconds=30)),
            }
        )
    homes = [workflow for workflow in past.workflows for _ in range(3)] + [None] * 6
    for number, workflow in enumerate(homes):
        state = random.choice(("succeeded", "succeeded", "succeeded", "failed", "cancelled"))
        past.calls.append(
            {
                "id": f"req-{seed}-{number}",
                "tenant": workflow["tenant"] if workflow else random.choice(TENANTS),
                "workflow": workflow["id"] if workflow else None,
                "workflow_state": workflow["state"] if workflow else None,
                "step": number % 3,
                "state": state,
                "cost": random.randrange(1, 5_000) if state == "succeeded" else number,
                "ttft_ms": random.choice((50.0, 99_000.0)),
                "at": workflow["began"] if workflow else instant(),
                "engine": random.choice(ENGINES),
            }
        )
    for number in range(10):
        past.refusals.append(
            {
                "id": f"no-{seed}-{number}",
                "tenant": random.choice(TENANTS),
                "reason": random.choice(("shed_overload", "insufficient_quota", "no_capacity")),
                "at": instant(),
            }
        )
    with psycopg.connect(database_url) as connection:
        for workflow in past.workflows:
            connection.execute(
                "INSERT INTO workflows (id, tenant_id, kind, scope, steps_expected, slo_class,"
                " deadline_at, state, created_at, ended_at)"
                " SELECT %s, id, 'fix', 'chat', 3, slo_class, %s, %s, %s, %s FROM tenants"
                " WHERE id = %s",
                (workflow["id"], workflow["began"] + timedelta(minutes=5), workflow["state"],
                 workflow["began"], workflow["ended"], workflow["tenant"]),
            )  # fmt: skip
        for call in past.calls:
            connection.execute(
                "INSERT INTO requests (id, tenant_id, key_id, replica_id, workflow_id, step, model,"
                " endpoint, is_stream, state, prompt_tokens, cached_tokens, completion_tokens,"
                " ttft_ms, e2e_ms, queue_ms, settled_micro_usd, opened_at, ended_at)"
                " VALUES (%s, %s, 'k', %s, %s, %s, %s, 'chat', true, %s, 100, 40, 10, %s, 200, 5,"
                " %s, %s, %s)",
                (call["id"], call["tenant"], replica_id, call["workflow"], call["step"], MODEL,
                 call["state"], call["ttft_ms"], call["cost"], call["at"], call["at"]),
            )  # fmt: skip
            connection.execute(
                "INSERT INTO ledger (request_id, tenant_id, workflow_id, amount_micro_usd,"
                " settled_at) VALUES (%s, %s, %s, %s, %s)",
                (call["id"], call["tenant"], call["workflow"], call["cost"], call["at"]),
            )
            connection.execute(
                "INSERT INTO decisions (request_id, number, replica_id, verdict, decode_engine_id,"
                " policy_revision, decided_at) VALUES (%s, 0, %s, 'admit', %s, 'r', %s)",
                (call["id"], replica_id, call["engine"], call["at"]),
            )
            if call["workflow"]:
                connection.execute(
                    "INSERT INTO workflow_steps (workflow_id, step, calls, calls_succeeded,"
                    " spent_micro_usd) VALUES (%s, %s, 1, %s, %s)",
                    (call["workflow"], call["step"], int(call["state"] == "succeeded"),
                     call["cost"]),
                )  # fmt: skip
        for refusal in past.refusals:
            connection.execute(
                "INSERT INTO decisions (request_id, number, replica_id, verdict, reason,"
                " policy_revision, decided_at, tenant_id, model, record)"
                " VALUES (%s, 0, %s, 'refuse', %s, 'r', %s, %s, %s, %s)",
                (refusal["id"], replica_id, refusal["reason"], refusal["at"], refusal["tenant"],
                 MODEL, Jsonb(None)),
            )  # fmt: skip
    return past
