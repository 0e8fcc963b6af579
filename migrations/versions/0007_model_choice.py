"""Which model a workflow was given and why, and what became of it by model."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

SUMS = (
    "tries",
    "successes",
    "reported",
    "climbable",
    "spent_micro_usd",
    "spent_squared",
    "seconds",
)


def text_column(name: str, length: int, *, is_required: bool = True) -> sa.Column:
    return sa.Column(name, sa.String(length=length), nullable=not is_required)


def instant(name: str, *, is_required: bool = True) -> sa.Column:
    return sa.Column(
        name,
        sa.DateTime(timezone=True),
        nullable=not is_required,
        server_default=sa.text("now()") if is_required else None,
    )


def upgrade() -> None:
    op.add_column("workflows", text_column("asked_model", 127, is_required=False))
    op.add_column("workflows", text_column("model", 255, is_required=False))
    op.add_column("workflows", text_column("retry_of", 63, is_required=False))
    op.create_foreign_key(
        op.f("fk_workflows_retry_of_workflows"), "workflows", "workflows", ["retry_of"], ["id"]
    )
    op.create_check_constraint(
        op.f("ck_workflows_model"), "workflows", "model IS NULL OR asked_model IS NOT NULL"
    )
    op.create_table(
        "model_choices",
        text_column("workflow_id", 63),
        text_column("task_id", 63),
        text_column("tenant_id", 63),
        text_column("asked_model", 127),
        text_column("model", 255),
        text_column("default_model", 255),
        sa.Column("failed_before", sa.Text(), server_default=sa.text("''"), nullable=False),
        text_column("why", 31),
        sa.Column("propensity", sa.Double(), nullable=False),
        sa.Column("default_propensity", sa.Double(), nullable=False),
        sa.Column("can_climb", sa.Boolean(), nullable=False),
        text_column("policy_revision", 64),
        sa.Column("record", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        instant("chosen_at"),
        instant("counted_at", is_required=False),
        text_column("outcome", 15, is_required=False),
        sa.Column("spent_micro_usd", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "propensity >= 0 AND propensity <= 1 AND default_propensity >= 0"
            " AND default_propensity <= 1",
            name=op.f("ck_model_choices_propensity"),
        ),
        sa.CheckConstraint(
            "(counted_at IS NULL) = (outcome IS NULL)", name=op.f("ck_model_choices_counted")
        ),
        sa.ForeignKeyConstraint(
            ["workflow_id"],
            ["workflows.id"],
            name=op.f("fk_model_choices_workflow_id_workflows"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_model_choices_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("workflow_id", name=op.f("pk_model_choices")),
    )
    op.create_index(
        "ix_model_choices_uncounted",
        "model_choices",
        ["workflow_id"],
        postgresql_where=sa.text("counted_at IS NULL"),
    )
    op.create_index("ix_model_choices_task_id", "model_choices", ["task_id"])
    op.create_index(
        "ix_model_choices_tenant_id_asked_model_chosen_at",
        "model_choices",
        ["tenant_id", "asked_model", "chosen_at"],
    )
    op.create_table(
        "model_evidence",
        text_column("tenant_id", 63),
        text_column("asked_model", 127),
        text_column("model", 255),
        sa.Column("failed_before", sa.Text(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=False) for name in SUMS),
        instant("updated_at"),
        sa.CheckConstraint(
            " AND ".join(f"{name} >= 0" for name in SUMS), name=op.f("ck_model_evidence_sums")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name=op.f("fk_model_evidence_tenant_id_tenants"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint(
            "tenant_id", "asked_model", "model", "failed_before", name=op.f("pk_model_evidence")
        ),
    )
    op.create_index("ix_model_evidence_updated_at", "model_evidence", ["updated_at"])


def downgrade() -> None:
    op.drop_table("model_evidence")
    op.drop_table("model_choices")
    op.drop_constraint(op.f("ck_workflows_model"), "workflows")
    op.drop_constraint(op.f("fk_workflows_retry_of_workflows"), "workflows")
    for name in ("retry_of", "model", "asked_model"):
        op.drop_column("workflows", name)
