"""Policy revisions, their rollout, and the audit log."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

APPEND_ONLY = """
CREATE FUNCTION refuse_change_of_history() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'restrict_violation';
END
$$;
CREATE TRIGGER audit_log_append_only BEFORE UPDATE OR DELETE ON audit_log
    FOR EACH ROW EXECUTE FUNCTION refuse_change_of_history();
CREATE TRIGGER audit_log_no_truncate BEFORE TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change_of_history();
CREATE TRIGGER policy_revisions_append_only BEFORE UPDATE OR DELETE ON policy_revisions
    FOR EACH ROW EXECUTE FUNCTION refuse_change_of_history();
CREATE TRIGGER policy_revisions_no_truncate BEFORE TRUNCATE ON policy_revisions
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change_of_history();
"""


def upgrade() -> None:
    op.add_column("decisions", sa.Column("tenant_id", sa.String(length=63)))
    op.add_column("decisions", sa.Column("model", sa.String(length=255)))
    op.add_column("decisions", sa.Column("rule", sa.String(length=127)))
    op.add_column("decisions", sa.Column("facts", postgresql.JSONB()))
    op.add_column(
        "decisions",
        sa.Column("sample_weight", sa.Integer(), server_default=sa.text("1"), nullable=False),
    )
    op.create_check_constraint(
        op.f("ck_decisions_sample_weight"), "decisions", "sample_weight > 0"
    )
    op.create_table(
        "policy_revisions",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("files", postgresql.JSONB(), nullable=False),
        sa.Column("author", sa.String(length=127), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint("digest ~ '^[0-9a-f]{64}$'", name=op.f("ck_policy_revisions_digest")),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_policy_revisions")),
    )
    op.create_index("ix_policy_revisions_created_at", "policy_revisions", ["created_at"])
    op.create_table(
        "policy_rollout",
        sa.Column("id", sa.SmallInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("generation", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("active_digest", sa.String(length=64), nullable=True),
        sa.Column("previous_digest", sa.String(length=64), nullable=True),
        sa.Column("candidate_digest", sa.String(length=64), nullable=True),
        sa.Column("mode", sa.String(length=15), server_default=sa.text("'none'"), nullable=False),
        sa.Column("canary_percent", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("changed_by", sa.String(length=127), server_default=sa.text("''"), nullable=False),
        sa.Column("reason", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column(
            "changed_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint("id = 1", name=op.f("ck_policy_rollout_one_row")),
        sa.CheckConstraint(
            "mode IN ('none', 'shadow', 'canary')", name=op.f("ck_policy_rollout_mode")
        ),
        sa.CheckConstraint(
            "(mode = 'none') = (candidate_digest IS NULL)",
            name=op.f("ck_policy_rollout_candidate"),
        ),
        sa.CheckConstraint(
            "canary_percent BETWEEN 0 AND 100", name=op.f("ck_policy_rollout_percent")
        ),
        sa.CheckConstraint(
            "(mode = 'canary') = (canary_percent > 0)", name=op.f("ck_policy_rollout_canary")
        ),
        *(
            sa.ForeignKeyConstraint(
                [column],
                ["policy_revisions.digest"],
                name=op.f(f"fk_policy_rollout_{column}_policy_revisions"),
            )
            for column in ("active_digest", "previous_digest", "candidate_digest")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policy_rollout")),
    )
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(length=127), nullable=False),
        sa.Column("action", sa.String(length=63), nullable=False),
        sa.Column("subject", sa.String(length=255), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("before", postgresql.JSONB(), nullable=True),
        sa.Column("after", postgresql.JSONB(), nullable=True),
        sa.Column("prev_hash", sa.String(length=64), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
        sa.UniqueConstraint("prev_hash", name=op.f("uq_audit_log_prev_hash")),
    )
    op.create_index("ix_audit_log_subject_id", "audit_log", ["subject", "id"])
    op.execute(APPEND_ONLY)
    op.execute("INSERT INTO policy_rollout (id, generation) VALUES (1, 0)")


def downgrade() -> None:
    op.drop_table("audit_log")
    op.drop_table("policy_rollout")
    op.drop_table("policy_revisions")
    op.drop_constraint(op.f("ck_decisions_sample_weight"), "decisions")
    for column in ("sample_weight", "facts", "rule", "model", "tenant_id"):
        op.drop_column("decisions", column)
    op.execute("DROP FUNCTION refuse_change_of_history()")
