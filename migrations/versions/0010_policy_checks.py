"""What checking a policy revision has told, so that each program does it once."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "policy_checks",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("checker", sa.String(length=64), nullable=False),
        sa.Column("report", postgresql.JSONB(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["digest"],
            ["policy_revisions.digest"],
            name=op.f("fk_policy_checks_digest_policy_revisions"),
        ),
        sa.PrimaryKeyConstraint("digest", "checker", name=op.f("pk_policy_checks")),
    )


def downgrade() -> None:
    op.drop_table("policy_checks")
