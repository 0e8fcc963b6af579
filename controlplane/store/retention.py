"""Forgets what nobody asks for any more: decisions, attempts, ended commands and calls beyond their age.

Knows nothing of who calls it when. What money is proved by stays: a call's settlement leaves the ledger
only into the sums of its accounts, which the database adds up itself; steps and windows of budgets stay,
and so do workflows, the audit and the revisions of policies.
"""

from enum import StrEnum
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.store.session import transaction


class Forgettable(StrEnum):
    """Tables whose old rows may go."""

    DECISIONS = "decisions"
    ATTEMPTS = "attempts"
    COMMANDS = "commands"
    REQUESTS = "requests"


# Each finds the oldest rows by an index and passes over those that somebody holds. A call that is open
# keeps its decisions and attempts, however old it is: who ends it after a crash may want to know.
_FORGET: Final = {
    Forgettable.DECISIONS: text(
        """
        DELETE FROM decisions USING (
            SELECT request_id, number FROM decisions AS kept
            WHERE decided_at < clock_timestamp() - make_interval(days => :days)
                  AND NOT EXISTS (SELECT FROM requests
                                  WHERE requests.id = kept.request_id AND state = 'open')
            ORDER BY decided_at LIMIT :most FOR UPDATE SKIP LOCKED
        ) AS old
        WHERE decisions.request_id = old.request_id AND decisions.number = old.number
        """
    ),
    Forgettable.ATTEMPTS: text(
        """
        DELETE FROM attempts USING (
            SELECT request_id, number, leg FROM attempts AS kept
            WHERE created_at < clock_timestamp() - make_interval(days => :days)
                  AND NOT EXISTS (SELECT FROM requests
                                  WHERE requests.id = kept.request_id AND state = 'open')
            ORDER BY created_at LIMIT :most FOR UPDATE SKIP LOCKED
        ) AS old
        WHERE attempts.request_id = old.request_id AND attempts.number = old.number
              AND attempts.leg = old.leg
        """
    ),
    Forgettable.COMMANDS: text(
        """
        DELETE FROM commands USING (
            SELECT id FROM commands
            WHERE ended_at < clock_timestamp() - make_interval(days => :days)
                  AND state IN ('done', 'failed', 'stale_epoch')
            ORDER BY ended_at LIMIT :most FOR UPDATE SKIP LOCKED
        ) AS old
        WHERE commands.id = old.id
        """
    ),
    # A call goes with its settlement, which a trigger folds into `ledger_folded` as it goes.
    Forgettable.REQUESTS: text(
        """
        WITH old AS (
            SELECT request_id FROM ledger
            WHERE settled_at < clock_timestamp() - make_interval(days => :days)
                  AND NOT EXISTS (SELECT FROM workflows
                                  WHERE workflows.id = ledger.workflow_id AND state = 'running')
            ORDER BY settled_at LIMIT :most FOR UPDATE SKIP LOCKED
        ), gone AS (
            DELETE FROM ledger USING old WHERE ledger.request_id = old.request_id
            RETURNING ledger.request_id
        )
        DELETE FROM requests USING gone WHERE requests.id = gone.request_id
        """
    ),
}


async def forget(engine: AsyncEngine, table: Forgettable, *, days: int, rows_max: int) -> int:
    """Delete the oldest rows that are older than `days`, at most `rows_max`; how many there were.

    One transaction. Safe to repeat and to run by several at once. Raises StateUnavailable.
    """
    async with transaction(engine) as connection:
        found = await connection.execute(_FORGET[table], {"days": days, "most": rows_max})
        return found.rowcount
