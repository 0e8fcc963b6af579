"""What an engine's measured times teach about its rates: two small recursive regressions per engine.

Each regresses a measured time on the parts of its prediction, so that what is learned are factors of
the published rates (1: as published). Knows parts and times, nothing of engines, clocks or requests.
"""

import math
from dataclasses import dataclass, field
from typing import Final

from controlplane.domain.fleet import Rates

# A factor of a published rate stays within these: beyond them it is not the rate that is wrong.
FACTOR_MIN: Final = 0.25
FACTOR_MAX: Final = 4.0
# An observation counts half as much once about 34 others have come after it: 0.98^34 = 0.5.
FORGETTING_RATIO: Final = 0.98
# Variance of a factor before anything is measured, over that of the noise of one measurement: rates are
# off by a third (calibration table), a single call by a fifth.
VARIANCE_FIRST: Final = 3.0
# One measurement teaches no more than a prediction missed by this much of it: a stall is no rate.
INNOVATION_RATIO_MAX: Final = 1.0
# As many misses in a row that reach this, on one side, are no stalls: the engine has changed, and what
# was known of it is as uncertain as at first.
MISSES_MAX: Final = 3

# Size of call at which the corrections are told as one number each.
PROMPT_TOKENS_TOLD: Final = 1_024
SEQUENCES_TOLD: Final = 16
CONTEXT_TOKENS_TOLD: Final = 4_096


class Regression:
    """Recursive least squares with forgetting, each observation relative to its prediction.

    Minimises sum of w_i (y_i - x_i . f)^2 + w_0 |f - 1|^2 / VARIANCE_FIRST, where x_i are the parts over
    their sum, y_i the measured time over the same, and w falls by FORGETTING_RATIO per observation
    (Ljung, System Identification, 2nd ed., ch. 11). Forgetting lets the covariance grow where nothing
    is measured; its trace never exceeds what it was at first. Factors are bounded. `misses` counts
    those in a row that reached INNOVATION_RATIO_MAX, below zero when too little was measured.
    """

    __slots__ = ("covariance", "factors", "misses", "observations")

    def __init__(self, parts: int) -> None:
        self.factors = [1.0] * parts
        self.covariance = _uncertain(parts)
        self.misses = 0
        self.observations = 0

    def learn(self, parts: tuple[float, ...], measured: float) -> None:
        """Take a measured time whose published prediction is the sum of `parts`, in the same unit.

        Nothing is learned from a prediction of nothing.
        """
        total = 0.0
        for part in parts:
            total += part
        if total <= 0.0 or measured < 0.0:
            return
        factors = self.factors
        missed = measured / total
        for at, part in enumerate(parts):
            missed -= part * factors[at] / total
        if abs(missed) < INNOVATION_RATIO_MAX:
            self.misses = 0
        else:
            missed = math.copysign(INNOVATION_RATIO_MAX, missed)
            side = 1 if missed > 0.0 else -1
            self.misses = side + (self.misses if self.misses * side > 0 else 0)
            if abs(self.misses) >= MISSES_MAX:
                self.covariance, self.misses = _uncertain(len(parts)), 0
        covariance = self.covariance
        # P x, and from it the gain P x / (lambda + x' P x).
        spread: list[float] = []
        weight = FORGETTING_RATIO
        for at, part in enumerate(parts):
            entry = 0.0
            for to, other in enumerate(covariance[at]):
                entry += other * parts[to]
            entry /= total
            spread.append(entry)
            weight += entry * part / total
        trace = 0.0
        for at, entry in enumerate(spread):
            gain = entry / weight
            factors[at] = min(FACTOR_MAX, max(FACTOR_MIN, factors[at] + gain * missed))
            row = covariance[at]
            for to, other in enumerate(spread):
                row[to] = (row[to] - gain * other) / FORGETTING_RATIO
            trace += row[at]
        limit = VARIANCE_FIRST * len(factors)
        if trace > limit:
            for row in covariance:
                for to, entry in enumerate(row):
                    row[to] = entry * limit / trace
        self.observations += 1


def _uncertain(parts: int) -> list[list[float]]:
    return [
        [VARIANCE_FIRST if row == column else 0.0 for column in range(parts)]
        for row in range(parts)
    ]


@dataclass(slots=True)
class Correction:
    """What is learned of one engine. `published` are its rates by the roofline, in milliseconds.

    First tokens teach the fixed and the per-token time of a prefill; paces teach the fixed time of a
    step, that of each sequence in it, and that of each token of KV.
    """

    published: Rates
    first: Regression = field(default_factory=lambda: Regression(2))
    pace: Regression = field(default_factory=lambda: Regression(3))

    def paced_otherwise(self, published: Rates, pace_ratio: float) -> None:
        """Steps are published to take `pace_ratio` times what they took. What was learned of the pace stays."""
        self.published = published
        if self.pace.observations:
            factors = self.pace.factors
            for at, factor in enumerate(factors):
                factors[at] = min(FACTOR_MAX, max(FACTOR_MIN, factor / pace_ratio))

    def first_token(
        self, own_ms: float, backlog_ms: float, batch_ms: float, measured_ms: float
    ) -> None:
        """A first token came after `measured_ms`.

        By published rates `own_ms` of it computed the prompt beyond the fixed part and `backlog_ms`
        the prompts before it; the batch that shared its step took `batch_ms`, by corrected ones.
        """
        left_ms = measured_ms - batch_ms
        self.first.learn((self.published.prefill_base_ms, own_ms + backlog_ms), max(0.0, left_ms))

    def paced(self, sequences: float, kv_tokens: float, measured_ms: float) -> None:
        """A call had a token each `measured_ms` in a batch of this many sequences and tokens of KV."""
        self.pace.learn(
            (
                self.published.decode_ms_base,
                self.published.decode_ms_per_seq * sequences,
                self.published.decode_ms_per_kv_token * kv_tokens,
            ),
            measured_ms,
        )

    def rates(self) -> Rates:
        """The published rates, corrected, and how much that changes a call of the size that is told."""
        published = self.published
        fixed, per_token = self.first.factors
        base, per_seq, per_kv_token = self.pace.factors
        base_ms, base_tpot_ms = published.prefill_base_ms, published.decode_ms_base
        prompt_ms = PROMPT_TOKENS_TOLD * published.prefill_ms_per_token
        seqs_ms = SEQUENCES_TOLD * published.decode_ms_per_seq
        kv_ms = SEQUENCES_TOLD * CONTEXT_TOKENS_TOLD * published.decode_ms_per_kv_token
        return Rates(
            base_ms * fixed,
            published.prefill_ms_per_token * per_token,
            published.prefill_ms_per_token_sq * per_token,
            base_tpot_ms * base,
            published.decode_ms_per_seq * per_seq,
            published.decode_ms_per_kv_token * per_kv_token,
            _ratio(base_ms * fixed + prompt_ms * per_token, base_ms + prompt_ms),
            _ratio(
                base_tpot_ms * base + seqs_ms * per_seq + kv_ms * per_kv_token,
                base_tpot_ms + seqs_ms + kv_ms,
            ),
        )


def _ratio(corrected: float, published: float) -> float:
    return corrected / published if published > 0.0 else 1.0
