"""What is learned from finished calls: bytes per prompt token, and how long answers are."""

from array import array
from bisect import bisect_left
from collections import OrderedDict

from controlplane.domain.ids import ModelName, TenantId
from controlplane.domain.outcome import Usage
from controlplane.domain.request import Request
from controlplane.runtime.call import Call

# English text in a chat template comes to about four bytes a token with today's tokenizers.
BYTES_PER_TOKEN_FIRST = 4.0
BYTES_PER_TOKEN_MIN = 1.0
BYTES_PER_TOKEN_MAX = 16.0
GAIN = 0.05
KEPT_MAX = 50_000

# Answers' lengths before any is known, and as many as must be seen before they count.
COMPLETION_TOKENS_FIRST = 256
COMPLETION_TOKENS_HIGH_FIRST = 1_024
ANSWERS_MIN = 8
HIGH_QUANTILE = 0.9
# An answer counts half as much once this many others have come after it.
HALF_LIFE_ANSWERS = 64
# Buckets of answers' lengths, four to a doubling: a quantile is at most 19 % above the true one.
BUCKETS_PER_DOUBLING = 4
BUCKETS = 20 * BUCKETS_PER_DOUBLING + 1
# Quantiles are worked out again after this many answers.
REFRESH_ANSWERS = 4
_GROWTH = 2.0 ** (1.0 / HALF_LIFE_ANSWERS)
_WEIGHT_MAX = 2.0**60
_BOUNDS: tuple[int, ...] = tuple(round(2.0 ** (n / BUCKETS_PER_DOUBLING)) for n in range(BUCKETS))


class LengthSketch:
    """Median and high quantile of lengths, recent ones first, in a fixed number of buckets.

    Instead of every weight falling with each answer, the weight of the next one grows.
    """

    __slots__ = ("_answers", "_weight", "_weights", "high", "median")

    def __init__(self) -> None:
        self._weights = array("d", bytes(8 * BUCKETS))
        self._weight = 1.0
        self._answers = 0
        self.median = COMPLETION_TOKENS_FIRST
        self.high = COMPLETION_TOKENS_HIGH_FIRST

    def add(self, tokens: int) -> None:
        at = bisect_left(_BOUNDS, min(tokens, _BOUNDS[-1]))
        self._weights[at] += self._weight
        self._weight *= _GROWTH
        self._answers += 1
        if self._weight > _WEIGHT_MAX:
            self._weights = array("d", [weight / self._weight for weight in self._weights])
            self._weight = 1.0
        if self._answers >= ANSWERS_MIN and self._answers % REFRESH_ANSWERS == 0:
            self.median, self.high = self._quantile(0.5), self._quantile(HIGH_QUANTILE)

    def _quantile(self, ratio: float) -> int:
        """The upper bound of the bucket in which the quantile lies."""
        remaining = ratio * sum(self._weights)
        for bound, weight in zip(_BOUNDS, self._weights, strict=True):
            remaining -= weight
            if remaining <= 0.0:
                return bound
        return _BOUNDS[-1]


class Estimates:
    """Bounded in value and in number. Lengths are learned for each tenant and model."""

    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        self._kept_max = kept_max
        self._bytes_per_token: dict[str, float] = {}
        self._lengths: OrderedDict[tuple[str, str], LengthSketch] = OrderedDict()

    def prompt_tokens(self, model: ModelName, prompt_bytes: int) -> int:
        """Tokens that a prompt of this many bytes comes to; at least one."""
        return max(1, int(prompt_bytes / self._bytes_per_token.get(model, BYTES_PER_TOKEN_FIRST)))

    def completion_tokens(
        self, tenant: TenantId, model: ModelName, tokens_max: int, hint: int | None
    ) -> int:
        """Tokens that the answer is likely to have, never above `tokens_max`."""
        if hint is not None and hint > 0:
            return min(hint, tokens_max)
        sketch = self._lengths.get((tenant, model))
        median = COMPLETION_TOKENS_FIRST if sketch is None else sketch.median
        return max(1, min(median, tokens_max))

    def completion_tokens_high(self, tenant: TenantId, model: ModelName, tokens_max: int) -> int:
        """Tokens that nine answers in ten do not pass, never above `tokens_max`: what is worth holding."""
        sketch = self._lengths.get((tenant, model))
        high = COMPLETION_TOKENS_HIGH_FIRST if sketch is None else sketch.high
        return max(1, min(high, tokens_max))

    def learn(self, request: Request, call: Call, usage: Usage) -> None:
        if usage.prompt_tokens > 0:
            ratio = call.prompt_bytes / usage.prompt_tokens
            mean = self._bytes_per_token.get(request.model, BYTES_PER_TOKEN_FIRST)
            mean += GAIN * (ratio - mean)
            self._bytes_per_token[request.model] = min(
                BYTES_PER_TOKEN_MAX, max(BYTES_PER_TOKEN_MIN, mean)
            )
        key = (request.tenant, request.model)
        sketch = self._lengths.get(key)
        if sketch is None:
            sketch = self._lengths[key] = LengthSketch()
            if len(self._lengths) > self._kept_max:
                self._lengths.popitem(last=False)
        sketch.add(usage.completion_tokens // max(1, call.n))
        self._lengths.move_to_end(key)
