"""Lives of a replica: money that one life was lent is not another's."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("replicas", "budget_leases"):
        op.add_column(
            table,
            sa.Column("generation", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        )
    op.drop_constraint(op.f("pk_budget_leases"), "budget_leases")
    op.create_primary_key(
        op.f("pk_budget_leases"), "budget_leases", ["budget_id", "replica_id", "generation"]
    )


def downgrade() -> None:
    """What was lent to lives that are over returns: without generations nobody else gives it back."""
    op.execute(
        """
        WITH over AS (
            DELETE FROM budget_leases USING replicas
            WHERE replicas.id = budget_leases.replica_id
                  AND budget_leases.generation < replicas.generation
            RETURNING budget_id, amount
        ), total AS (
            SELECT budget_id, sum(amount)::int8 AS amount FROM over GROUP BY budget_id
        )
        UPDATE budgets SET reserved = reserved - total.amount
        FROM total WHERE budgets.id = total.budget_id
        """
    )
    op.drop_constraint(op.f("pk_budget_leases"), "budget_leases")
    op.create_primary_key(op.f("pk_budget_leases"), "budget_leases", ["budget_id", "replica_id"])
    for table in ("budget_leases", "replicas"):
        op.drop_column(table, "generation")
