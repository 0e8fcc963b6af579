"""What is learned about sizes, and what the performance model asks of models and GPUs beside sizes."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_ZERO = sa.text("0")
_MODEL_COLUMNS = (
    ("parameters_active", sa.BigInteger()),
    ("experts", sa.Integer()),
    ("experts_active", sa.Integer()),
    ("expert_weights_bytes", sa.BigInteger()),
    ("kv_heads", sa.Integer()),
)
_GPU_COLUMNS = ("fp8_flops_per_s", "fp4_flops_per_s")


def upgrade() -> None:
    for name in _GPU_COLUMNS:
        op.add_column(
            "gpu_types", sa.Column(name, sa.Double(), nullable=False, server_default=_ZERO)
        )
    op.create_check_constraint(
        op.f("ck_gpu_types_low_precision"),
        "gpu_types",
        "fp8_flops_per_s >= 0 AND fp4_flops_per_s >= 0",
    )
    for name, kind in _MODEL_COLUMNS:
        op.add_column("models", sa.Column(name, kind, nullable=False, server_default=_ZERO))
    op.create_check_constraint(
        op.f("ck_models_experts"),
        "models",
        "parameters_active >= 0 AND experts_active >= 0 AND kv_heads >= 0"
        " AND parameters_active <= parameters AND experts_active <= experts"
        " AND expert_weights_bytes >= 0 AND expert_weights_bytes <= weights_bytes",
    )
    op.create_table(
        "size_estimates",
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("scope", sa.String(length=15), nullable=False),
        sa.Column("tenant_id", sa.String(length=63), nullable=False),
        sa.Column("quantity", sa.String(length=31), nullable=False),
        sa.Column("weights", postgresql.ARRAY(sa.Double()), nullable=False),
        sa.Column("observations", sa.BigInteger(), nullable=False),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint("observations >= 0", name=op.f("ck_size_estimates_observations")),
        sa.PrimaryKeyConstraint(
            "model", "scope", "tenant_id", "quantity", name=op.f("pk_size_estimates")
        ),
    )
    op.create_index("ix_size_estimates_updated_at", "size_estimates", ["updated_at"])


def downgrade() -> None:
    op.drop_table("size_estimates")
    op.drop_constraint(op.f("ck_models_experts"), "models", type_="check")
    for name, _ in reversed(_MODEL_COLUMNS):
        op.drop_column("models", name)
    op.drop_constraint(op.f("ck_gpu_types_low_precision"), "gpu_types", type_="check")
    for name in reversed(_GPU_COLUMNS):
        op.drop_column("gpu_types", name)
