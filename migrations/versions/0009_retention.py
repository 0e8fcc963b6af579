"""Age of attempts and of ended commands, so that old ones can be found and forgotten."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "attempts",
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
    )
    op.create_index("ix_attempts_created_at", "attempts", ["created_at"])
    op.create_index(
        "ix_commands_ended_at",
        "commands",
        ["ended_at"],
        postgresql_where=sa.text("ended_at IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_commands_ended_at", "commands")
    op.drop_index("ix_attempts_created_at", "attempts")
    op.drop_column("attempts", "created_at")
