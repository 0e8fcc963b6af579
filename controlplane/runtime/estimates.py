"""What is learned from finished calls and workflows: bytes per prompt token, lengths of answers, numbers of steps.

Pure and bounded; `estimate_keeper.py` shares it with the other replicas and keeps it over restarts.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from controlplane.domain.catalog import Scope
from controlplane.domain.ids import ModelName, TenantId
from controlplane.domain.outcome import Usage
from controlplane.domain.request import Request
from controlplane.runtime.workflow_state import WorkflowEntry
from controlplane.store.estimates import SizeRecord

# English text in a chat template comes to about four bytes a token with today's tokenizers.
BYTES_PER_TOKEN_FIRST = 4.0
BYTES_PER_TOKEN_MIN = 1.0
BYTES_PER_TOKEN_MAX = 16.0
GAIN = 0.05
SKETCHES_MAX = 20_000

# Answers' lengths before any is known, and as many as must be seen before they count.
COMPLETION_TOKENS_FIRST = 256
COMPLETION_TOKENS_HIGH_FIRST = 1_024
ANSWERS_MIN = 8
MEDIAN = 0.5
HIGH_QUANTILE = 0.9
# Fewer answers than this share are shorter; that many must be seen before it says anything.
LEAST_QUANTILE = 0.01
LEAST_ANSWERS_MIN = 100
# An answer counts half as much once this many others have come after it.
HALF_LIFE_ANSWERS = 64
# Buckets of sizes, four to a doubling: a quantile is at most 19 % above the true one.
BUCKETS_PER_DOUBLING = 4
BUCKETS = 20 * BUCKETS_PER_DOUBLING + 1
# Quantiles are worked out again after this many answers.
REFRESH_ANSWERS = 4
_GROWTH = 2.0 ** (1.0 / HALF_LIFE_ANSWERS)
_WEIGHT_MAX = 2.0**60
_BOUNDS: tuple[int, ...] = tuple(round(2.0 ** (n / BUCKETS_PER_DOUBLING)) for n in range(BUCKETS))


class Quantity(StrEnum):
    """What sizes are learned of. The value names the rows in the store."""

    COMPLETION_TOKENS = "completion_tokens"
    STEPS = "steps"


_QUANTITIES = {quantity.value: quantity for quantity in Quantity}


class SizeSketch:
    """Quantiles of sizes, recent ones first, in a fixed number of buckets.

    Instead of every weight falling with each size, the weight of the next one grows. What was added
    here since `take_fresh` is kept apart too, so that replicas can add up what each has seen.
    """

    __slots__ = ("_fresh", "_quantiles", "_quantiles_at", "_weight", "_weights", "fresh", "sizes")

    def __init__(self) -> None:
        self._weights = array("d", bytes(8 * BUCKETS))
        self._fresh: array[float] | None = None
        self._weight = 1.0
        self.sizes = 0
        self.fresh = 0
        self._quantiles: dict[float, int] = {}
        self._quantiles_at = 0

    def add(self, size: int) -> None:
        at = bisect_left(_BOUNDS, min(size, _BOUNDS[-1]))
        self._weights[at] += self._weight
        fresh = self._fresh
        if fresh is None:
            fresh = self._fresh = array("d", bytes(8 * BUCKETS))
        fresh[at] += self._weight
        self._weight *= _GROWTH
        self.sizes += 1
        self.fresh += 1
        if self._weight > _WEIGHT_MAX:
            self._rescale()

    def quantile(self, ratio: float) -> int:
        """The upper bound of the bucket in which the quantile lies; at most REFRESH_ANSWERS old."""
        if self.sizes - self._quantiles_at >= REFRESH_ANSWERS:
            self._quantiles.clear()
            self._quantiles_at = self.sizes - self.sizes % REFRESH_ANSWERS
        known = self._quantiles.get(ratio)
        if known is None:
            known = self._quantiles[ratio] = self._quantile(ratio)
        return known

    def mean_above(self, least: int) -> float:
        """Mean of the sizes above `least`, each bucket taken at its bound; 0 when there are none."""
        first = bisect_left(_BOUNDS, least + 1)
        total = sum(self._weights[first:])
        if total <= 0.0:
            return 0.0
        pairs = zip(_BOUNDS[first:], self._weights[first:], strict=True)
        return sum(bound * weight for bound, weight in pairs) / total

    def take_fresh(self) -> tuple[list[float], int]:
        """Weights and number of what was added since, the newest of weight 1; it is no longer fresh."""
        fresh, count = self._fresh, self.fresh
        self._fresh, self.fresh = None, 0
        newest = self._weight / _GROWTH
        return ([] if fresh is None else [weight / newest for weight in fresh]), count

    def give_back(self, weights: Sequence[float], count: int) -> None:
        """Make fresh again what was taken and could not be shared."""
        faded = self._weight / _GROWTH * 0.5 ** (self.fresh / HALF_LIFE_ANSWERS)
        fresh = self._fresh or array("d", bytes(8 * BUCKETS))
        self._fresh = array(
            "d", [own + weight * faded for own, weight in zip(fresh, weights, strict=True)]
        )
        self.fresh += count

    def use(self, weights: Sequence[float], sizes: int) -> None:
        """Take what all replicas have shared, and on top of it what is still fresh here."""
        faded = 0.5 ** (self.fresh / HALF_LIFE_ANSWERS)
        newest = self._weight / _GROWTH
        fresh = self._fresh or array("d", bytes(8 * BUCKETS))
        fresh = array("d", [weight / newest for weight in fresh])
        self._weights = array(
            "d", [weight * faded + own for weight, own in zip(weights, fresh, strict=True)]
        )
        self._fresh = fresh if self.fresh else None
        self._weight = _GROWTH
        self.sizes = sizes + self.fresh
        self._quantiles.clear()
        self._quantiles_at = self.sizes

    def _rescale(self) -> None:
        self._weights = array("d", [weight / self._weight for weight in self._weights])
        if self._fresh is not None:
            self._fresh = array("d", [weight / self._weight for weight in self._fresh])
        self._weight = 1.0

    def _quantile(self, ratio: float) -> int:
        remaining = ratio * sum(self._weights)
        for bound, weight in zip(_BOUNDS, self._weights, strict=True):
            remaining -= weight
            if remaining <= 0.0:
                return bound
        return _BOUNDS[-1]


# Model, scope and tenant; '' where the level has none.
Level = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSize:
    """How large a workflow is likely to be: its steps and the tokens of each answer, at one quantile."""

    steps: int
    completion_tokens: int

    def deadline_ms(
        self, *, ttft_ms: float, tpot_ms: float, gap_ms: float, slack_ratio: float
    ) -> float:
        """A deadline for one that has none: the time that this size takes on an idle engine, times slack.

        `ttft_ms` and `tpot_ms` are of a usual call there, `gap_ms` is the pause between steps. An
        order by deadlines gains nothing unless they tell sizes apart, so this says more than one
        deadline for a whole class does.
        """
        answer_ms = ttft_ms + max(0, self.completion_tokens - 1) * tpot_ms
        return slack_ratio * (self.steps * answer_ms + (self.steps - 1) * gap_ms)


class Asked(Protocol):
    """What of a call as it was sent tells how its tokens are counted."""

    @property
    def prompt_bytes(self) -> int: ...
    @property
    def n(self) -> int: ...


class Estimates:
    """Bounded in value and in number. What is seen too little of is taken from a wider level.

    Levels, narrowest first: a tenant's scope of a model, the scope of the model, the model.
    """

    def __init__(self, sketches_max: int = SKETCHES_MAX) -> None:
        self._sketches_max = sketches_max
        self._bytes_per_token: dict[str, float] = {}
        self._sketches: OrderedDict[tuple[Quantity, Level], SizeSketch] = OrderedDict()
        self._fresh: dict[tuple[Quantity, Level], SizeSketch] = {}

    # ------------------------------------------------------------ asking

    def prompt_tokens(self, model: ModelName, prompt_bytes: int) -> int:
        """Tokens that a prompt of this many bytes comes to; at least one."""
        return max(1, int(prompt_bytes / self._bytes_per_token.get(model, BYTES_PER_TOKEN_FIRST)))

    def completion_tokens(
        self,
        tenant: TenantId,
        model: ModelName,
        tokens_max: int,
        hint: int | None,
        scope: Scope | None = None,
    ) -> int:
        """Tokens that the answer is likely to have, never above `tokens_max`."""
        if hint is not None and hint > 0:
            return min(hint, tokens_max)
        sketch = self._sketch(Quantity.COMPLETION_TOKENS, tenant, scope, model)
        median = COMPLETION_TOKENS_FIRST if sketch is None else sketch.quantile(MEDIAN)
        return max(1, min(median, tokens_max))

    def completion_tokens_high(
        self, tenant: TenantId, model: ModelName, tokens_max: int, scope: Scope | None = None
    ) -> int:
        """Tokens that nine answers in ten do not pass, never above `tokens_max`: what is worth holding."""
        sketch = self._sketch(Quantity.COMPLETION_TOKENS, tenant, scope, model)
        high = COMPLETION_TOKENS_HIGH_FIRST if sketch is None else sketch.quantile(HIGH_QUANTILE)
        return max(1, min(high, tokens_max))

    def completion_tokens_least(
        self, tenant: TenantId, model: ModelName, tokens_max: int, scope: Scope | None = None
    ) -> int:
        """Tokens that at most one answer in a hundred falls short of, never above `tokens_max`.

        The lower edge of a bucket, so that rounding does not make a lower bound of what is none; 1
        before enough answers are known.
        """
        sketch = self._sketch(Quantity.COMPLETION_TOKENS, tenant, scope, model)
        if sketch is None or sketch.sizes < LEAST_ANSWERS_MIN:
            return 1
        at = bisect_left(_BOUNDS, sketch.quantile(LEAST_QUANTILE))
        return max(1, min(_BOUNDS[at - 1] if at else 1, tokens_max))

    def steps_remaining(
        self, tenant: TenantId, scope: Scope, model: ModelName, steps_done: int
    ) -> float | None:
        """Mean number of steps still to come of a workflow that has come this far, at least 1 of one
        that goes on; None before enough workflows have ended.
        """
        sketch = self._sketch(Quantity.STEPS, tenant, scope, model)
        if sketch is None:
            return None
        return max(1.0, sketch.mean_above(steps_done) - steps_done)

    def workflow_size(
        self, tenant: TenantId, scope: Scope, model: ModelName, ratio: float = HIGH_QUANTILE
    ) -> WorkflowSize | None:
        """Steps that this share of workflows does not pass, and the usual length of their answers.

        A workflow has as many answers as steps, so their lengths even out: the median will do. None
        before enough workflows have ended.
        """
        steps = self._sketch(Quantity.STEPS, tenant, scope, model)
        tokens = self._sketch(Quantity.COMPLETION_TOKENS, tenant, scope, model)
        if steps is None or tokens is None:
            return None
        return WorkflowSize(steps=steps.quantile(ratio), completion_tokens=tokens.quantile(MEDIAN))

    # ------------------------------------------------------------ learning

    def learn(self, request: Request, call: Asked, usage: Usage) -> None:
        if usage.prompt_tokens > 0:
            ratio = call.prompt_bytes / usage.prompt_tokens
            mean = self._bytes_per_token.get(request.model, BYTES_PER_TOKEN_FIRST)
            mean += GAIN * (ratio - mean)
            self._bytes_per_token[request.model] = min(
                BYTES_PER_TOKEN_MAX, max(BYTES_PER_TOKEN_MIN, mean)
            )
        tokens = usage.completion_tokens // max(1, call.n)
        self._add(Quantity.COMPLETION_TOKENS, request.tenant, request.scope, request.model, tokens)

    def learn_steps(self, tenant: TenantId, scope: Scope, model: ModelName, steps: int) -> None:
        """A workflow has ended of itself after `steps` calls."""
        self._add(Quantity.STEPS, tenant, scope, model, steps)

    def learn_workflow(self, entry: WorkflowEntry) -> None:
        """A workflow has ended, by its tenant's word, with as many steps as succeeded."""
        record = entry.record
        if entry.model is not None and record.steps_done > 0:
            self.learn_steps(record.tenant, record.scope, entry.model, record.steps_done)

    # ------------------------------------------------------------ sharing

    def take_fresh(self, records_max: int) -> list[SizeRecord]:
        """What was learned since, for the store; at most `records_max` sketches, oldest first."""
        records = []
        for quantity, level in list(self._fresh)[:records_max]:
            weights, observations = self._fresh.pop((quantity, level)).take_fresh()
            records.append(_record(quantity, level, weights, observations))
        return records

    def give_back(self, records: Iterable[SizeRecord]) -> None:
        """The store could not be reached: what was taken is fresh again."""
        for record in records:
            key = (Quantity(record.quantity), _level_of(record))
            sketch = self._known(key)
            sketch.give_back(record.weights, record.observations)
            self._fresh[key] = sketch

    def use(self, records: Iterable[SizeRecord]) -> None:
        """What all replicas have learned, as the store has it. Quantities not known here are left out."""
        for record in records:
            quantity = _QUANTITIES.get(record.quantity)
            if quantity is not None and len(record.weights) == BUCKETS:
                key = (quantity, _level_of(record))
                self._known(key).use(record.weights, record.observations)

    # ------------------------------------------------------------ inside

    def _sketch(
        self, quantity: Quantity, tenant: str, scope: Scope | None, model: str
    ) -> SizeSketch | None:
        """The narrowest level of which enough is known."""
        for level in _levels(model, scope, tenant):
            sketch = self._sketches.get((quantity, level))
            if sketch is not None and sketch.sizes >= ANSWERS_MIN:
                return sketch
        return None

    def _add(self, quantity: Quantity, tenant: str, scope: Scope, model: str, size: int) -> None:
        for level in _levels(model, scope, tenant):
            key = (quantity, level)
            sketch = self._known(key)
            sketch.add(size)
            self._fresh[key] = sketch

    def _known(self, key: tuple[Quantity, Level]) -> SizeSketch:
        sketch = self._sketches.get(key)
        if sketch is None:
            sketch = self._sketches[key] = SizeSketch()
            if len(self._sketches) > self._sketches_max:
                oldest, _ = self._sketches.popitem(last=False)
                self._fresh.pop(oldest, None)
        else:
            self._sketches.move_to_end(key)
        return sketch


def _levels(model: str, scope: Scope | None, tenant: str) -> tuple[Level, ...]:
    if scope is None:
        return ((model, "", ""),)
    return ((model, scope.value, tenant), (model, scope.value, ""), (model, "", ""))


def _level_of(record: SizeRecord) -> Level:
    return (record.model, record.scope, record.tenant_id)


def _record(
    quantity: Quantity, level: Level, weights: Sequence[float], observations: int
) -> SizeRecord:
    model, scope, tenant = level
    return SizeRecord(
        model=model,
        scope=scope,
        tenant_id=tenant,
        quantity=quantity.value,
        weights=tuple(weights),
        observations=observations,
    )
