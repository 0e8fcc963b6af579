"""What a decision is made from, frozen for the time that it takes."""

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.domain.fleet import EngineRow


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Rows of the model asked for, and cached prompt tokens by row index.

    The rows are the live ones: nothing changes them while a decision runs, and nothing is copied.
    """

    rows: tuple[EngineRow, ...]
    cached: Mapping[int, int]
