"""The performance model against measured engines: what it misses, where, and whether a fit does better.

Pure: takes measurements, returns errors and coefficients. A GPU type is judged by coefficients that
never saw it. Fits are non-negative least absolute relative deviations over a handful of terms.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median
from typing import Final

from controlplane.domain.catalog import GpuType, Model
from controlplane.scheduler.perf_model import (
    MS_PER_S,
    PUBLISHED,
    StepTerms,
    kv_tokens_within,
    step_terms,
)

# Iterations of reweighting towards least absolute deviations, and the relative error below which a run
# weighs no more.
REWEIGHTINGS: Final = 30
DEVIATION_RATIO_MIN: Final = 0.02
# A fit has settled when no coefficient moves by more than this.
SETTLED_RATIO: Final = 1e-4
# Fits of coefficients and of factors of models take turns this often.
TURNS: Final = 6
# A run whose first tokens took more than this many times the prompts of all its calls, and more than
# SATURATED_MS_MIN, kept calls waiting for a seat: its concurrency is not its batch.
SATURATED_RATIO: Final = 4.0
SATURATED_MS_MIN: Final = 2_000.0
QUANTILE_TOLD: Final = 0.9
# NVLink 4 of a Hopper GPU, one direction; a fit takes what others have into its coefficient.
NVLINK_BYTES_PER_S: Final = 450e9

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run: `concurrency` calls at a time, each of so many prompt and completion tokens.

    `family` names the architecture, `build` the model and precision whose kernels were measured.
    Times are means in milliseconds. `is_batch` runs put all prompts into one batch and decode them
    together; in the others calls come and go, so each step also computes prompts.
    """

    model: Model
    gpu: GpuType
    gpus: int
    family: str
    build: str
    concurrency: int
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    is_batch: bool = False

    @property
    def context_tokens(self) -> float:
        return self.prompt_tokens + 0.5 * self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """How far predictions of a group of runs are off, as ratios of what was measured.

    `bias` is the median of predicted over measured, less 1: below zero it was slower than predicted.
    """

    group: Names
    runs: int
    error_median_ratio: float
    error_p90_ratio: float
    bias_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Misses of one way to predict one time, by group and over all, with the coefficients behind it.

    `factors` are by model and precision what the software of that model takes of the roofline's
    time; empty where the roofline stands alone. What is left out of a group is not in them.
    """

    name: str
    coefficients: Mapping[str, float]
    factors: Mapping[str, float]
    total: Miss
    groups: tuple[Miss, ...]


# ---------------------------------------------------------------- terms


def decode_terms(run: Run) -> StepTerms:
    """A step of the run's batch in steady state.

    Where calls come and go each token decoded makes room for its part of a prompt, so a step computes
    `prompt / completion` prompt tokens for each sequence.
    """
    prefill = 0.0
    if not run.is_batch:
        prefill = run.concurrency * run.prompt_tokens / max(1, run.completion_tokens)
    terms = step_terms(
        run.model,
        run.gpu,
        run.gpus,
        sequences=run.concurrency,
        kv_tokens=run.concurrency * run.context_tokens,
        prefill_tokens=prefill,
    )
    # Steps that also compute prompts are few; most touch only the experts of the sequences they decode.
    decoding = step_terms(run.model, run.gpu, run.gpus, sequences=run.concurrency, kv_tokens=0.0)
    return replace(terms, experts_ms=decoding.experts_ms)


def prefill_terms(run: Run) -> StepTerms:
    """The prompt of one call, or of the whole batch where all come together, on an idle engine."""
    prompts = run.concurrency if run.is_batch else 1
    return step_terms(
        run.model,
        run.gpu,
        run.gpus,
        sequences=0.0,
        kv_tokens=0.0,
        prefill_tokens=prompts * run.prompt_tokens,
        attention_pairs=prompts * 0.5 * run.prompt_tokens**2,
    )


def _all_reduce_ms(run: Run, tokens: float) -> float:
    """Two sums of bf16 activations over the GPUs in each layer, at NVLINK_BYTES_PER_S."""
    activations_bytes = 2.0 * 2.0 * run.model.layers * run.model.hidden_size * tokens
    sent = activations_bytes * (run.gpus - 1) / run.gpus
    return sent / NVLINK_BYTES_PER_S * MS_PER_S


# Each term under its coefficient's name.
def decode_features(run: Run) -> dict[str, float]:
    """All-reduces are not among the published terms: only a refit may use them."""
    terms = decode_terms(run)
    tokens = run.concurrency * (
        1.0 if run.is_batch else 1.0 + run.prompt_tokens / run.completion_tokens
    )
    return {
        "layer_ms": terms.layers,
        "layer_ms_per_doubling": terms.layer_doublings,
        "expert_layer_ms": terms.expert_layers,
        "weights": terms.weights_ms,
        "experts": terms.experts_ms,
        "kv": terms.kv_ms,
        "flop": terms.flop_ms,
        "all_reduce": _all_reduce_ms(run, tokens),
    }


def prefill_features(run: Run) -> dict[str, float]:
    """Calls that start together queue for each other: `flop_queued` is the time of the others' prompts.

    Closed loops of equal calls come in waves of the whole concurrency, whatever their length.
    """
    terms = prefill_terms(run)
    prompts = run.concurrency if run.is_batch else 1
    others = 0 if run.is_batch else run.concurrency - 1
    return {
        "layer_ms": terms.layers,
        "layer_ms_per_doubling": terms.layer_doublings,
        "expert_layer_ms": terms.expert_layers,
        "weights": terms.weights_ms,
        "experts": terms.experts_ms,
        "flop": terms.flop_ms,
        "prefill_layer_ms": terms.layers,
        "all_reduce": _all_reduce_ms(run, prompts * run.prompt_tokens),
        "flop_queued": others * terms.flop_ms,
    }


def as_published(names: Sequence[str]) -> dict[str, float]:
    return {name: getattr(PUBLISHED, name, 0.0) for name in names}


# ---------------------------------------------------------------- which runs count


def is_saturated(run: Run) -> bool:
    """Calls waited for a seat: the KV of all does not fit, or first tokens took longer than all prompts."""
    room = kv_tokens_within(run.model, run.gpu, run.gpus)
    if run.concurrency * (run.prompt_tokens + run.completion_tokens) > room:
        return True
    if run.ttft_ms is None or run.is_batch:
        return False
    all_ms = SATURATED_RATIO * run.concurrency * prefill_terms(run).flop_ms
    return run.ttft_ms > max(SATURATED_MS_MIN, all_ms)


# ---------------------------------------------------------------- fitting


def _solved(matrix: list[list[float]], values: list[float]) -> list[float] | None:
    """Gauss with partial pivoting; None when singular."""
    size = len(values)
    rows = [[*row, value] for row, value in zip(matrix, values, strict=True)]
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(rows[row][at]))
        if abs(rows[pivot][at]) <= 1e-12 * max(1.0, abs(matrix[at][at])):
            return None
        rows[at], rows[pivot] = rows[pivot], rows[at]
        for below in range(at + 1, size):
            factor = rows[below][at] / rows[at][at]
            for to in range(at, size + 1):
                rows[below][to] -= factor * rows[at][to]
    found = [0.0] * size
    for at in reversed(range(size)):
        rest = sum(rows[at][to] * found[to] for to in range(at + 1, size))
        found[at] = (rows[at][size] - rest) / rows[at][at]
    return found


def _least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Non-negative w minimising sum (weight (row . w - target))^2: terms below zero leave one by one."""
    parts = len(rows[0])
    active = [at for at in range(parts) if any(row[at] != 0.0 for row in rows)]
    # The normal equations of all terms; those that leave are left out of them.
    whole = [[0.0] * parts for _ in range(parts)]
    right = [0.0] * parts
    for weight, target, row in zip(weights, targets, rows, strict=True):
        square = weight * weight
        for one in active:
            scaled = square * row[one]
            if scaled == 0.0:
                continue
            right[one] += scaled * target
            line = whole[one]
            for two in range(one, parts):
                line[two] += scaled * row[two]
    for one in range(parts):
        for two in range(one):
            whole[one][two] = whole[two][one]
    while active:
        matrix = [[whole[one][two] for two in active] for one in active]
        values = [right[one] for one in active]
        found = _solved(matrix, values)
        if found is None:
            # Two terms say the same here: the one that says least leaves.
            active.remove(min(active, key=lambda at: sum(row[at] for row in rows)))
            continue
        worst = min(range(len(found)), key=lambda at: found[at])
        if found[worst] >= 0.0:
            full = [0.0] * parts
            for at, value in zip(active, found, strict=True):
                full[at] = value
            return full
        del active[worst]
    return [0.0] * parts


def fit(
    features: Sequence[Mapping[str, float]],
    measured: Sequence[float],
    known: Sequence[float] | None = None,
) -> dict[str, float]:
    """Non-negative coefficients that miss the least in the sum of absolute relative deviations.

    `known` is the part of each time that is predicted already. Raises ValueError when there is
    nothing to fit.
    """
    if not features:
        raise ValueError("there are no runs to fit to")
    names = list(features[0])
    rows = [
        [each[name] / time for name in names] for each, time in zip(features, measured, strict=True)
    ]
    before = [0.0] * len(rows) if known is None else known
    targets = [1.0 - part / time for part, time in zip(before, measured, strict=True)]
    weights = [1.0] * len(rows)
    found = [0.0] * len(names)
    for _ in range(REWEIGHTINGS):
        was, found = found, _least_squares(rows, targets, weights)
        if all(
            abs(new - old) <= SETTLED_RATIO * abs(new) for new, old in zip(found, was, strict=True)
        ):
            break
        misses = [
            abs(sum(part * by for part, by in zip(row, found, strict=True)) - target)
            for row, target in zip(rows, targets, strict=True)
        ]
        weights = [1.0 / sqrt(max(miss, DEVIATION_RATIO_MIN)) for miss in misses]
    return dict(zip(names, found, strict=True))


def _cost(features: Mapping[str, float], by: Mapping[str, float]) -> float:
    return sum(part * by[name] for name, part in features.items())


# ---------------------------------------------------------------- judging


def judge(
    name: str,
    runs: Sequence[Run],
    features_of: Callable[[Run], dict[str, float]],
    measured_of: Callable[[Run], float],
    *,
    fitted: frozenset[str],
    with_factors: bool = False,
) -> Calibration:
    """Predict each run by coefficients that have not seen its GPU type.

    `fitted` names the coefficients that are fit, the others are published; with factors each model
    and precision also has one of its own, fit on the other GPU types too, 1 where there are none.
    """
    features = [features_of(run) for run in runs]
    measured = [measured_of(run) for run in runs]
    predicted = [0.0] * len(runs)
    for gpu in sorted({str(run.gpu.name) for run in runs}):
        others = [at for at, run in enumerate(runs) if run.gpu.name != gpu]
        by, factors = _learned(runs, features, measured, others, fitted, with_factors=with_factors)
        for at, run in enumerate(runs):
            if run.gpu.name == gpu:
                predicted[at] = _cost(features[at], by) * factors.get(run.build, 1.0)
    by, factors = _learned(
        runs, features, measured, range(len(runs)), fitted, with_factors=with_factors
    )
    ratios: dict[Names, list[float]] = defaultdict(list)
    for run, forecast, time in zip(runs, predicted, measured, strict=True):
        ratios[(run.build, run.family, str(run.gpu.name))].append(forecast / time)
    everything = [ratio for group in ratios.values() for ratio in group]
    return Calibration(
        name=name,
        coefficients=by,
        factors=factors,
        total=_miss(("all",), everything),
        groups=tuple(_miss(group, ratios[group]) for group in sorted(ratios)),
    )


def _learned(
    runs: Sequence[Run],
    features: Sequence[Mapping[str, float]],
    measured: Sequence[float],
    chosen: Sequence[int],
    fitted: frozenset[str],
    *,
    with_factors: bool,
) -> tuple[dict[str, float], dict[str, float]]:
    """Coefficients, and factors by build, from the chosen runs. Published ones where none are chosen."""
    names = list(features[0])
    by = as_published(names)
    factors: dict[str, float] = {}
    if not chosen:
        return by, factors
    for _ in range(TURNS if with_factors else 1):
        if fitted:
            by = _fit_some(runs, features, measured, chosen, fitted, factors)
        if with_factors:
            ratios = defaultdict(list)
            for at in chosen:
                ratios[runs[at].build].append(measured[at] / _cost(features[at], by))
            factors = {build: median(each) for build, each in ratios.items()}
        if not fitted:
            break
    return by, factors


def _fit_some(
    runs: Sequence[Run],
    features: Sequence[Mapping[str, float]],
    measured: Sequence[float],
    chosen: Sequence[int],
    fitted: frozenset[str],
    factors: Mapping[str, float],
) -> dict[str, float]:
    """Fit some coefficients on top of what the published others predict."""
    published = as_published(list(features[0]))
    kept = {name: value for name, value in published.items() if name not in fitted}
    scaled, times, known = [], [], []
    for at in chosen:
        factor = factors.get(runs[at].build, 1.0)
        scaled.append(
            {name: factor * value for name, value in features[at].items() if name in fitted}
        )
        known.append(factor * _cost({name: features[at][name] for name in kept}, kept))
        times.append(measured[at])
    return {**kept, **fit(scaled, times, known)}


def _miss(group: Names, ratios: Sequence[float]) -> Miss:
    errors = sorted(abs(ratio - 1.0) for ratio in ratios)
    return Miss(
        group=group,
        runs=len(ratios),
        error_median_ratio=median(errors),
        error_p90_ratio=errors[min(len(errors) - 1, int(QUANTILE_TOLD * len(errors)))],
        bias_ratio=median(ratios) - 1.0,
    )
