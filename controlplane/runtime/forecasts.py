"""What each class of demand is expected to bring: learned from the slots in PostgreSQL, by the leader.

Learning is `scheduler/planner/forecast.py`; here it is fed, kept, and made up for after a change of
leader. The slots are the truth: what is kept of the learning only saves reading all of them again.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from controlplane.runtime.demand import (
    SLOT_S,
    SLOTS_KEPT_S,
    DemandSeen,
    Expected,
    Slot,
    remembered,
    slot_of,
    slot_start,
)
from controlplane.scheduler.planner.forecast import ForecastState, forecast, observe
from controlplane.scheduler.planner.problem import from_builtins
from controlplane.store import demand as store

# A part of a slot that is shorter says too little.
PART_S_MIN: Final = 60.0
# Until this much has been seen of a class, it is expected to go on as it is.
SEEN_S_MIN: Final = 2.0 * SLOT_S


class Forecasts:
    """Of one leader. Belongs to one task."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._states: dict[str, ForecastState] | None = None
        # What each class usually needs, of its last slots.
        self.usual: dict[str, Slot] = {}

    def forget(self) -> None:
        """Read again what was learned, since another replica may have led."""
        self._states = None

    async def expect(
        self,
        epoch: int,
        seen: DemandSeen,
        written: Sequence[tuple[datetime, Mapping[str, Slot]]],
        ahead_s: float,
    ) -> dict[str, Expected]:
        """What each class brings `ahead_s` seconds from now, by its id.

        `written` are the slots that this round has closed. Raises StateUnavailable.
        """
        states = self._states
        if states is None:
            states = await self._load(epoch, seen.at)
        elif written:
            for _, slots in written:
                self._remember(slots.values())
            states = await asyncio.to_thread(
                learned, states, [(start, _counts(slots)) for start, slots in written]
            )
            await self._save(epoch, states)
        self._states = states
        start = slot_start(seen.at)
        part_s = (seen.at - start).total_seconds()
        begun = await store.arrivals(self._engine, start, seen.at, SLOT_S)
        now = {key.class_id: sum(bins.values()) for key, bins in begun.items()}
        return expected_of(states, now, seen.at.timestamp(), part_s, ahead_s)

    async def _load(self, epoch: int, at: datetime) -> dict[str, ForecastState]:
        kept = await store.load_forecasts(self._engine)
        since = at - timedelta(seconds=SLOTS_KEPT_S)
        starts = await store.slot_starts(self._engine, since)
        slots = [slot_of(record) for record in await store.slots(self._engine, since)]
        self.usual = {}
        self._remember(sorted(slots, key=lambda slot: slot.started_at))
        by_start: dict[datetime, dict[str, Slot]] = {start: {} for start in starts}
        for slot in slots:
            by_start[slot.started_at][slot.key.class_id] = slot
        counts = [(start, _counts(by_start[start])) for start in starts]
        states = await asyncio.to_thread(_restored, kept, counts)
        await self._save(epoch, states)
        return states

    def _remember(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            class_id = slot.key.class_id
            self.usual[class_id] = remembered(self.usual.get(class_id), slot)

    async def _save(self, epoch: int, states: Mapping[str, ForecastState]) -> None:
        documents = await asyncio.to_thread(
            lambda: {class_id: as_builtins(state) for class_id, state in states.items()}
        )
        await store.save_forecasts(self._engine, epoch, documents)


def expected_of(
    states: Mapping[str, ForecastState],
    begun: Mapping[str, int],
    at_s: float,
    part_s: float,
    ahead_s: float,
) -> dict[str, Expected]:
    """What each class that was seen for long enough brings `ahead_s` seconds after `at_s`, by its id.

    `begun` came in the `part_s` seconds of the slot that is under way.
    """
    expected = {}
    for class_id, state in states.items():
        if sum(state.seconds) < SEEN_S_MIN:
            continue
        if part_s >= PART_S_MIN and state.at_s < at_s:
            # The slot that is under way is taken in for this once, and whole when it is over.
            state = observe(state, at_s, begun.get(class_id, 0), part_s)  # noqa: PLW2901
        ahead = forecast(state, at_s + ahead_s)
        expected[class_id] = Expected(
            arrivals_per_s=ahead.mean_per_s,
            spread_per_s=ahead.spread_per_s,
            dispersion_ratio=ahead.dispersion_ratio,
        )
    return expected


def learned(
    states: Mapping[str, ForecastState], slots: Iterable[tuple[datetime, Mapping[str, int]]]
) -> dict[str, ForecastState]:
    """What is known after these slots, oldest first; each maps classes to the workflows they brought.

    A class that a slot does not name brought nothing in it; one that was never seen begins with it.
    What a state has seen already is not counted twice.
    """
    after = dict(states)
    for start, counts in slots:
        end_s = start.timestamp() + SLOT_S
        for class_id in after.keys() | counts.keys():
            state = after.get(class_id) or ForecastState()
            if state.at_s < end_s:
                after[class_id] = observe(state, end_s, counts.get(class_id, 0), float(SLOT_S))
    return after


def as_builtins(state: ForecastState) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(asdict(state)))
    return document


def _restored(
    kept: Mapping[str, dict[str, Any]], slots: Sequence[tuple[datetime, Mapping[str, int]]]
) -> dict[str, ForecastState]:
    states = {}
    for class_id, document in kept.items():
        try:
            states[class_id] = from_builtins(ForecastState, document)
        except ValueError:
            # Another version of this program kept it: it is learned again from the slots.
            continue
    return learned(states, slots)


def _counts(slots: Mapping[str, Slot]) -> dict[str, int]:
    return {class_id: round(slot.workflows) for class_id, slot in slots.items()}
