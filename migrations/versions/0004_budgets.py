"""Budgets in dollars and tokens, with windows, for keys as well; limits of keys; idempotency keys."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

RENAMED = (
    ("budgets", "limit_micro_usd", "limit"),
    ("budgets", "spent_micro_usd", "spent"),
    ("budgets", "reserved_micro_usd", "reserved"),
    ("budget_leases", "amount_micro_usd", "amount"),
)
LIMITS = ("requests_per_minute", "tokens_per_minute", "calls_in_flight_max")


def rename(table: str, old: str, new: str) -> None:
    """A column, and the constraint NOT NULL that PostgreSQL 18 names after it."""
    op.alter_column(table, old, new_column_name=new)
    op.execute(
        f"""
        DO $$ BEGIN
            IF EXISTS (SELECT FROM pg_constraint WHERE conname = '{table}_{old}_not_null') THEN
                ALTER TABLE {table}
                    RENAME CONSTRAINT {table}_{old}_not_null TO {table}_{new}_not_null;
            END IF;
        END $$
        """
    )


def upgrade() -> None:
    for table, old, new in RENAMED:
        rename(table, old, new)
    op.add_column(
        "budgets",
        sa.Column(
            "unit", sa.String(length=15), server_default=sa.text("'micro_usd'"), nullable=False
        ),
    )
    op.add_column(
        "budgets",
        sa.Column(
            "window", sa.String(length=7), server_default=sa.text("'total'"), nullable=False
        ),
    )
    op.add_column(
        "budgets",
        sa.Column(
            "window_started_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
    )
    op.create_check_constraint(
        op.f("ck_budgets_unit"), "budgets", "unit IN ('micro_usd', 'tokens')"
    )
    op.create_check_constraint(
        op.f("ck_budgets_unit_of_id"), "budgets", "(unit = 'tokens') = (right(id, 7) = '\\:tokens')"
    )
    op.create_check_constraint(
        op.f("ck_budgets_window"),
        "budgets",
        "\"window\" IN ('total', 'hour', 'day', 'week', 'month')",
    )
    op.create_index(
        "ix_budgets_windowed",
        "budgets",
        ["window_started_at"],
        postgresql_where=sa.text("\"window\" <> 'total'"),
    )
    op.create_table(
        "budget_windows",
        sa.Column("budget_id", sa.String(length=127), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("limit", sa.BigInteger(), nullable=False),
        sa.Column("spent", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("spent >= 0", name=op.f("ck_budget_windows_not_negative")),
        sa.ForeignKeyConstraint(
            ["budget_id"],
            ["budgets.id"],
            name=op.f("fk_budget_windows_budget_id_budgets"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("budget_id", "started_at", name=op.f("pk_budget_windows")),
    )
    op.add_column(
        "ledger",
        sa.Column(
            "charges",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
    )
    for name in LIMITS:
        op.add_column("api_keys", sa.Column(name, sa.Integer(), nullable=True))
    op.create_check_constraint(
        op.f("ck_api_keys_limits"), "api_keys", " AND ".join(f"{name} > 0" for name in LIMITS)
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant_id", sa.String(length=63), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("body_digest", sa.LargeBinary(length=32), nullable=False),
        sa.Column("request_id", sa.String(length=63), nullable=False),
        sa.Column("replica_id", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=7), server_default=sa.text("'open'"), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "state IN ('open', 'done')", name=op.f("ck_idempotency_keys_state")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name=op.f("fk_idempotency_keys_tenant_id_tenants"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("tenant_id", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index("ix_idempotency_keys_expires_at", "idempotency_keys", ["expires_at"])
    op.create_index(
        "ix_idempotency_keys_open",
        "idempotency_keys",
        ["replica_id"],
        postgresql_where=sa.text("state = 'open'"),
    )


def downgrade() -> None:
    """Accounts in tokens, of keys, and windows end here: what they counted is in the ledger."""
    op.drop_table("idempotency_keys")
    op.drop_constraint(op.f("ck_api_keys_limits"), "api_keys")
    for name in LIMITS:
        op.drop_column("api_keys", name)
    op.drop_column("ledger", "charges")
    op.drop_table("budget_windows")
    op.execute("DELETE FROM budgets WHERE unit = 'tokens' OR starts_with(id, 'key:')")
    op.drop_index("ix_budgets_windowed", "budgets")
    op.drop_constraint(op.f("ck_budgets_unit_of_id"), "budgets")
    for name in ("window_started_at", "window", "unit"):
        op.drop_column("budgets", name)
    for table, old, new in RENAMED:
        rename(table, new, old)
