"""Engines that sleep or are cordoned, the progress and the refusal of commands, and what loads took."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

ENGINE_STATES = ("starting", "serving", "draining", "sleeping", "stopped", "failed")
COMMAND_STATES = ("pending", "sent", "done", "failed", "refused", "stale_epoch")


def _one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


def upgrade() -> None:
    op.drop_constraint(op.f("ck_engines_state"), "engines", type_="check")
    op.create_check_constraint(op.f("ck_engines_state"), "engines", _one_of("state", ENGINE_STATES))
    op.drop_constraint(op.f("ck_commands_state"), "commands", type_="check")
    op.create_check_constraint(
        op.f("ck_commands_state"), "commands", _one_of("state", COMMAND_STATES)
    )
    op.add_column(
        "engines", sa.Column("cordon", sa.Text(), server_default=sa.text("''"), nullable=False)
    )
    for name in ("sleep_level", "wake_ms", "load_ms"):
        op.add_column(
            "engines", sa.Column(name, sa.Integer(), server_default=sa.text("0"), nullable=False)
        )
    op.add_column(
        "engines",
        sa.Column("load_medium", sa.String(15), server_default=sa.text("''"), nullable=False),
    )
    op.add_column(
        "engines",
        sa.Column(
            "capabilities", postgresql.JSONB(), server_default=sa.text("'[]'::jsonb"), nullable=False
        ),
    )
    op.add_column("commands", sa.Column("progress", postgresql.JSONB(), nullable=True))
    op.create_table(
        "weight_loads",
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("node_id", sa.String(length=63), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("medium", sa.String(length=15), nullable=False),
        sa.Column("load_ms", sa.Integer(), nullable=False),
        sa.Column("loads", sa.BigInteger(), nullable=False),
        sa.Column("started_ms", sa.BigInteger(), nullable=False),
        sa.Column(
            "updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.ForeignKeyConstraint(
            ["model"],
            ["models.name"],
            name=op.f("fk_weight_loads_model_models"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["node_id"],
            ["nodes.id"],
            name=op.f("fk_weight_loads_node_id_nodes"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint(
            "model", "node_id", "gpus", "medium", name=op.f("pk_weight_loads")
        ),
        sa.CheckConstraint("load_ms > 0 AND loads > 0", name=op.f("ck_weight_loads_measured")),
    )


def downgrade() -> None:
    op.drop_table("weight_loads")
    op.drop_column("commands", "progress")
    for name in ("capabilities", "load_medium", "load_ms", "wake_ms", "sleep_level", "cordon"):
        op.drop_column("engines", name)
    op.execute("UPDATE commands SET state = 'failed' WHERE state = 'refused'")
    op.execute("UPDATE engines SET state = 'stopped' WHERE state = 'sleeping'")
    op.drop_constraint(op.f("ck_commands_state"), "commands", type_="check")
    op.create_check_constraint(
        op.f("ck_commands_state"),
        "commands",
        _one_of("state", tuple(state for state in COMMAND_STATES if state != "refused")),
    )
    op.drop_constraint(op.f("ck_engines_state"), "engines", type_="check")
    op.create_check_constraint(
        op.f("ck_engines_state"),
        "engines",
        _one_of("state", tuple(state for state in ENGINE_STATES if state != "sleeping")),
    )
