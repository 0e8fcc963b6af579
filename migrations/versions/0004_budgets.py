"""Budgets in dollars and tokens, with windows, for keys as well; limits of keys; idempotency keys."""

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
