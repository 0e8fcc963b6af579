"""What rows looked like before each change, so that a past decision can be explained from its own tick."""

from collections import deque
from collections.abc import Sequence
from itertools import islice

from controlplane.domain.fleet import Dynamic, EngineRow

# About 300 bytes each; at 1,000 changes a second the log reaches a minute back.
ENTRIES_MAX = 65_536


class TickLog:
    """An undo log over the dynamic fields of rows. A tick is the number of changes so far."""

    __slots__ = ("_dropped", "_entries", "_entries_max")

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries: deque[tuple[EngineRow, Dynamic]] = deque()
        self._entries_max = entries_max
        self._dropped = 0

    def before_change(self, row: EngineRow) -> None:
        """Keep the row's dynamic fields as they are; call it before they change."""
        entries = self._entries
        entries.append((row, row.dynamic()))
        if len(entries) > self._entries_max:
            entries.popleft()
            self._dropped += 1

    def mark(self) -> int:
        """The tick of a decision that is made from the rows as they are now."""
        return self._dropped + len(self._entries)

    def rows_at(self, tick: int, rows: Sequence[EngineRow]) -> list[EngineRow] | None:
        """Copies of `rows` as they stood at `tick`, or None when the log no longer reaches that far.

        Only dynamic fields are rolled back: what an engine is (model, rates, region) is taken as it
        is now.
        """
        if tick < self._dropped:
            return None
        # From the newest change back to the tick: what is seen last for a row is what it was then.
        was: dict[int, Dynamic] = {}
        for row, dynamic in islice(reversed(self._entries), max(0, self.mark() - tick)):
            was[id(row)] = dynamic
        return [row.as_of(was.get(id(row)) or row.dynamic()) for row in rows]
