"""What operators decided about breakers."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "breaker_overrides",
        sa.Column("target", sa.String(length=383), nullable=False),
        sa.Column("mode", sa.String(length=15), nullable=False),
        sa.Column("actor", sa.String(length=127), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint("mode IN ('open', 'closed')", name=op.f("ck_breaker_overrides_mode")),
        sa.PrimaryKeyConstraint("target", name=op.f("pk_breaker_overrides")),
    )


def downgrade() -> None:
    op.drop_table("breaker_overrides")
