"""What the planner wants, what became of it, and what it learned of demand."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def instant(name: str, *, is_required: bool = True) -> sa.Column:
    return sa.Column(
        name,
        sa.DateTime(timezone=True),
        nullable=not is_required,
        server_default=sa.text("now()") if is_required else None,
    )


def document(name: str) -> sa.Column:
    return sa.Column(name, postgresql.JSONB(astext_type=sa.Text()), nullable=False)


def words(name: str) -> sa.Column:
    return sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False)


def upgrade() -> None:
    op.create_table(
        "planner_control",
        sa.Column("id", sa.SmallInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("generation", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "mode", sa.String(length=15), server_default=sa.text("'propose'"), nullable=False
        ),
        sa.Column("is_paused", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column(
            "changed_by", sa.String(length=127), server_default=sa.text("''"), nullable=False
        ),
        words("reason"),
        instant("changed_at"),
        sa.CheckConstraint("id = 1", name=op.f("ck_planner_control_one_row")),
        sa.CheckConstraint(
            "mode IN ('off', 'propose', 'act')", name=op.f("ck_planner_control_mode")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_planner_control")),
    )
    op.execute("INSERT INTO planner_control DEFAULT VALUES")
    op.create_table(
        "plans",
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("problem_digest", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=31), nullable=False),
        sa.Column(
            "state", sa.String(length=15), server_default=sa.text("'proposed'"), nullable=False
        ),
        document("document"),
        instant("made_at"),
        instant("confirmed_at"),
        sa.Column("applied_by", sa.String(length=127), nullable=True),
        instant("ended_at", is_required=False),
        sa.CheckConstraint(
            "state IN ('proposed', 'applying', 'applied', 'failed', 'cancelled')",
            name=op.f("ck_plans_state"),
        ),
        sa.PrimaryKeyConstraint("revision", name=op.f("pk_plans")),
    )
    op.create_index(
        "uq_plans_applying",
        "plans",
        ["state"],
        unique=True,
        postgresql_where=sa.text("state = 'applying'"),
    )
    op.create_index("ix_plans_made_at", "plans", ["made_at"])
    op.create_table(
        "plan_moves",
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=15), nullable=False),
        sa.Column("node_id", sa.String(length=63), nullable=False),
        sa.Column("engine_id", sa.String(length=127), nullable=False),
        sa.Column(
            "state", sa.String(length=15), server_default=sa.text("'waiting'"), nullable=False
        ),
        words("detail"),
        document("body"),
        instant("began_at", is_required=False),
        instant("ended_at", is_required=False),
        sa.CheckConstraint(
            "state IN ('waiting', 'running', 'done', 'failed', 'undoing', 'undone', 'stuck',"
            " 'cancelled', 'not_executable')",
            name=op.f("ck_plan_moves_state"),
        ),
        sa.ForeignKeyConstraint(
            ["revision"],
            ["plans.revision"],
            name=op.f("fk_plan_moves_revision_plans"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("revision", "number", name=op.f("pk_plan_moves")),
    )
    op.create_table(
        "demand_slots",
        sa.Column("class_id", sa.String(length=511), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        document("body"),
        sa.PrimaryKeyConstraint("class_id", "started_at", name=op.f("pk_demand_slots")),
    )
    op.create_index("ix_demand_slots_started_at", "demand_slots", ["started_at"])
    op.create_table(
        "forecasts",
        sa.Column("class_id", sa.String(length=511), nullable=False),
        document("state"),
        instant("updated_at"),
        sa.PrimaryKeyConstraint("class_id", name=op.f("pk_forecasts")),
    )
    op.create_table(
        "engine_specs",
        sa.Column("engine_id", sa.String(length=127), nullable=False),
        sa.Column("node_id", sa.String(length=63), nullable=False),
        document("body"),
        sa.ForeignKeyConstraint(
            ["node_id"],
            ["nodes.id"],
            name=op.f("fk_engine_specs_node_id_nodes"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("engine_id", name=op.f("pk_engine_specs")),
    )


def downgrade() -> None:
    for name in (
        "engine_specs",
        "forecasts",
        "demand_slots",
        "plan_moves",
        "plans",
        "planner_control",
    ):
        op.drop_table(name)
