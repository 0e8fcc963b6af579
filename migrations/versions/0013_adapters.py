"""Adapters of models, served by the engines of those."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapters",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("adapter_of", sa.String(length=255), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("price_prompt_micro_usd_per_mtok", sa.BigInteger(), nullable=True),
        sa.Column("price_cached_micro_usd_per_mtok", sa.BigInteger(), nullable=True),
        sa.Column("price_completion_micro_usd_per_mtok", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "price_prompt_micro_usd_per_mtok >= 0 AND price_cached_micro_usd_per_mtok >= 0"
            " AND price_completion_micro_usd_per_mtok >= 0",
            name=op.f("ck_adapters_prices"),
        ),
        sa.ForeignKeyConstraint(
            ["adapter_of"], ["models.name"], name=op.f("fk_adapters_adapter_of_models")
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_adapters")),
    )


def downgrade() -> None:
    op.drop_table("adapters")
