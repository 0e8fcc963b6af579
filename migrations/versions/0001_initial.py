"""The first schema: what one request needs on its whole way."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

APPEND_ONLY = """
CREATE FUNCTION refuse_change_of_ledger() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the ledger is append-only: % refused', TG_OP
        USING ERRCODE = 'restrict_violation';
END
$$;
CREATE TRIGGER ledger_append_only BEFORE UPDATE OR DELETE ON ledger
    FOR EACH ROW EXECUTE FUNCTION refuse_change_of_ledger();
CREATE TRIGGER ledger_no_truncate BEFORE TRUNCATE ON ledger
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change_of_ledger();
"""


def upgrade() -> None:
    op.create_table(
        "budgets",
        sa.Column("id", sa.String(length=127), nullable=False),
        sa.Column("limit_micro_usd", sa.BigInteger(), nullable=False),
        sa.Column("spent_micro_usd", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "reserved_micro_usd", sa.BigInteger(), server_default=sa.text("0"), nullable=False
        ),
        sa.CheckConstraint(
            "spent_micro_usd + reserved_micro_usd <= limit_micro_usd",
            name=op.f("ck_budgets_within_limit"),
        ),
        sa.CheckConstraint(
            "spent_micro_usd >= 0 AND reserved_micro_usd >= 0", name=op.f("ck_budgets_not_negative")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budgets")),
    )
    op.create_table(
        "catalog_revision",
        sa.Column("id", sa.SmallInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("revision", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_catalog_revision_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_catalog_revision")),
    )
    op.create_table(
        "decisions",
        sa.Column("request_id", sa.String(length=63), nullable=False),
        sa.Column("number", sa.SmallInteger(), nullable=False),
        sa.Column("replica_id", sa.String(length=63), nullable=False),
        sa.Column("verdict", sa.String(length=15), nullable=False),
        sa.Column("reason", sa.String(length=63), nullable=True),
        sa.Column("decode_engine_id", sa.String(length=127), nullable=True),
        sa.Column("prefill_engine_id", sa.String(length=127), nullable=True),
        sa.Column("cost_micro_usd", sa.Double(), nullable=True),
        sa.Column("ttft_ms_predicted", sa.Double(), nullable=True),
        sa.Column("cached_tokens_predicted", sa.Integer(), nullable=True),
        sa.Column("policy_revision", sa.String(length=64), nullable=False),
        sa.Column("decided_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("record", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.CheckConstraint(
            "verdict IN ('admit', 'queue', 'refuse')", name=op.f("ck_decisions_verdict")
        ),
        sa.UniqueConstraint("request_id", "number", name=op.f("uq_decisions_request_id_number")),
    )
    op.create_index("ix_decisions_decided_at", "decisions", ["decided_at"], unique=False)
    op.create_table(
        "gpu_types",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("hbm_bytes", sa.BigInteger(), nullable=False),
        sa.Column("bandwidth_bytes_per_s", sa.Double(), nullable=False),
        sa.Column("flops_per_s", sa.Double(), nullable=False),
        sa.Column("price_micro_usd_per_hour", sa.BigInteger(), nullable=False),
        sa.Column("price_source", sa.Text(), nullable=False),
        sa.Column("price_date", sa.String(length=10), nullable=False),
        sa.CheckConstraint(
            "hbm_bytes > 0 AND bandwidth_bytes_per_s > 0 AND flops_per_s > 0",
            name=op.f("ck_gpu_types_rates"),
        ),
        sa.CheckConstraint("price_micro_usd_per_hour >= 0", name=op.f("ck_gpu_types_price")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_gpu_types")),
    )
    op.create_table(
        "leader",
        sa.Column("id", sa.SmallInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("holder", sa.String(length=63), nullable=True),
        sa.Column("epoch", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "expires_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint("id = 1", name=op.f("ck_leader_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leader")),
    )
    op.create_table(
        "models",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("parameters", sa.BigInteger(), nullable=False),
        sa.Column("layers", sa.Integer(), nullable=False),
        sa.Column("hidden_size", sa.Integer(), nullable=False),
        sa.Column("weights_bytes", sa.BigInteger(), nullable=False),
        sa.Column("kv_bytes_per_token", sa.BigInteger(), nullable=False),
        sa.Column("context_tokens_max", sa.Integer(), nullable=False),
        sa.Column("load_ms", sa.Integer(), nullable=False),
        sa.Column("price_prompt_micro_usd_per_mtok", sa.BigInteger(), nullable=False),
        sa.Column("price_cached_micro_usd_per_mtok", sa.BigInteger(), nullable=False),
        sa.Column("price_completion_micro_usd_per_mtok", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "parameters > 0 AND layers > 0 AND hidden_size > 0 AND weights_bytes > 0 AND kv_bytes_per_token > 0 AND context_tokens_max > 0 AND load_ms >= 0",
            name=op.f("ck_models_sizes"),
        ),
        sa.CheckConstraint(
            "price_prompt_micro_usd_per_mtok >= 0 AND price_cached_micro_usd_per_mtok >= 0 AND price_completion_micro_usd_per_mtok >= 0",
            name=op.f("ck_models_prices"),
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_models")),
    )
    op.create_table(
        "regions",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_regions")),
    )
    op.create_table(
        "replicas",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column(
            "started_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column(
            "last_seen_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replicas")),
    )
    op.create_table(
        "slo_classes",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("ttft_ms_max", sa.Integer(), nullable=False),
        sa.Column("tpot_ms_max", sa.Integer(), nullable=False),
        sa.Column("e2e_ms_max", sa.Integer(), nullable=False),
        sa.Column("value_micro_usd", sa.BigInteger(), nullable=False),
        sa.Column("late_micro_usd_per_s", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "ttft_ms_max > 0 AND tpot_ms_max > 0 AND e2e_ms_max > 0",
            name=op.f("ck_slo_classes_targets"),
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_slo_classes")),
    )
    op.create_table(
        "budget_leases",
        sa.Column("budget_id", sa.String(length=127), nullable=False),
        sa.Column("replica_id", sa.String(length=63), nullable=False),
        sa.Column("amount_micro_usd", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("amount_micro_usd >= 0", name=op.f("ck_budget_leases_not_negative")),
        sa.ForeignKeyConstraint(
            ["budget_id"],
            ["budgets.id"],
            name=op.f("fk_budget_leases_budget_id_budgets"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["replica_id"], ["replicas.id"], name=op.f("fk_budget_leases_replica_id_replicas")
        ),
        sa.PrimaryKeyConstraint("budget_id", "replica_id", name=op.f("pk_budget_leases")),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("region", sa.String(length=63), nullable=False),
        sa.Column("gpu_type", sa.String(length=63), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("address", sa.String(length=253), nullable=False),
        sa.Column("is_cordoned", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("agent_epoch", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint("gpus > 0", name=op.f("ck_nodes_gpus")),
        sa.ForeignKeyConstraint(
            ["gpu_type"], ["gpu_types.name"], name=op.f("fk_nodes_gpu_type_gpu_types")
        ),
        sa.ForeignKeyConstraint(["region"], ["regions.name"], name=op.f("fk_nodes_region_regions")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tenant_class", sa.String(length=63), nullable=False),
        sa.Column("slo_class", sa.String(length=63), nullable=False),
        sa.Column("budget_id", sa.String(length=127), nullable=False),
        sa.Column("cache_salt", sa.String(length=64), nullable=False),
        sa.Column("is_disabled", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["budget_id"], ["budgets.id"], name=op.f("fk_tenants_budget_id_budgets")
        ),
        sa.ForeignKeyConstraint(
            ["slo_class"], ["slo_classes.name"], name=op.f("fk_tenants_slo_class_slo_classes")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("budget_id", name=op.f("uq_tenants_budget_id")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=31), nullable=False),
        sa.Column("digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("tenant_id", sa.String(length=63), nullable=True),
        sa.Column("operator_role", sa.String(length=15), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "operator_role IN ('viewer', 'operator', 'admin')", name=op.f("ck_api_keys_role")
        ),
        sa.CheckConstraint(
            "(tenant_id IS NULL) <> (operator_role IS NULL)", name=op.f("ck_api_keys_one_owner")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name=op.f("fk_api_keys_tenant_id_tenants"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_keys_digest")),
    )
    op.create_table(
        "commands",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("node_id", sa.String(length=63), nullable=False),
        sa.Column("engine_id", sa.String(length=127), nullable=False),
        sa.Column("kind", sa.String(length=15), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("body", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column(
            "state", sa.String(length=15), server_default=sa.text("'pending'"), nullable=False
        ),
        sa.Column("detail", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('pending', 'sent', 'done', 'failed', 'stale_epoch')",
            name=op.f("ck_commands_state"),
        ),
        sa.ForeignKeyConstraint(
            ["node_id"], ["nodes.id"], name=op.f("fk_commands_node_id_nodes"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_commands")),
    )
    op.create_index(
        "ix_commands_unsent",
        "commands",
        ["created_at"],
        unique=False,
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.create_table(
        "engines",
        sa.Column("id", sa.String(length=127), nullable=False),
        sa.Column("node_id", sa.String(length=63), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("role", sa.String(length=15), nullable=False),
        sa.Column("kind", sa.String(length=31), nullable=False),
        sa.Column("port", sa.Integer(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("seats", sa.Integer(), nullable=False),
        sa.Column("kv_tokens", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=15), nullable=False),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint("role IN ('prefill', 'decode', 'both')", name=op.f("ck_engines_role")),
        sa.CheckConstraint(
            "state IN ('starting', 'serving', 'draining', 'stopped', 'failed')",
            name=op.f("ck_engines_state"),
        ),
        sa.ForeignKeyConstraint(["model"], ["models.name"], name=op.f("fk_engines_model_models")),
        sa.ForeignKeyConstraint(
            ["node_id"], ["nodes.id"], name=op.f("fk_engines_node_id_nodes"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_engines")),
    )
    op.create_table(
        "workflows",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("tenant_id", sa.String(length=63), nullable=False),
        sa.Column("kind", sa.String(length=63), nullable=False),
        sa.Column("scope", sa.String(length=15), nullable=False),
        sa.Column("steps_expected", sa.Integer(), nullable=False),
        sa.Column("slo_class", sa.String(length=63), nullable=False),
        sa.Column("budget_id", sa.String(length=127), nullable=True),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "state", sa.String(length=15), server_default=sa.text("'running'"), nullable=False
        ),
        sa.Column("outcome_detail", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(state = 'running') = (ended_at IS NULL)", name=op.f("ck_workflows_ended")
        ),
        sa.CheckConstraint(
            "scope IN ('chat', 'copilot', 'research', 'autonomous')",
            name=op.f("ck_workflows_scope"),
        ),
        sa.CheckConstraint(
            "state IN ('running', 'succeeded', 'failed', 'cancelled', 'expired')",
            name=op.f("ck_workflows_state"),
        ),
        sa.CheckConstraint("steps_expected > 0", name=op.f("ck_workflows_steps")),
        sa.ForeignKeyConstraint(
            ["budget_id"], ["budgets.id"], name=op.f("fk_workflows_budget_id_budgets")
        ),
        sa.ForeignKeyConstraint(
            ["slo_class"], ["slo_classes.name"], name=op.f("fk_workflows_slo_class_slo_classes")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_workflows_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workflows")),
    )
    op.create_index(
        "ix_workflows_running",
        "workflows",
        ["deadline_at"],
        unique=False,
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "ix_workflows_tenant_id_created_at", "workflows", ["tenant_id", "created_at"], unique=False
    )
    op.create_table(
        "requests",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("tenant_id", sa.String(length=63), nullable=False),
        sa.Column("key_id", sa.String(length=31), nullable=False),
        sa.Column("replica_id", sa.String(length=63), nullable=False),
        sa.Column("workflow_id", sa.String(length=63), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("endpoint", sa.String(length=31), nullable=False),
        sa.Column("is_stream", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=15), server_default=sa.text("'open'"), nullable=False),
        sa.Column("reason", sa.String(length=63), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "is_usage_estimated", sa.Boolean(), server_default=sa.text("false"), nullable=False
        ),
        sa.Column("ttft_ms", sa.Double(), nullable=True),
        sa.Column("tpot_ms", sa.Double(), nullable=True),
        sa.Column("e2e_ms", sa.Double(), nullable=True),
        sa.Column("queue_ms", sa.Double(), nullable=True),
        sa.Column(
            "reserved_micro_usd", sa.BigInteger(), server_default=sa.text("0"), nullable=False
        ),
        sa.Column("settled_micro_usd", sa.BigInteger(), nullable=True),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'open') = (ended_at IS NULL)", name=op.f("ck_requests_ended")),
        sa.CheckConstraint(
            "(state = 'open') = (settled_micro_usd IS NULL)", name=op.f("ck_requests_settled")
        ),
        sa.CheckConstraint(
            "state IN ('open', 'succeeded', 'failed', 'cancelled', 'refused', 'expired', 'lost')",
            name=op.f("ck_requests_state"),
        ),
        sa.ForeignKeyConstraint(
            ["replica_id"], ["replicas.id"], name=op.f("fk_requests_replica_id_replicas")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_requests_tenant_id_tenants")
        ),
        sa.ForeignKeyConstraint(
            ["workflow_id"], ["workflows.id"], name=op.f("fk_requests_workflow_id_workflows")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_requests")),
    )
    op.create_index(
        "ix_requests_open",
        "requests",
        ["replica_id"],
        unique=False,
        postgresql_where=sa.text("state = 'open'"),
    )
    op.create_index("ix_requests_opened_at", "requests", ["opened_at"], unique=False)
    op.create_index("ix_requests_workflow_id", "requests", ["workflow_id"], unique=False)
    op.create_table(
        "workflow_steps",
        sa.Column("workflow_id", sa.String(length=63), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("calls", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("calls_succeeded", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("spent_micro_usd", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.CheckConstraint(
            "step >= 0 AND calls >= 0 AND calls_succeeded <= calls",
            name=op.f("ck_workflow_steps_counts"),
        ),
        sa.ForeignKeyConstraint(
            ["workflow_id"],
            ["workflows.id"],
            name=op.f("fk_workflow_steps_workflow_id_workflows"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("workflow_id", "step", name=op.f("pk_workflow_steps")),
    )
    op.create_table(
        "attempts",
        sa.Column("request_id", sa.String(length=63), nullable=False),
        sa.Column("number", sa.SmallInteger(), nullable=False),
        sa.Column("leg", sa.String(length=15), nullable=False),
        sa.Column("engine_id", sa.String(length=127), nullable=False),
        sa.Column("outcome", sa.String(length=31), nullable=False),
        sa.Column("detail", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.ForeignKeyConstraint(
            ["request_id"],
            ["requests.id"],
            name=op.f("fk_attempts_request_id_requests"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("request_id", "number", "leg", name=op.f("pk_attempts")),
    )
    op.create_table(
        "ledger",
        sa.Column("request_id", sa.String(length=63), nullable=False),
        sa.Column("tenant_id", sa.String(length=63), nullable=False),
        sa.Column("workflow_id", sa.String(length=63), nullable=True),
        sa.Column("amount_micro_usd", sa.BigInteger(), nullable=False),
        sa.Column(
            "settled_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint("amount_micro_usd >= 0", name=op.f("ck_ledger_not_negative")),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.id"], name=op.f("fk_ledger_request_id_requests")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_ledger_tenant_id_tenants")
        ),
        sa.ForeignKeyConstraint(
            ["workflow_id"], ["workflows.id"], name=op.f("fk_ledger_workflow_id_workflows")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_ledger")),
    )
    op.create_index(
        "ix_ledger_tenant_id_settled_at", "ledger", ["tenant_id", "settled_at"], unique=False
    )
    op.execute(APPEND_ONLY)
    op.execute("INSERT INTO catalog_revision (id, revision) VALUES (1, 1)")
    op.execute("INSERT INTO leader (id, epoch) VALUES (1, 0)")


def downgrade() -> None:
    op.drop_index("ix_ledger_tenant_id_settled_at", table_name="ledger")
    op.drop_table("ledger")
    op.drop_table("attempts")
    op.drop_table("workflow_steps")
    op.drop_index("ix_requests_workflow_id", table_name="requests")
    op.drop_index("ix_requests_opened_at", table_name="requests")
    op.drop_index(
        "ix_requests_open", table_name="requests", postgresql_where=sa.text("state = 'open'")
    )
    op.drop_table("requests")
    op.drop_index("ix_workflows_tenant_id_created_at", table_name="workflows")
    op.drop_index(
        "ix_workflows_running",
        table_name="workflows",
        postgresql_where=sa.text("state = 'running'"),
    )
    op.drop_table("workflows")
    op.drop_table("engines")
    op.drop_index(
        "ix_commands_unsent", table_name="commands", postgresql_where=sa.text("state = 'pending'")
    )
    op.drop_table("commands")
    op.drop_table("api_keys")
    op.drop_table("tenants")
    op.drop_table("nodes")
    op.drop_table("budget_leases")
    op.drop_table("slo_classes")
    op.drop_table("replicas")
    op.drop_table("regions")
    op.drop_table("models")
    op.drop_table("leader")
    op.drop_table("gpu_types")
    op.drop_index("ix_decisions_decided_at", table_name="decisions")
    op.drop_table("decisions")
    op.drop_table("catalog_revision")
    op.drop_table("budgets")
    op.execute("DROP FUNCTION refuse_change_of_ledger()")
