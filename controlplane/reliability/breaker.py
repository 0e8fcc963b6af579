"""A circuit breaker for an engine: closed, open, or letting a few probes through. No clock.

What counts is how a call of the engine ended, at its end. Client errors and cancellations say
nothing about the engine; back-pressure says that it is alive and busy.
"""

from collections import deque
from enum import StrEnum
from typing import Final

from controlplane.domain.outcome import FAULTS, AttemptOutcome

FAULTS_IN_A_ROW_MAX: Final = 5
WINDOW_MS: Final = 10_000
WINDOW_OUTCOMES_MIN: Final = 20
FAULT_RATIO_MAX: Final = 0.5
# Outcomes remembered at most; a busier engine is judged by its latest ones.
WINDOW_OUTCOMES_MAX: Final = 1_024
# The first opening lasts this long, each opening out of half-open twice the one before.
OPEN_MS: Final = 5_000
OPEN_MS_MAX: Final = 120_000
PROBES_MAX: Final = 3
SUCCESSES_TO_CLOSE: Final = 3
# A probe that has not ended within this time is taken for lost and frees its place.
PROBE_MS_MAX: Final = 30_000


def may_eject(ejected: int, pool: int) -> bool:
    """Whether one more engine of a pool of `pool` may be kept out: at most half, never the last.

    When a whole pool fails the cause is elsewhere, and engines that may work beat none.
    """
    return ejected + 1 <= pool // 2


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(StrEnum):
    """What can move a breaker, derived from outcomes and time."""

    TRIPPED = "tripped"  # too many faults in the window, or in a row
    WAITED = "waited"  # the open time has passed
    PROBE_FAILED = "probe_failed"
    PROBES_SUCCEEDED = "probes_succeeded"


# Pairs that are not listed leave the state as it is: they are outcomes of calls that began before
# the state changed.
TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.CLOSED, Event.TRIPPED): State.OPEN,
    (State.OPEN, Event.WAITED): State.HALF_OPEN,
    (State.HALF_OPEN, Event.PROBE_FAILED): State.OPEN,
    (State.HALF_OPEN, Event.PROBES_SUCCEEDED): State.CLOSED,
}

# Outcomes that prove that the engine answers.
_GOOD: Final = frozenset({AttemptOutcome.OK})


class Breaker:
    """One engine's breaker. Milliseconds of one monotonic clock, given by the caller."""

    __slots__ = (
        "_faults_in_a_row", "_open_ms", "_outcomes", "_probes", "_successes", "_until_ms",
        "_window_faults", "state",
    )  # fmt: skip

    def __init__(self) -> None:
        self.state = State.CLOSED
        self._outcomes: deque[tuple[int, bool]] = deque()
        self._window_faults = 0
        self._faults_in_a_row = 0
        self._open_ms = OPEN_MS
        self._until_ms = 0
        self._probes: deque[int] = deque()
        self._successes = 0

    def allows(self, now_ms: int) -> bool:
        """Whether a call may go to the engine at this instant. Changes nothing but open to half-open."""
        if self.state is State.OPEN and now_ms >= self._until_ms:
            self._apply(Event.WAITED, now_ms)
        if self.state is State.HALF_OPEN:
            self._forget_lost_probes(now_ms)
            return len(self._probes) < PROBES_MAX
        return self.state is State.CLOSED

    def began(self, now_ms: int) -> None:
        """A call goes to the engine: while half-open it is a probe, and takes one of the places."""
        if self.state is State.HALF_OPEN:
            self._probes.append(now_ms)

    def record(self, outcome: AttemptOutcome, now_ms: int) -> None:
        """How a call of the engine ended."""
        is_fault = outcome in FAULTS
        is_good = outcome in _GOOD
        match self.state:
            case State.CLOSED:
                if is_fault or is_good:
                    self._remember(now_ms, is_fault=is_fault)
                    if self._is_tripped():
                        self._apply(Event.TRIPPED, now_ms)
            case State.HALF_OPEN:
                # Neutral outcomes free the probe's place as well.
                if self._probes:
                    self._probes.popleft()
                if is_fault:
                    self._apply(Event.PROBE_FAILED, now_ms)
                elif is_good:
                    self._successes += 1
                    if self._successes >= SUCCESSES_TO_CLOSE:
                        self._apply(Event.PROBES_SUCCEEDED, now_ms)
            case State.OPEN:
                # The end of a call that began before: the engine's fate is decided by probes.
                pass

    def _apply(self, event: Event, now_ms: int) -> None:
        state = TRANSITIONS.get((self.state, event), self.state)
        if state is self.state:
            return
        if state is State.OPEN:
            if event is Event.PROBE_FAILED:
                self._open_ms = min(OPEN_MS_MAX, 2 * self._open_ms)
            self._until_ms = now_ms + self._open_ms
        elif state is State.CLOSED:
            self._open_ms = OPEN_MS
        self.state = state
        self._outcomes.clear()
        self._window_faults = 0
        self._faults_in_a_row = 0
        self._probes.clear()
        self._successes = 0

    def _remember(self, now_ms: int, *, is_fault: bool) -> None:
        self._faults_in_a_row = self._faults_in_a_row + 1 if is_fault else 0
        self._outcomes.append((now_ms, is_fault))
        self._window_faults += is_fault
        while self._outcomes and (
            self._outcomes[0][0] <= now_ms - WINDOW_MS or len(self._outcomes) > WINDOW_OUTCOMES_MAX
        ):
            self._window_faults -= self._outcomes.popleft()[1]

    def _is_tripped(self) -> bool:
        if self._faults_in_a_row >= FAULTS_IN_A_ROW_MAX:
            return True
        total = len(self._outcomes)
        return total >= WINDOW_OUTCOMES_MIN and self._window_faults >= FAULT_RATIO_MAX * total

    def _forget_lost_probes(self, now_ms: int) -> None:
        while self._probes and self._probes[0] <= now_ms - PROBE_MS_MAX:
            self._probes.popleft()
