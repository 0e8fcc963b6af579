"""Old settlements are folded into sums: a row that leaves the ledger adds to what its accounts were charged."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# The database itself adds a row up as it goes, so that no way of deleting one loses money.
FOLDING = """
CREATE FUNCTION fold_ledger() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.settled_at > clock_timestamp() - interval '30 days'
       OR EXISTS (SELECT FROM workflows WHERE id = OLD.workflow_id AND state = 'running') THEN
        RAISE EXCEPTION 'the ledger is append-only: DELETE refused of what is not old and over'
            USING ERRCODE = 'restrict_violation';
    END IF;
    INSERT INTO ledger_folded AS folded (kind, id, calls, amount)
    SELECT kind, id, 1, amount FROM (
        SELECT 'tenant' AS kind, OLD.tenant_id AS id, OLD.amount_micro_usd AS amount
        UNION ALL
        SELECT 'workflow', OLD.workflow_id, OLD.amount_micro_usd WHERE OLD.workflow_id IS NOT NULL
        UNION ALL
        SELECT 'account', key, value::int8 FROM jsonb_each_text(OLD.charges)
    ) AS given ORDER BY kind, id
    ON CONFLICT (kind, id) DO UPDATE SET
        calls = folded.calls + excluded.calls, amount = folded.amount + excluded.amount;
    RETURN NULL;
END
$$;
CREATE FUNCTION refuse_change_of_folded() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP IN ('DELETE', 'TRUNCATE') OR pg_trigger_depth() < 2 THEN
        RAISE EXCEPTION 'sums of the ledger change by folding only: % refused', TG_OP
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END
$$;
DROP TRIGGER ledger_append_only ON ledger;
CREATE TRIGGER ledger_append_only BEFORE UPDATE ON ledger
    FOR EACH ROW EXECUTE FUNCTION refuse_change_of_ledger();
CREATE TRIGGER ledger_folds AFTER DELETE ON ledger
    FOR EACH ROW EXECUTE FUNCTION fold_ledger();
CREATE TRIGGER ledger_folded_by_folding BEFORE INSERT OR UPDATE OR DELETE ON ledger_folded
    FOR EACH ROW EXECUTE FUNCTION refuse_change_of_folded();
CREATE TRIGGER ledger_folded_no_truncate BEFORE TRUNCATE ON ledger_folded
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change_of_folded();
"""
UNFOLDING = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM ledger_folded) THEN
        RAISE EXCEPTION 'settlements were folded: without their sums money can not be proved'
            USING ERRCODE = 'restrict_violation';
    END IF;
END $$;
DROP TRIGGER ledger_folds ON ledger;
DROP TRIGGER ledger_append_only ON ledger;
CREATE TRIGGER ledger_append_only BEFORE UPDATE OR DELETE ON ledger
    FOR EACH ROW EXECUTE FUNCTION refuse_change_of_ledger();
DROP FUNCTION fold_ledger();
"""


def upgrade() -> None:
    op.create_table(
        "ledger_folded",
        sa.Column("kind", sa.String(length=15), nullable=False),
        sa.Column("id", sa.String(length=127), nullable=False),
        sa.Column("calls", sa.BigInteger(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "kind IN ('tenant', 'workflow', 'account')", name=op.f("ck_ledger_folded_kind")
        ),
        sa.CheckConstraint("calls > 0 AND amount >= 0", name=op.f("ck_ledger_folded_counts")),
        sa.PrimaryKeyConstraint("kind", "id", name=op.f("pk_ledger_folded")),
    )
    op.create_index("ix_ledger_settled_at", "ledger", ["settled_at"])
    op.create_index("ix_ledger_workflow_id", "ledger", ["workflow_id"])
    op.execute(FOLDING)


def downgrade() -> None:
    op.execute(UNFOLDING)
    op.drop_index("ix_ledger_workflow_id", "ledger")
    op.drop_index("ix_ledger_settled_at", "ledger")
    op.drop_table("ledger_folded")
    op.execute("DROP FUNCTION refuse_change_of_folded()")
