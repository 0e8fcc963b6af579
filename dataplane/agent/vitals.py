"""Whether a running engine is well, judged by what it does and not by what it says. Pure: instants are
seconds of one monotonic clock that the caller reads.

vLLM's `/health` stays 200 while its engine core is stopped, hung or paused. So an engine is well when
it answers, when its tokens move while calls run, and when an idle one completes a single token now and
then.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dataplane.protocol.messages import EngineTelemetry

# Silence of its server after which an engine is failed, and after which it is started again.
SILENT_S_FAILED: Final = 3.0
SILENT_S_RESTART: Final = 10.0
# The same for calls that run and get no token, unless the agent's settings say otherwise. A kernel that
# is compiled at its first use can hold a batch for many seconds, so a restart waits longer.
STUCK_S_FAILED: Final = 5.0
STUCK_RESTART_RATIO: Final = 6.0
STUCK_S_RESTART: Final = STUCK_S_FAILED * STUCK_RESTART_RATIO
# An idle engine computes one token this often, and has this long for it; until it does again, it is
# asked more often.
CANARY_S: Final = 60.0
CANARY_S_MAX: Final = 10.0
CANARY_RETRY_S: Final = 3.0
# After the server has said that its engine is dead, its process ends by itself within seconds.
DEAD_S_RESTART: Final = 3.0


class Health(StrEnum):
    WELL = "well"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`lost`: it is not waited for any longer, and started again."""

    health: Health
    why: str = ""


WELL: Final = Verdict(Health.WELL)

_Signs = tuple[int, int, int, int, int, float | None, int]


class Vitals:
    """What was seen of one process since it was ready.

    `stuck_s` is how long calls may run without a token. It must be longer than the longest step of the
    engine: on a node that computes a long prompt for a minute, that is a minute.
    """

    def __init__(self, now_s: float, stuck_s: float = STUCK_S_FAILED) -> None:
        self._stuck_s = stuck_s
        self._lost_s = stuck_s * STUCK_RESTART_RATIO
        self._answered_s = now_s
        self._silent_why = ""
        self._moved_s = now_s
        self._signs: _Signs | None = None
        self._running = 0
        self._canary_s = now_s
        self._canary_failed_s: float | None = None
        self._canary_why = ""
        self._dead_s: float | None = None
        self._dead_why = ""

    def silent_s(self, now_s: float) -> float:
        return now_s - self._answered_s

    def answered(self, now_s: float) -> None:
        self._answered_s = now_s
        self._silent_why = ""

    def healthy(self) -> None:
        """Its server says that it is well. That alone proves nothing."""
        self._dead_s = None

    def unanswered(self, why: str) -> None:
        self._silent_why = why

    def dead(self, why: str, now_s: float) -> None:
        """Its server says that what computes behind it is gone."""
        if self._dead_s is None:
            self._dead_s, self._dead_why = now_s, why

    def scraped(self, telemetry: EngineTelemetry, now_s: float) -> None:
        signs = (
            telemetry.generation_tokens,
            telemetry.prompt_tokens,
            telemetry.running,
            telemetry.waiting,
            telemetry.preemptions,
            # Grows with each chunk of a long prompt, whose tokens are counted at its end only.
            telemetry.kv_used_ratio,
            # Of an engine that counts the tokens of an answer at its end.
            telemetry.steps,
        )
        self._running = telemetry.running
        if signs != self._signs or not telemetry.running:
            self._moved_s = now_s
        if self._signs is not None and signs[:2] != self._signs[:2]:
            # Tokens of real calls prove as much as a canary does.
            self._canary_s = now_s
            self._canary_failed_s = None
        self._signs = signs

    def wants_canary(self, now_s: float) -> bool:
        """Calls that run are watched by their own tokens."""
        if self._running:
            return False
        every_s = CANARY_S if self._canary_failed_s is None else CANARY_RETRY_S
        return now_s - self._canary_s >= every_s

    def canary(self, why: str, now_s: float) -> None:
        """How the canary ended: `why` it failed, empty when it did not."""
        self._canary_s = now_s
        self._canary_why = why
        if not why:
            self._canary_failed_s = None
        elif self._canary_failed_s is None:
            self._canary_failed_s = now_s

    def verdict(self, now_s: float) -> Verdict:
        silent_s = now_s - self._answered_s
        found = [
            _judge(
                silent_s, SILENT_S_FAILED, SILENT_S_RESTART,
                f"no answer for {silent_s:.0f} s: {self._silent_why}",
            )
        ]  # fmt: skip
        if self._running:
            stuck_s = now_s - self._moved_s
            words = f"no token for {stuck_s:.0f} s while {self._running} calls run"
            found.append(_judge(stuck_s, self._stuck_s, self._lost_s, words))
        if self._canary_failed_s is not None:
            failed_s = now_s - self._canary_failed_s
            words = f"it does not complete one token: {self._canary_why}"
            found.append(_judge(failed_s, 0.0, self._lost_s, words))
        if self._dead_s is not None:
            found.append(_judge(now_s - self._dead_s, 0.0, DEAD_S_RESTART, self._dead_why))
        return max(found, key=lambda verdict: _GRAVITY[verdict.health])


_GRAVITY: Final = {Health.WELL: 0, Health.FAILED: 1, Health.LOST: 2}


def _judge(for_s: float, failed_s: float, lost_s: float, why: str) -> Verdict:
    if for_s >= lost_s:
        return Verdict(Health.LOST, why)
    return Verdict(Health.FAILED, why) if for_s >= failed_s else WELL
