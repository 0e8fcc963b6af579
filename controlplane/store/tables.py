"""Every table, with the constraints that hold the invariants.

Money is whole micro-dollars (BIGINT). Instants are `timestamptz` by the database's clock.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

TERMINAL_REQUEST_STATES = ("succeeded", "failed", "cancelled", "refused", "expired", "lost")
TERMINAL_WORKFLOW_STATES = ("succeeded", "failed", "cancelled", "expired")


def _one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


def _created() -> "Column[object]":
    return Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now())


# ---------------------------------------------------------------- what operators declare

# One row; every change of a declaration raises it, so that replicas know to read again.
catalog_revision = Table(
    "catalog_revision",
    metadata,
    Column("id", SmallInteger, primary_key=True, server_default=text("1")),
    Column("revision", BigInteger, nullable=False, server_default=text("1")),
    CheckConstraint("id = 1", name="one_row"),
)

regions = Table("regions", metadata, Column("name", String(63), primary_key=True), _created())

gpu_types = Table(
    "gpu_types",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("hbm_bytes", BigInteger, nullable=False),
    Column("bandwidth_bytes_per_s", Double, nullable=False),
    Column("flops_per_s", Double, nullable=False),
    Column("price_micro_usd_per_hour", BigInteger, nullable=False),
    Column("price_source", Text, nullable=False),
    Column("price_date", String(10), nullable=False),
    Column("fp8_flops_per_s", Double, nullable=False, server_default=text("0")),
    Column("fp4_flops_per_s", Double, nullable=False, server_default=text("0")),
    CheckConstraint(
        "hbm_bytes > 0 AND bandwidth_bytes_per_s > 0 AND flops_per_s > 0", name="rates"
    ),
    CheckConstraint("price_micro_usd_per_hour >= 0", name="price"),
    CheckConstraint("fp8_flops_per_s >= 0 AND fp4_flops_per_s >= 0", name="low_precision"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("id", String(63), primary_key=True),
    Column("region", ForeignKey("regions.name"), nullable=False),
    Column("gpu_type", ForeignKey("gpu_types.name"), nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("address", String(253), nullable=False),
    Column("is_cordoned", Boolean, nullable=False, server_default=text("false")),
    Column("agent_epoch", BigInteger, nullable=False, server_default=text("0")),
    Column("last_seen_at", DateTime(timezone=True)),
    _created(),
    CheckConstraint("gpus > 0", name="gpus"),
)

models = Table(
    "models",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("parameters", BigInteger, nullable=False),
    Column("layers", Integer, nullable=False),
    Column("hidden_size", Integer, nullable=False),
    Column("weights_bytes", BigInteger, nullable=False),
    Column("kv_bytes_per_token", BigInteger, nullable=False),
    Column("context_tokens_max", Integer, nullable=False),
    Column("load_ms", Integer, nullable=False),
    Column("price_prompt_micro_usd_per_mtok", BigInteger, nullable=False),
    Column("price_cached_micro_usd_per_mtok", BigInteger, nullable=False),
    Column("price_completion_micro_usd_per_mtok", BigInteger, nullable=False),
    Column("parameters_active", BigInteger, nullable=False, server_default=text("0")),
    Column("experts", Integer, nullable=False, server_default=text("0")),
    Column("experts_active", Integer, nullable=False, server_default=text("0")),
    Column("expert_weights_bytes", BigInteger, nullable=False, server_default=text("0")),
    Column("kv_heads", Integer, nullable=False, server_default=text("0")),
    CheckConstraint(
        "parameters_active >= 0 AND experts_active >= 0 AND kv_heads >= 0"
        " AND parameters_active <= parameters AND experts_active <= experts"
        " AND expert_weights_bytes >= 0 AND expert_weights_bytes <= weights_bytes",
        name="experts",
    ),
    CheckConstraint(
        "parameters > 0 AND layers > 0 AND hidden_size > 0 AND weights_bytes > 0"
        " AND kv_bytes_per_token > 0 AND context_tokens_max > 0 AND load_ms >= 0",
        name="sizes",
    ),
    CheckConstraint(
        "price_prompt_micro_usd_per_mtok >= 0 AND price_cached_micro_usd_per_mtok >= 0"
        " AND price_completion_micro_usd_per_mtok >= 0",
        name="prices",
    ),
)

# Adapters of models, served by the engines of those. A price of NULL is the model's.
adapters = Table(
    "adapters",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("adapter_of", ForeignKey("models.name"), nullable=False),
    Column("path", Text, nullable=False),
    Column("price_prompt_micro_usd_per_mtok", BigInteger),
    Column("price_cached_micro_usd_per_mtok", BigInteger),
    Column("price_completion_micro_usd_per_mtok", BigInteger),
    CheckConstraint(
        "price_prompt_micro_usd_per_mtok >= 0 AND price_cached_micro_usd_per_mtok >= 0"
        " AND price_completion_micro_usd_per_mtok >= 0",
        name="prices",
    ),
)

# What agents last declared; the live state is in the replicas' memory.
engines = Table(
    "engines",
    metadata,
    Column("id", String(127), primary_key=True),
    Column("node_id", ForeignKey("nodes.id", ondelete="CASCADE"), nullable=False),
    Column("model", ForeignKey("models.name"), nullable=False),
    Column("role", String(15), nullable=False),
    Column("kind", String(31), nullable=False),
    Column("port", Integer, nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("seats", Integer, nullable=False),
    Column("kv_tokens", BigInteger, nullable=False),
    Column("state", String(15), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("cordon", Text, nullable=False, server_default=text("''")),
    Column("sleep_level", Integer, nullable=False, server_default=text("0")),
    Column("wake_ms", Integer, nullable=False, server_default=text("0")),
    Column("load_ms", Integer, nullable=False, server_default=text("0")),
    Column("load_medium", String(15), nullable=False, server_default=text("''")),
    Column("capabilities", JSONB, nullable=False, server_default=text("'[]'::jsonb")),
    CheckConstraint(_one_of("role", ("prefill", "decode", "both")), name="role"),
    CheckConstraint(
        _one_of("state", ("starting", "serving", "draining", "sleeping", "stopped", "failed")),
        name="state",
    ),
)

# What agents measured of the starts of engines. `load_ms` is smoothed, `started_ms` that of the latest.
weight_loads = Table(
    "weight_loads",
    metadata,
    Column("model", ForeignKey("models.name", ondelete="CASCADE"), primary_key=True),
    Column("node_id", ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True),
    Column("gpus", Integer, primary_key=True, autoincrement=False),
    Column("medium", String(15), primary_key=True),
    Column("load_ms", Integer, nullable=False),
    Column("loads", BigInteger, nullable=False),
    Column("started_ms", BigInteger, nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    CheckConstraint("load_ms > 0 AND loads > 0", name="measured"),
)

slo_classes = Table(
    "slo_classes",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("ttft_ms_max", Integer, nullable=False),
    Column("tpot_ms_max", Integer, nullable=False),
    Column("e2e_ms_max", Integer, nullable=False),
    Column("value_micro_usd", BigInteger, nullable=False),
    Column("late_micro_usd_per_s", BigInteger, nullable=False),
    CheckConstraint("ttft_ms_max > 0 AND tpot_ms_max > 0 AND e2e_ms_max > 0", name="targets"),
)

# ---------------------------------------------------------------- tenants and money

# An account of a tenant, a key or a workflow: "tenant:<id>", "key:<id>", "workflow:<id>" in
# micro-dollars, with ":tokens" at the end in tokens. `spent` counts from `window_started_at` on.
# INVARIANT I2 is the CHECK `within_limit`: it holds whatever a program does.
budgets = Table(
    "budgets",
    metadata,
    Column("id", String(127), primary_key=True),
    Column("unit", String(15), nullable=False, server_default=text("'micro_usd'")),
    Column("limit", BigInteger, nullable=False),
    Column("spent", BigInteger, nullable=False, server_default=text("0")),
    Column("reserved", BigInteger, nullable=False, server_default=text("0")),
    Column("window", String(7), nullable=False, server_default=text("'total'")),
    Column("window_started_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    CheckConstraint('spent + reserved <= "limit"', name="within_limit"),
    CheckConstraint("spent >= 0 AND reserved >= 0", name="not_negative"),
    CheckConstraint(_one_of("unit", ("micro_usd", "tokens")), name="unit"),
    CheckConstraint("(unit = 'tokens') = (right(id, 7) = '\\:tokens')", name="unit_of_id"),
    CheckConstraint(_one_of('"window"', ("total", "hour", "day", "week", "month")), name="window"),
    Index(
        "ix_budgets_windowed", "window_started_at", postgresql_where=text("\"window\" <> 'total'")
    ),
)

# What was spent of an account in each window that is over.
budget_windows = Table(
    "budget_windows",
    metadata,
    Column("budget_id", ForeignKey("budgets.id", ondelete="CASCADE"), primary_key=True),
    Column("started_at", DateTime(timezone=True), primary_key=True),
    Column("ended_at", DateTime(timezone=True), nullable=False),
    Column("limit", BigInteger, nullable=False),
    Column("spent", BigInteger, nullable=False),
    CheckConstraint("spent >= 0", name="not_negative"),
)

# The slice of an account that one life of a replica may spend without asking. Sum over all = reserved.
budget_leases = Table(
    "budget_leases",
    metadata,
    Column("budget_id", ForeignKey("budgets.id", ondelete="CASCADE"), primary_key=True),
    Column("replica_id", ForeignKey("replicas.id"), primary_key=True),
    Column("amount", BigInteger, nullable=False),
    Column("generation", BigInteger, primary_key=True, server_default=text("1")),
    CheckConstraint("amount >= 0", name="not_negative"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("id", String(63), primary_key=True),
    Column("name", Text, nullable=False),
    Column("tenant_class", String(63), nullable=False),
    Column("slo_class", ForeignKey("slo_classes.name"), nullable=False),
    Column("budget_id", ForeignKey("budgets.id"), nullable=False, unique=True),
    Column("cache_salt", String(64), nullable=False),
    Column("is_disabled", Boolean, nullable=False, server_default=text("false")),
    _created(),
)

# Keys of tenants and of operators. Only a keyed digest of a key is ever stored.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(31), primary_key=True),
    Column("digest", LargeBinary(32), nullable=False, unique=True),
    Column("tenant_id", ForeignKey("tenants.id", ondelete="CASCADE")),
    Column("operator_role", String(15)),
    Column("name", Text, nullable=False),
    _created(),
    Column("revoked_at", DateTime(timezone=True)),
    # Limits of a tenant's key; NULL is none.
    Column("requests_per_minute", Integer),
    Column("tokens_per_minute", Integer),
    Column("calls_in_flight_max", Integer),
    CheckConstraint("(tenant_id IS NULL) <> (operator_role IS NULL)", name="one_owner"),
    CheckConstraint(
        "requests_per_minute > 0 AND tokens_per_minute > 0 AND calls_in_flight_max > 0",
        name="limits",
    ),
    CheckConstraint(_one_of("operator_role", ("viewer", "operator", "admin")), name="role"),
)

# ---------------------------------------------------------------- replicas and leadership

replicas = Table(
    "replicas",
    metadata,
    Column("id", String(63), primary_key=True),
    Column("started_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("last_seen_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("ended_at", DateTime(timezone=True)),
    # Its life: one more each time that it comes back after it was taken for dead.
    Column("generation", BigInteger, nullable=False, server_default=text("1")),
)

leader = Table(
    "leader",
    metadata,
    Column("id", SmallInteger, primary_key=True, server_default=text("1")),
    Column("holder", String(63)),
    Column("epoch", BigInteger, nullable=False, server_default=text("0")),
    Column("expires_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    CheckConstraint("id = 1", name="one_row"),
)

commands = Table(
    "commands",
    metadata,
    Column("id", String(63), primary_key=True),
    Column("node_id", ForeignKey("nodes.id", ondelete="CASCADE"), nullable=False),
    Column("engine_id", String(127), nullable=False),
    Column("kind", String(15), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("body", JSONB, nullable=False),
    Column("state", String(15), nullable=False, server_default=text("'pending'")),
    Column("detail", Text, nullable=False, server_default=text("''")),
    _created(),
    Column("sent_at", DateTime(timezone=True)),
    Column("ended_at", DateTime(timezone=True)),
    Column("progress", JSONB),
    CheckConstraint(
        _one_of("state", ("pending", "sent", "done", "failed", "refused", "stale_epoch")),
        name="state",
    ),
    Index("ix_commands_unsent", "created_at", postgresql_where=text("state = 'pending'")),
    Index("ix_commands_ended_at", "ended_at", postgresql_where=text("ended_at IS NOT NULL")),
)

# ---------------------------------------------------------------- workflows and requests

workflows = Table(
    "workflows",
    metadata,
    Column("id", String(63), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("kind", String(63), nullable=False),
    Column("scope", String(15), nullable=False),
    Column("steps_expected", Integer, nullable=False),
    Column("slo_class", ForeignKey("slo_classes.name"), nullable=False),
    Column("budget_id", ForeignKey("budgets.id")),
    Column("deadline_at", DateTime(timezone=True), nullable=False),
    Column("state", String(15), nullable=False, server_default=text("'running'")),
    Column("outcome_detail", Text, nullable=False, server_default=text("''")),
    _created(),
    Column("ended_at", DateTime(timezone=True)),
    # What was asked for instead of a model, and the model that it was given for all of its calls.
    Column("asked_model", String(127)),
    Column("model", String(255)),
    # The failed workflow whose task this one tries again.
    Column("retry_of", ForeignKey("workflows.id")),
    CheckConstraint("model IS NULL OR asked_model IS NOT NULL", name="model"),
    CheckConstraint(_one_of("state", ("running", *TERMINAL_WORKFLOW_STATES)), name="state"),
    CheckConstraint("(state = 'running') = (ended_at IS NULL)", name="ended"),
    CheckConstraint("steps_expected > 0", name="steps"),
    CheckConstraint(_one_of("scope", ("chat", "copilot", "research", "autonomous")), name="scope"),
    Index("ix_workflows_tenant_id_created_at", "tenant_id", "created_at"),
    Index("ix_workflows_running", "deadline_at", postgresql_where=text("state = 'running'")),
)

workflow_steps = Table(
    "workflow_steps",
    metadata,
    Column("workflow_id", ForeignKey("workflows.id", ondelete="CASCADE"), primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("calls", Integer, nullable=False, server_default=text("0")),
    Column("calls_succeeded", Integer, nullable=False, server_default=text("0")),
    Column("spent_micro_usd", BigInteger, nullable=False, server_default=text("0")),
    CheckConstraint("step >= 0 AND calls >= 0 AND calls_succeeded <= calls", name="counts"),
)

# Why a workflow has its model, and once it has ended what it came to. `failed_before` are the models
# that failed at its task, sorted, with commas; `task_id` is the first workflow of the task.
model_choices = Table(
    "model_choices",
    metadata,
    Column("workflow_id", ForeignKey("workflows.id", ondelete="CASCADE"), primary_key=True),
    Column("task_id", String(63), nullable=False),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("asked_model", String(127), nullable=False),
    Column("model", String(255), nullable=False),
    Column("default_model", String(255), nullable=False),
    Column("failed_before", Text, nullable=False, server_default=text("''")),
    Column("why", String(31), nullable=False),
    Column("propensity", Double, nullable=False),
    Column("default_propensity", Double, nullable=False),
    Column("can_climb", Boolean, nullable=False),
    Column("policy_revision", String(64), nullable=False),
    Column("record", JSONB, nullable=False),
    Column("chosen_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("counted_at", DateTime(timezone=True)),
    Column("outcome", String(15)),
    Column("spent_micro_usd", BigInteger),
    CheckConstraint(
        "propensity >= 0 AND propensity <= 1 AND default_propensity >= 0"
        " AND default_propensity <= 1",
        name="propensity",
    ),
    CheckConstraint("(counted_at IS NULL) = (outcome IS NULL)", name="counted"),
    Index("ix_model_choices_uncounted", "workflow_id", postgresql_where=text("counted_at IS NULL")),
    Index("ix_model_choices_task_id", "task_id"),
    Index(
        "ix_model_choices_tenant_id_asked_model_chosen_at", "tenant_id", "asked_model", "chosen_at"
    ),
)

# Sums over tries of a model, of all replicas; they fade with the time since `updated_at`.
model_evidence = Table(
    "model_evidence",
    metadata,
    Column("tenant_id", ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True),
    Column("asked_model", String(127), primary_key=True),
    Column("model", String(255), primary_key=True),
    Column("failed_before", Text, primary_key=True),
    Column("tries", Double, nullable=False),
    Column("successes", Double, nullable=False),
    Column("reported", Double, nullable=False),
    Column("climbable", Double, nullable=False),
    Column("spent_micro_usd", Double, nullable=False),
    Column("spent_squared", Double, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    CheckConstraint(
        "tries >= 0 AND successes >= 0 AND reported >= 0 AND climbable >= 0"
        " AND spent_micro_usd >= 0 AND spent_squared >= 0 AND seconds >= 0",
        name="sums",
    ),
    Index("ix_model_evidence_updated_at", "updated_at"),
)

# INVARIANT I1: `state` leaves 'open' once (guarded by the journal's UPDATE) and the ledger has one
# settlement per request (its primary key). A call without a workflow is a workflow of one step.
requests = Table(
    "requests",
    metadata,
    Column("id", String(63), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("key_id", String(31), nullable=False),
    Column("replica_id", ForeignKey("replicas.id"), nullable=False),
    Column("workflow_id", ForeignKey("workflows.id")),
    Column("step", Integer, nullable=False),
    Column("model", String(255), nullable=False),
    Column("endpoint", String(31), nullable=False),
    Column("is_stream", Boolean, nullable=False),
    Column("state", String(15), nullable=False, server_default=text("'open'")),
    Column("reason", String(63)),
    Column("prompt_tokens", Integer, nullable=False, server_default=text("0")),
    Column("cached_tokens", Integer, nullable=False, server_default=text("0")),
    Column("completion_tokens", Integer, nullable=False, server_default=text("0")),
    Column("is_usage_estimated", Boolean, nullable=False, server_default=text("false")),
    Column("ttft_ms", Double),
    Column("tpot_ms", Double),
    Column("e2e_ms", Double),
    Column("queue_ms", Double),
    Column("reserved_micro_usd", BigInteger, nullable=False, server_default=text("0")),
    Column("settled_micro_usd", BigInteger),
    Column("opened_at", DateTime(timezone=True), nullable=False),
    Column("ended_at", DateTime(timezone=True)),
    CheckConstraint(_one_of("state", ("open", *TERMINAL_REQUEST_STATES)), name="state"),
    CheckConstraint("(state = 'open') = (ended_at IS NULL)", name="ended"),
    CheckConstraint("(state = 'open') = (settled_micro_usd IS NULL)", name="settled"),
    Index("ix_requests_open", "replica_id", postgresql_where=text("state = 'open'")),
    Index("ix_requests_opened_at", "opened_at"),
    Index("ix_requests_workflow_id", "workflow_id"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("request_id", ForeignKey("requests.id", ondelete="CASCADE"), primary_key=True),
    Column("number", SmallInteger, primary_key=True),
    Column(
        "leg", String(15), primary_key=True
    ),  # "whole", "prefill", "decode", or how a stream went on
    Column("engine_id", String(127), nullable=False),
    Column("outcome", String(31), nullable=False),
    Column("detail", Text, nullable=False, server_default=text("''")),
    _created(),
    Index("ix_attempts_created_at", "created_at"),
)

# One settlement per request. Triggers refuse UPDATE, and DELETE of what is younger than 30 days or part of
# a running workflow; any other row that is deleted is added to `ledger_folded` by a trigger.
ledger = Table(
    "ledger",
    metadata,
    Column("request_id", ForeignKey("requests.id"), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("workflow_id", ForeignKey("workflows.id")),
    Column("amount_micro_usd", BigInteger, nullable=False),
    Column("settled_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    # What each account was charged, in its unit, by the account's id.
    Column("charges", JSONB, nullable=False, server_default=text("'{}'")),
    CheckConstraint("amount_micro_usd >= 0", name="not_negative"),
    Index("ix_ledger_tenant_id_settled_at", "tenant_id", "settled_at"),
    Index("ix_ledger_settled_at", "settled_at"),
    Index("ix_ledger_workflow_id", "workflow_id"),
)

# INVARIANT I2: what `ledger` once held and holds no longer, summed: of a tenant and of a workflow in
# micro-dollars, of an account in its unit. Triggers refuse every change but the one of `ledger`'s trigger.
ledger_folded = Table(
    "ledger_folded",
    metadata,
    Column("kind", String(15), primary_key=True),
    Column("id", String(127), primary_key=True),
    Column("calls", BigInteger, nullable=False),
    Column("amount", BigInteger, nullable=False),
    CheckConstraint(_one_of("kind", ("tenant", "workflow", "account")), name="kind"),
    CheckConstraint("calls > 0 AND amount >= 0", name="counts"),
)

# A tenant's own name for a call, so that sending it again does not run it again.
idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("tenant_id", ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("body_digest", LargeBinary(32), nullable=False),
    Column("request_id", String(63), nullable=False),
    Column("replica_id", String(63), nullable=False),
    Column("state", String(7), nullable=False, server_default=text("'open'")),
    _created(),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    CheckConstraint(_one_of("state", ("open", "done")), name="state"),
    Index("ix_idempotency_keys_expires_at", "expires_at"),
    Index("ix_idempotency_keys_open", "replica_id", postgresql_where=text("state = 'open'")),
)

# One row per decision; `record` holds every candidate for refusals and for the sampled share.
decisions = Table(
    "decisions",
    metadata,
    Column("request_id", String(63), nullable=False),
    Column("number", SmallInteger, nullable=False),
    Column("replica_id", String(63), nullable=False),
    Column("verdict", String(15), nullable=False),
    Column("reason", String(63)),
    Column("decode_engine_id", String(127)),
    Column("prefill_engine_id", String(127)),
    Column("cost_micro_usd", Double),
    Column("ttft_ms_predicted", Double),
    Column("cached_tokens_predicted", Integer),
    Column("policy_revision", String(64), nullable=False),
    Column("decided_at", DateTime(timezone=True), nullable=False),
    Column("record", JSONB),
    # What a replay against other policies needs; `sample_weight` decisions are counted by this row.
    Column("tenant_id", String(63)),
    Column("model", String(255)),
    Column("rule", String(127)),
    Column("facts", JSONB),
    Column("sample_weight", Integer, nullable=False, server_default=text("1")),
    UniqueConstraint("request_id", "number"),
    CheckConstraint(_one_of("verdict", ("admit", "queue", "refuse")), name="verdict"),
    CheckConstraint("sample_weight > 0", name="sample_weight"),
    Index("ix_decisions_decided_at", "decided_at"),
)

# ---------------------------------------------------------------- reliability

# What operators decided about breakers: `engine:ID` or `pool:MODEL/REGION`, and how it is held.
breaker_overrides = Table(
    "breaker_overrides",
    metadata,
    Column("target", String(383), primary_key=True),
    Column("mode", String(15), nullable=False),
    Column("actor", String(127), nullable=False),
    Column("reason", Text, nullable=False),
    _created(),
    CheckConstraint(_one_of("mode", ("open", "closed")), name="mode"),
)

# ---------------------------------------------------------------- the planner

# One row: what the planner may do. Every change raises `generation`.
planner_control = Table(
    "planner_control",
    metadata,
    Column("id", SmallInteger, primary_key=True, server_default=text("1")),
    Column("generation", BigInteger, nullable=False, server_default=text("0")),
    Column("mode", String(15), nullable=False, server_default=text("'propose'")),
    Column("is_paused", Boolean, nullable=False, server_default=text("false")),
    Column("changed_by", String(127), nullable=False, server_default=text("''")),
    Column("reason", Text, nullable=False, server_default=text("''")),
    Column("changed_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    CheckConstraint("id = 1", name="one_row"),
    CheckConstraint(_one_of("mode", ("off", "propose", "act")), name="mode"),
)

# What the planner wants, as often as that changes. `digest` covers the desired fleet and its moves,
# `confirmed_at` is when the latest round came to the same. INVARIANT: at most one is being applied.
plans = Table(
    "plans",
    metadata,
    Column("revision", BigInteger, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("problem_digest", String(64), nullable=False),
    Column("status", String(31), nullable=False),
    Column("state", String(15), nullable=False, server_default=text("'proposed'")),
    Column("document", JSONB, nullable=False),
    Column("made_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("confirmed_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("applied_by", String(127)),
    Column("ended_at", DateTime(timezone=True)),
    CheckConstraint(
        _one_of("state", ("proposed", "applying", "applied", "failed", "cancelled")), name="state"
    ),
    Index("uq_plans_applying", "state", unique=True, postgresql_where=text("state = 'applying'")),
    Index("ix_plans_made_at", "made_at"),
)

# The moves of a plan that is or was applied, in their order; a proposed plan has them in `document`.
plan_moves = Table(
    "plan_moves",
    metadata,
    Column("revision", ForeignKey("plans.revision", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("kind", String(15), nullable=False),
    Column("node_id", String(63), nullable=False),
    Column("engine_id", String(127), nullable=False),
    Column("state", String(15), nullable=False, server_default=text("'waiting'")),
    Column("detail", Text, nullable=False, server_default=text("''")),
    Column("body", JSONB, nullable=False),
    Column("began_at", DateTime(timezone=True)),
    Column("ended_at", DateTime(timezone=True)),
    CheckConstraint(
        _one_of(
            "state",
            (
                "waiting",
                "running",
                "done",
                "failed",
                "undoing",
                "undone",
                "stuck",
                "cancelled",
                "not_executable",
            ),
        ),
        name="state",
    ),
)

# What each class of demand brought in each quarter of an hour that is over.
demand_slots = Table(
    "demand_slots",
    metadata,
    Column("class_id", String(511), primary_key=True),
    Column("started_at", DateTime(timezone=True), primary_key=True),
    Column("body", JSONB, nullable=False),
    Index("ix_demand_slots_started_at", "started_at"),
)

# What the planner has learned of each class of demand.
forecasts = Table(
    "forecasts",
    metadata,
    Column("class_id", String(511), primary_key=True),
    Column("state", JSONB, nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

# How engines are started, as cluster documents declared them: a load of the planner needs one.
engine_specs = Table(
    "engine_specs",
    metadata,
    Column("engine_id", String(127), primary_key=True),
    Column("node_id", ForeignKey("nodes.id", ondelete="CASCADE"), nullable=False),
    Column("body", JSONB, nullable=False),
)

# What replicas have learned about sizes: a histogram for each quantity of a model, of a scope of it, and
# of a tenant's scope of it ('' where a level has no such part).
size_estimates = Table(
    "size_estimates",
    metadata,
    Column("model", String(255), primary_key=True),
    Column("scope", String(15), primary_key=True),
    Column("tenant_id", String(63), primary_key=True),
    Column("quantity", String(31), primary_key=True),
    Column("weights", ARRAY(Double), nullable=False),
    Column("observations", BigInteger, nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    CheckConstraint("observations >= 0", name="observations"),
    Index("ix_size_estimates_updated_at", "updated_at"),
)

# ---------------------------------------------------------------- policies and their audit

# A bundle under the digest of its meaning. Triggers refuse UPDATE and DELETE.
policy_revisions = Table(
    "policy_revisions",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("files", JSONB, nullable=False),  # name of a file -> its text
    Column("author", String(127), nullable=False),
    Column("reason", Text, nullable=False),
    _created(),
    CheckConstraint("digest ~ '^[0-9a-f]{64}$'", name="digest"),
    Index("ix_policy_revisions_created_at", "created_at"),
)

# What trying a revision's rules out has told a program, by the program's digest: a replica of the same
# program need not do it again.
policy_checks = Table(
    "policy_checks",
    metadata,
    Column("digest", ForeignKey("policy_revisions.digest"), primary_key=True),
    Column("checker", String(64), primary_key=True),
    Column("report", JSONB, nullable=False),
    _created(),
)

# One row: which bundle rules, and which one stands beside it. Every change raises `generation`, and
# happens only while it is what its author saw.
policy_rollout = Table(
    "policy_rollout",
    metadata,
    Column("id", SmallInteger, primary_key=True, server_default=text("1")),
    Column("generation", BigInteger, nullable=False, server_default=text("0")),
    Column("active_digest", ForeignKey("policy_revisions.digest")),
    Column("previous_digest", ForeignKey("policy_revisions.digest")),
    Column("candidate_digest", ForeignKey("policy_revisions.digest")),
    Column("mode", String(15), nullable=False, server_default=text("'none'")),
    Column("canary_percent", SmallInteger, nullable=False, server_default=text("0")),
    Column("changed_by", String(127), nullable=False, server_default=text("''")),
    Column("reason", Text, nullable=False, server_default=text("''")),
    Column("changed_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    CheckConstraint("id = 1", name="one_row"),
    CheckConstraint(_one_of("mode", ("none", "shadow", "canary")), name="mode"),
    CheckConstraint("(mode = 'none') = (candidate_digest IS NULL)", name="candidate"),
    CheckConstraint("canary_percent BETWEEN 0 AND 100", name="percent"),
    CheckConstraint("(mode = 'canary') = (canary_percent > 0)", name="canary"),
)

# Append-only: each entry's hash covers the entry and the hash before it. Triggers refuse UPDATE,
# DELETE and TRUNCATE.
audit_log = Table(
    "audit_log",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("at", DateTime(timezone=True), nullable=False),
    Column("actor", String(127), nullable=False),
    Column("action", String(63), nullable=False),
    Column("subject", String(255), nullable=False),
    Column("reason", Text, nullable=False),
    Column("before", JSONB(none_as_null=True)),
    Column("after", JSONB(none_as_null=True)),
    Column("prev_hash", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
    UniqueConstraint("prev_hash"),
    Index("ix_audit_log_subject_id", "subject", "id"),
)
