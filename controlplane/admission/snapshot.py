"""What a decision is made from, frozen for the time that it takes."""

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.domain.fleet import EngineRow


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows of the model asked for, cached prompt tokens by row index, and the queue's length and limit.

    The rows are the live ones: nothing changes them while a decision runs, and nothing is copied.
    `waiting` counts the calls before this one, so a call that waits already never lacks room.
    """

    rows: tuple[EngineRow, ...]
    cached: Mapping[int, int]
    waiting: int
    waiting_max: int
