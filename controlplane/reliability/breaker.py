"""A circuit breaker for an engine or a pool: closed, open, or letting a few probes through. No clock.

What counts is how a call of an engine ended, at its end, and whether its first token was far too late.
Client errors and cancellations say nothing about the engine; back-pressure says that it is alive and
busy.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from zlib import crc32

from controlplane.domain.outcome import FAULTS, AttemptOutcome
from controlplane.domain.pool import BreakerState, OverrideMode

WINDOW_MS: Final = 10_000
WINDOW_OUTCOMES_MIN: Final = 20
FAULT_RATIO_MAX: Final = 0.5
# Outcomes, and first tokens, remembered at most; a busier engine is judged by its latest ones.
WINDOW_OUTCOMES_MAX: Final = 1_024
FAULTS_IN_A_ROW_MAX: Final = 5
# A first token is slow when it takes so many times what was predicted, and at least the floor.
SLOW_RATIO: Final = 3.0
SLOW_MS_MIN: Final = 5_000.0
SLOW_SHARE_MAX: Final = 0.8
SLOW_TOKENS_MIN: Final = 10
# The first opening lasts this long, each opening out of half-open twice the one before.
OPEN_MS: Final = 5_000
OPEN_MS_MAX: Final = 120_000
# An opening is longer or shorter by up to this share, so that breakers do not probe in step.
OPEN_JITTER_RATIO: Final = 0.2
# Spreads the hashes of names that differ in a digit (Knuth's multiplicative hashing).
SPREAD_FACTOR: Final = 0x9E37_79B1
WORD_MASK: Final = 0xFFFF_FFFF
PROBES_MAX: Final = 2
SUCCESSES_TO_CLOSE: Final = 3
# A probe that has not ended within this time is taken for lost and frees its place.
PROBE_MS_MAX: Final = 30_000


def may_eject(ejected: int, pool: int) -> bool:
    """Whether one more engine of a pool of `pool` may be kept out: at most half, never the last.

    When a whole pool fails the cause is elsewhere, and engines that may work beat none.
    """
    return ejected + 1 <= pool // 2


def is_slow(predicted_ms: float, actual_ms: float) -> bool:
    """A first token came so late that the engine is not merely busy."""
    return actual_ms > SLOW_MS_MIN and actual_ms > SLOW_RATIO * predicted_ms


class Event(StrEnum):
    """What can move a breaker, derived from outcomes and time."""

    TRIPPED = "tripped"  # too many faults in the window, or in a row
    SLOWED = "slowed"  # too many first tokens came far too late
    WAITED = "waited"  # the open time has passed
    RETAINED = "retained"  # the engine can not be kept out: what it is sent are probes
    PROBE_FAILED = "probe_failed"
    PROBES_SUCCEEDED = "probes_succeeded"


# Pairs that are not listed leave the state as it is: they are outcomes of calls that began before
# the state changed.
TRANSITIONS: Final[dict[tuple[BreakerState, Event], BreakerState]] = {
    (BreakerState.CLOSED, Event.TRIPPED): BreakerState.OPEN,
    (BreakerState.CLOSED, Event.SLOWED): BreakerState.OPEN,
    (BreakerState.OPEN, Event.WAITED): BreakerState.HALF_OPEN,
    (BreakerState.OPEN, Event.RETAINED): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, Event.PROBE_FAILED): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, Event.PROBES_SUCCEEDED): BreakerState.CLOSED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRules:
    """What opens a breaker besides the share of faults. None: never by this."""

    faults_in_a_row_max: int | None
    slow_share_max: float | None


ENGINE_RULES: Final = BreakerRules(
    faults_in_a_row_max=FAULTS_IN_A_ROW_MAX, slow_share_max=SLOW_SHARE_MAX
)
# A row of faults in a pool may all be of one engine, and a pool whose first tokens are all late is
# short of capacity, which taking more away would not mend.
POOL_RULES: Final = BreakerRules(faults_in_a_row_max=None, slow_share_max=None)


class Breaker:
    """One breaker. Milliseconds of one monotonic clock, given by the caller.

    `why` says what last opened it, in words. `override` is an operator's word and goes before what
    the breaker has seen, which it keeps counting.
    """

    __slots__ = (
        "_faults_in_a_row", "_name", "_open_ms", "_openings", "_outcomes", "_probes", "_rules", "_since_ms",
        "_slow_tokens", "_successes", "_tokens", "_until_ms", "_window_faults", "is_retained", "override",
        "state", "why",
    )  # fmt: skip

    def __init__(self, name: str, rules: BreakerRules = ENGINE_RULES) -> None:
        self.state = BreakerState.CLOSED
        self.is_retained = False
        self.override: OverrideMode | None = None
        self.why = ""
        self._name = name
        self._rules = rules
        self._outcomes: deque[tuple[int, bool]] = deque()
        self._window_faults = 0
        self._faults_in_a_row = 0
        self._tokens: deque[tuple[int, bool]] = deque()
        self._slow_tokens = 0
        self._open_ms = OPEN_MS
        self._openings = 0
        self._since_ms = 0
        self._until_ms = 0
        self._probes: deque[int] = deque()
        self._successes = 0

    # ------------------------------------------------------------ reading

    @property
    def is_trusted(self) -> bool:
        """Nothing stands against sending calls, by what was seen or by an operator's word."""
        if self.override is not None:
            return self.override is OverrideMode.CLOSED
        return self.state is BreakerState.CLOSED

    @property
    def shown(self) -> BreakerState:
        """What operators and policies see. A breaker that may not keep its engine out is still open."""
        if self.override is not None:
            is_open = self.override is OverrideMode.OPEN
            return BreakerState.OPEN if is_open else BreakerState.CLOSED
        return BreakerState.OPEN if self.is_retained else self.state

    @property
    def slow_share(self) -> float:
        """Share of slow first tokens among the latest; 0 when there are too few to tell."""
        if len(self._tokens) < SLOW_TOKENS_MIN:
            return 0.0
        return self._slow_tokens / len(self._tokens)

    def waits_ms(self, now_ms: int) -> int:
        """How long it stays open, at most; 0 when it is not."""
        return max(0, self._until_ms - now_ms) if self.state is BreakerState.OPEN else 0

    def allows(self, now_ms: int) -> bool:
        """Whether a call may go there at this instant. Changes nothing but open to half-open."""
        if self.state is BreakerState.OPEN and now_ms >= self._until_ms:
            self._apply(Event.WAITED, now_ms)
        if self.override is not None:
            return self.override is OverrideMode.CLOSED
        if self.state is BreakerState.HALF_OPEN:
            self._forget_lost_probes(now_ms)
            return len(self._probes) < PROBES_MAX
        return self.state is BreakerState.CLOSED

    # ------------------------------------------------------------ what happens

    def began(self, now_ms: int) -> None:
        """A call goes there: while half-open it is a probe, and takes one of the places."""
        if self.state is BreakerState.HALF_OPEN:
            self._probes.append(now_ms)

    def record(self, outcome: AttemptOutcome, now_ms: int, began_ms: int | None = None) -> None:
        """How a call ended. `began_ms` is what `began` was told; without it, it counts as the latest."""
        is_fault = outcome in FAULTS
        is_good = outcome is AttemptOutcome.OK
        match self.state:
            case BreakerState.CLOSED:
                if is_fault or is_good:
                    self._remember(now_ms, is_fault=is_fault)
                    self._judge_outcomes(now_ms)
            case BreakerState.HALF_OPEN:
                if began_ms is not None and began_ms < self._since_ms:
                    # It began before: what it met there is known.
                    return
                # Neutral outcomes free the probe's place as well.
                self._free_probe(began_ms)
                if is_fault:
                    self._fail(f"a probe failed ({outcome})", now_ms)
                elif is_good:
                    self._successes += 1
                    if self._successes >= SUCCESSES_TO_CLOSE:
                        self._apply(Event.PROBES_SUCCEEDED, now_ms)
            case BreakerState.OPEN:
                # The end of a call that began before: probes decide.
                pass

    def first_token(self, now_ms: int, *, is_slow: bool) -> None:
        """The first token of a call came, far too late or not. A slow probe has failed."""
        if self.state is BreakerState.HALF_OPEN:
            if is_slow and self._rules.slow_share_max is not None:
                self._fail("a probe's first token was far too late", now_ms)
            return
        tokens = self._tokens
        tokens.append((now_ms, is_slow))
        self._slow_tokens += is_slow
        while tokens[0][0] <= now_ms - WINDOW_MS or len(tokens) > WINDOW_OUTCOMES_MAX:
            self._slow_tokens -= tokens.popleft()[1]
        share_max = self._rules.slow_share_max
        if share_max is not None and is_slow and self.slow_share >= share_max:
            self.why = f"{self._slow_tokens} of {len(tokens)} first tokens were far too late"
            self._apply(Event.SLOWED, now_ms)

    def retain(self, now_ms: int) -> None:
        """It may not keep its engine out. Calls that go there now are its probes, however many."""
        self.is_retained = self.state is not BreakerState.CLOSED
        self._apply(Event.RETAINED, now_ms)

    def hasten(self, now_ms: int) -> None:
        """What failed with it works again: it need not wait for longer than the first time."""
        self._open_ms = OPEN_MS
        if self.state is BreakerState.OPEN:
            self._until_ms = min(self._until_ms, now_ms + self._jittered(OPEN_MS))

    # ------------------------------------------------------------ inside

    def _fail(self, why: str, now_ms: int) -> None:
        self.why = why
        self._apply(Event.PROBE_FAILED, now_ms)

    def _apply(self, event: Event, now_ms: int) -> None:
        state = TRANSITIONS.get((self.state, event), self.state)
        if state is self.state:
            return
        if state is BreakerState.OPEN:
            if event is Event.PROBE_FAILED:
                self._open_ms = min(OPEN_MS_MAX, 2 * self._open_ms)
            self._openings += 1
            self._until_ms = now_ms + self._jittered(self._open_ms)
        elif state is BreakerState.CLOSED:
            self._open_ms = OPEN_MS
            self.is_retained = False
        self.state = state
        self._since_ms = now_ms
        self._outcomes.clear()
        self._window_faults = 0
        self._faults_in_a_row = 0
        self._tokens.clear()
        self._slow_tokens = 0
        self._probes.clear()
        self._successes = 0

    def _jittered(self, open_ms: int) -> int:
        """By a hash of name and opening: repeatable, and different for each."""
        number = crc32(f"{self._name}/{self._openings}".encode()) * SPREAD_FACTOR
        spread = (number & WORD_MASK) / WORD_MASK
        return int(open_ms * (1.0 - OPEN_JITTER_RATIO + 2.0 * OPEN_JITTER_RATIO * spread))

    def _remember(self, now_ms: int, *, is_fault: bool) -> None:
        self._faults_in_a_row = self._faults_in_a_row + 1 if is_fault else 0
        self._outcomes.append((now_ms, is_fault))
        self._window_faults += is_fault
        while (
            self._outcomes[0][0] <= now_ms - WINDOW_MS or len(self._outcomes) > WINDOW_OUTCOMES_MAX
        ):
            self._window_faults -= self._outcomes.popleft()[1]

    def _judge_outcomes(self, now_ms: int) -> None:
        in_a_row_max = self._rules.faults_in_a_row_max
        total, faults = len(self._outcomes), self._window_faults
        if in_a_row_max is not None and self._faults_in_a_row >= in_a_row_max:
            self.why = f"{self._faults_in_a_row} calls failed in a row"
        elif total >= WINDOW_OUTCOMES_MIN and faults >= FAULT_RATIO_MAX * total:
            self.why = f"{faults} of {total} calls failed"
        else:
            return
        self._apply(Event.TRIPPED, now_ms)

    def _free_probe(self, began_ms: int | None) -> None:
        if began_ms is None:
            if self._probes:
                self._probes.popleft()
        elif began_ms in self._probes:
            self._probes.remove(began_ms)

    def _forget_lost_probes(self, now_ms: int) -> None:
        while self._probes and self._probes[0] <= now_ms - PROBE_MS_MAX:
            self._probes.popleft()
