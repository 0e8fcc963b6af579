"""Forgets what nobody asks for any more: decisions, attempts and ended commands beyond their age.

Knows nothing of who calls it when. What money is proved by stays: requests, the ledger, steps and
windows of budgets; so do workflows, the audit and the revisions of policies.
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
}


async def forget(engine: AsyncEngine, table: Forgettable, *, days: int, rows_max: int) -> int:
    """Delete the oldest rows that are older than `days`, at most `rows_max`; how many there were.

    One transaction. Safe to repeat and to run by several at once. Raises StateUnavailable.
    """
    async with transaction(engine) as connection:
        found = await connection.execute(_FORGET[table], {"days": days, "most": rows_max})
        return found.rowcount
