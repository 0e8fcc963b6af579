"""The engine in virtual time: hand cases to the digit, and step by step against the data plane's batcher."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.simulate.contracts import Call, EngineSpec, Plan, Step
from cli.simulate.engine import BLOCK_TOKENS, Engine
from dataplane.engines.simulated.batching import Batcher, Sequence
from dataplane.engines.simulated.kv_pool import KvPool
from dataplane.engines.simulated.roofline import StepTimes
from dataplane.engines.simulated.text import TOKEN_BYTES, Speaker
from tests.decision_builders import H100, LLAMA_70B_FP8

SPEC = EngineSpec(name="e", model=LLAMA_70B_FP8, gpu=H100, gpus=4, seats=8)
RATES = SPEC.rates


def plan(number: int, *steps: Step, prefix: str = "", prefix_tokens: int = 0) -> Plan:
    return Plan(
        number=number, tenant="t", workflow_class="c", arrival_s=0.0, steps=steps, deadline_s=None,
        prefix=prefix, prefix_tokens=prefix_tokens,
    )  # fmt: skip


def a_call(number: int, prompt: int, completion: int) -> Call:
    return Call(plan(number, Step(prompt, 0, completion)), 0, 0.0, float("inf"))


def run(engine: Engine, arrivals: list[tuple[float, Call]]) -> dict[str, tuple[float, float, int]]:
    """First token, end and cached tokens of each call, in milliseconds."""
    firsts: dict[str, float] = {}
    ends: dict[str, tuple[float, float, int]] = {}
    waiting = sorted(arrivals, key=lambda each: each[0])
    while waiting or engine.segment is not None:
        # As in the world: what comes at the instant at which a step ends comes after it.
        if waiting and waiting[0][0] < engine.ends_ms:
            now_ms, call = waiting.pop(0)
            engine.add(call, 0.0, now_ms)
            continue
        now_ms = engine.ends_ms
        happened = engine.advance()
        for each in happened.first:
            firsts[each.call.id] = now_ms
        for each in happened.ended:
            ends[each.call.id] = (firsts[each.call.id], now_ms, each.cached_tokens)
    return ends


def test_one_call_alone_takes_its_prefill_and_a_step_for_every_other_token() -> None:
    prompt, completion = 1_000, 5
    [(first_ms, end_ms, cached)] = run(
        Engine(SPEC), [(0.0, a_call(1, prompt, completion))]
    ).values()
    expected_first = (
        RATES.prefill_base_ms
        + prompt * RATES.prefill_ms_per_token
        + RATES.prefill_ms_per_token_sq * prompt * prompt / 2
    )
    expected_rest = sum(
        RATES.decode_ms_base
        + RATES.decode_ms_per_seq
        + RATES.decode_ms_per_kv_token * (prompt + step)
        for step in range(completion - 1)
    )
    assert first_ms == pytest.approx(expected_first, rel=1e-12)
    assert end_ms - first_ms == pytest.approx(expected_rest, rel=1e-12)
    assert cached == 0


def test_a_second_step_computes_only_what_is_new() -> None:
    steps = (Step(1_000, 0, 8), Step(100, 1_000, 1))
    engine = Engine(SPEC)
    first, second = (Call(plan(1, *steps), number, 0.0, float("inf")) for number in (0, 1))
    run(engine, [(0.0, first)])
    kept = 1_000 // BLOCK_TOKENS * BLOCK_TOKENS
    assert engine.match(second) == kept
    [(first_ms, end_ms, cached)] = run(engine, [(10_000.0, second)]).values()
    new = 1_100 - kept
    pairs = new * kept + new * new / 2
    expected = RATES.prefill_base_ms + new * RATES.prefill_ms_per_token
    expected += RATES.prefill_ms_per_token_sq * pairs
    assert cached == kept
    assert first_ms == end_ms == pytest.approx(10_000.0 + expected, rel=1e-12)


def test_a_context_that_was_cut_is_found_up_to_the_cut() -> None:
    steps = (Step(1_000, 0, 8), Step(600, 400, 4), Step(300, 900, 4))
    engine = Engine(SPEC)
    calls = [Call(plan(1, *steps), number, 0.0, float("inf")) for number in range(3)]
    run(engine, [(0.0, calls[0])])
    assert engine.match(calls[1]) == 400
    # It never saw the second step: what both later ones kept of the first is all that it has.
    assert engine.match(calls[2]) == 400
    run(engine, [(10_000.0, calls[1])])
    assert engine.match(calls[2]) == 900 // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_shared_prefix_is_found_by_another_workflow_and_evicted_after_its_users() -> None:
    engine = Engine(replace(SPEC, kv_tokens=2_048))
    shared = {"prefix": "tools", "prefix_tokens": 1_024}
    begun = Call(plan(1, Step(320, 0, 4), **shared), 0, 0.0, float("inf"))
    # The first one computes the prefix itself: nothing of it is reusable yet.
    begun.plan.steps[0].__init__(320, 1_024, 4)
    other = Call(plan(2, Step(320, 1_024, 4), **shared), 0, 0.0, float("inf"))
    run(engine, [(0.0, begun)])
    assert engine.match(other) == 1_024
    ends = run(engine, [(10_000.0, other)])
    assert ends[other.id][2] == 1_024
    # A stranger that needs most of the memory takes the contexts first, then the prefix's tail.
    run(engine, [(20_000.0, a_call(3, 1_500, 4))])
    assert engine.match(begun) == engine.match(other) < 1_024
    assert engine.pinned + engine.cached <= engine.capacity


def test_the_youngest_is_preempted_when_memory_ends_and_computes_again() -> None:
    engine = Engine(replace(SPEC, kv_tokens=1_024))
    ends = run(engine, [(0.0, a_call(1, 480, 200)), (0.0, a_call(2, 480, 200))])
    assert engine.preemptions >= 1
    assert ends["w1-0"][1] < ends["w2-0"][1]
    assert (engine.running, engine.waiting, engine.pinned, engine.prefill_tokens_waiting) == (
        0, 0, 0, 0,
    )  # fmt: skip


def test_a_call_that_is_cancelled_leaves_room_with_the_step_that_runs() -> None:
    engine = Engine(replace(SPEC, seats=1))
    long, short = a_call(1, 100, 10_000), a_call(2, 100, 2)
    engine.add(long, 0.0, 0.0)
    engine.advance()
    engine.add(short, 0.0, 50.0)
    assert (engine.running, engine.waiting) == (1, 1)
    engine.cancel(long, 50.0)
    step_ms = engine.ends_ms - 50.0
    assert 0.0 <= step_ms <= RATES.decode_ms_base * 1.2
    ends = run(engine, [])
    assert list(ends) == [short.id]
    assert (engine.running, engine.pinned) == (0, 0)


# ------------------------------------------------------------ against the data plane's batcher


@dataclass(frozen=True)
class Arrival:
    at_ms: int
    prompt: int
    completion: int


def step_by_step(spec: EngineSpec, arrivals: list[Arrival]) -> dict[int, tuple[float, float]]:
    """The oracle: the simulated engine's own batcher and step times, one step at a time. All prompts differ."""
    rates = spec.rates
    times = StepTimes(
        rates.decode_ms_base, rates.decode_ms_per_seq, rates.decode_ms_per_kv_token,
        rates.prefill_ms_per_token_sq,
    )  # fmt: skip
    batcher = Batcher(
        KvPool(spec.kv_tokens_capacity // BLOCK_TOKENS), seats=spec.seats,
        step_tokens_max=spec.step_tokens_max, has_prefix_cache=True,
    )  # fmt: skip
    number_of: dict[int, int] = {}
    firsts: dict[int, float] = {}
    ends: dict[int, tuple[float, float]] = {}
    waiting = sorted(enumerate(arrivals), key=lambda each: each[1].at_ms)
    kept: list[Sequence] = []
    now_ms = 0.0
    while True:
        while waiting and waiting[0][1].at_ms <= now_ms:
            number, arrival = waiting.pop(0)
            prompt = (number.to_bytes(2, "big") + b"xx") * arrival.prompt
            assert len(prompt) == arrival.prompt * TOKEN_BYTES
            sequence = Sequence(
                tokens=bytearray(prompt), speaker=Speaker(prompt, 0, 1_000), salt=0,
                prompt_tokens=arrival.prompt, tokens_min=0, tokens_max=arrival.completion,
                ignores_end=True,
            )  # fmt: skip
            kept.append(sequence)
            number_of[id(sequence)] = number
            batcher.add(sequence)
        step, _ = batcher.plan()
        if step is None:
            if not waiting:
                return ends
            now_ms = float(waiting[0][1].at_ms)
            continue
        # A last chunk of one token is counted as decoding there; the KV that it reads is nothing here.
        alone = [
            sequence.computed
            for sequence, tokens in step.work
            if tokens == 1 and not sequence.generated and sequence not in step.admitted
        ]
        pairs = step.attention_pairs + sum(alone) + 0.5 * len(alone)
        now_ms += times.step_s(step.tokens, step.kv_tokens - sum(alone), pairs)
        for sequence in batcher.complete(step):
            number = number_of[id(sequence)]
            firsts.setdefault(number, now_ms)
            if sequence.finish is not None:
                ends[number] = (firsts[number], now_ms)


arrival = st.builds(
    Arrival,
    at_ms=st.integers(0, 400),
    prompt=st.integers(2, 300),
    completion=st.integers(1, 40),
)


@given(
    arrivals=st.lists(arrival, min_size=1, max_size=12, unique_by=lambda each: each.at_ms),
    seats=st.integers(1, 6),
    step_tokens_max=st.integers(8, 256),
)
@settings(max_examples=150)
def test_it_agrees_with_the_data_planes_engine_to_the_digit(
    arrivals: list[Arrival], seats: int, step_tokens_max: int
) -> None:
    spec = replace(SPEC, seats=seats, step_tokens_max=step_tokens_max, kv_tokens=16_384)
    told = step_by_step(spec, arrivals)
    ends = run(
        Engine(spec),
        [(float(each.at_ms), a_call(n, each.prompt, each.completion)) for n, each in enumerate(arrivals)],
    )  # fmt: skip
    assert {number: ends[f"w{number}-0"][:2] for number in told} == {
        number: pytest.approx(times, rel=1e-9) for number, times in told.items()
    }
