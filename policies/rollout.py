"""Whether a candidate bundle must be taken back: it denies more than the active one on the same calls.

Pure: instants are given. Counts calls, and knows neither tenants nor rules.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# A rise of denials by more than this share of the calls is one.
RISE_POINTS_MAX: Final = 2
# So long it must last, without a pause.
RISE_MS_MAX: Final = 60_000
# The rise is looked at over the last calls: at least so many, from at least so long.
CALLS_MIN: Final = 20
WINDOW_MS: Final = 10_000
# What is older than this says nothing about now.
AGE_MS_MAX: Final = 300_000
_BUCKET_MS: Final = 1_000
_PERCENT: Final = 100


class Change(StrEnum):
    """What a candidate makes of one call, next to the active bundle."""

    NEITHER_DENIES = "neither_denies"
    BOTH_DENY = "both_deny"
    NEWLY_DENIED = "newly_denied"
    NEWLY_ALLOWED = "newly_allowed"


def change_of(*, active_denies: bool, candidate_denies: bool) -> Change:
    if active_denies:
        return Change.BOTH_DENY if candidate_denies else Change.NEWLY_ALLOWED
    return Change.NEWLY_DENIED if candidate_denies else Change.NEITHER_DENIES


@dataclass(slots=True)
class _Bucket:
    """One second: calls, and how many more of them the candidate denies (fewer: below zero)."""

    started_ms: int
    calls: int = 0
    rise: int = 0


class RolloutWatch:
    """Watches one candidate. Tell it of every call, and ask it about once a second."""

    __slots__ = ("_buckets", "_erring_rule", "_risen_ms", "calls", "changes")

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()
        self._risen_ms: int | None = None
        self._erring_rule = ""
        self.calls = 0
        self.changes = dict.fromkeys(Change, 0)

    def note(self, change: Change, now_ms: int) -> None:
        """One call that both bundles have ruled on."""
        self.calls += 1
        self.changes[change] += 1
        buckets = self._buckets
        if not buckets or now_ms - buckets[-1].started_ms >= _BUCKET_MS:
            buckets.append(_Bucket(now_ms))
            while now_ms - buckets[0].started_ms > AGE_MS_MAX:
                buckets.popleft()
        bucket = buckets[-1]
        bucket.calls += 1
        if change is Change.NEWLY_DENIED:
            bucket.rise += 1
        elif change is Change.NEWLY_ALLOWED:
            bucket.rise -= 1

    def erred(self, rule: str) -> None:
        """A rule of the candidate could not be evaluated. Once is enough."""
        self._erring_rule = self._erring_rule or rule

    def why_back(self, now_ms: int) -> str:
        """Why the candidate must be taken back at this instant, empty when it may stay."""
        if self._erring_rule:
            return f"rule `{self._erring_rule}` could not be evaluated"
        rise = self._rise(now_ms)
        calls, risen = rise or (0, 0)
        if risen * _PERCENT <= RISE_POINTS_MAX * calls:
            self._risen_ms = None
            return ""
        if self._risen_ms is None:
            self._risen_ms = now_ms
        # Calls themselves must show it for so long: silence proves nothing.
        if self._buckets[-1].started_ms - self._risen_ms < RISE_MS_MAX:
            return ""
        return (
            f"it denies {risen} more of the last {calls} calls than the active bundle, above"
            f" {RISE_POINTS_MAX} points for {RISE_MS_MAX // 1_000} s"
        )

    def _rise(self, now_ms: int) -> tuple[int, int] | None:
        """(calls, denials more) of the last calls, None when they are too few."""
        calls = rise = 0
        for bucket in reversed(self._buckets):
            age_ms = now_ms - bucket.started_ms
            if age_ms > AGE_MS_MAX or (age_ms > WINDOW_MS and calls >= CALLS_MIN):
                break
            calls += bucket.calls
            rise += bucket.rise
        return (calls, rise) if calls >= CALLS_MIN else None
