"""Calls on two engines: exact by hand, nothing leaks whichever engine dies, and the live placement is obeyed."""

from dataclasses import replace

import pytest

from cli.simulate.baselines import FAMILIES
from cli.simulate.contracts import (
    Call,
    EngineDeath,
    EngineSpec,
    Fate,
    FleetSpec,
    Plan,
    Pushes,
    Result,
    SlowEngine,
    Step,
    Waste,
    WorldOptions,
)
from cli.simulate.deadlines import Deadlines
from cli.simulate.experiments import Cell, Span, drawn
from cli.simulate.fleets import A100, H100_FP8, REFERENCE, fleet
from cli.simulate.headway import Headway
from cli.simulate.world import play
from controlplane.domain.catalog import GpuType, Role

PREFILL = replace(REFERENCE, name="p0", node="p0", role=Role.PREFILL, cold_start_s=15.0)
DECODE = replace(REFERENCE, name="d1", node="d1", role=Role.DECODE, cold_start_s=15.0)
# A GPU's memory is so many times as fast as its network card: an H100's of 3.35 TB/s as one of 400 Gbit/s.
MEMORY_OVER_NETWORK = 40 * 1.68
OPTIONS = WorldOptions(seed=7, horizon_s=80.0)
SPAN = Span(warm_up_s=0.0, measured_s=120.0, cool_down_s=0.0)


class Split(Pushes):
    """Sends every call to the first prefill engine and the first other one that take it; it waits for both."""

    name = "split"

    def __init__(self) -> None:
        self._waiting: dict[str, Call] = {}
        self.heard: list[tuple[float, str]] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def arrived(self, call: Call) -> None:
        prefill = [
            view.index for view in self.floor.engines if self.floor.can_prefill(call, view.index)
        ]
        decode = [
            view.index for view in self.floor.engines if self.floor.can_take(call, view.index)
        ]
        self._waiting[call.id] = call
        if prefill and decode:
            del self._waiting[call.id]
            self.floor.send(call, decode[0], prefill=prefill[0])

    def failed(self, call: Call) -> None:
        self.heard.append((self.floor.now_ms, "failed"))
        self.arrived(call)

    def prefilled(self, call: Call) -> None:
        self.heard.append((self.floor.now_ms, "prefilled"))

    def first_token(self, call: Call) -> None:
        self.heard.append((self.floor.now_ms, "first"))

    def expired(self, call: Call) -> None:
        self._waiting.pop(call.id, None)

    def engine_changed(self, engine: int) -> None:
        for call in list(self._waiting.values()):
            self.arrived(call)


def pair(prefill: EngineSpec = PREFILL, decode: EngineSpec = DECODE) -> FleetSpec:
    return FleetSpec(name="pair", engines=(prefill, decode))


def moved_ms(tokens: int, *gpus: GpuType) -> float:
    """The slower end sets the pace."""
    bytes_per_s = 4 * min(gpu.bandwidth_bytes_per_s for gpu in gpus) / MEMORY_OVER_NETWORK
    return tokens * REFERENCE.model.kv_bytes_per_token / bytes_per_s * 1e3


def plan(*steps: Step, number: int = 0, deadline_s: float = 70.0) -> Plan:
    return Plan(
        number=number, tenant="t", workflow_class="c", arrival_s=1.0, steps=steps, deadline_s=deadline_s
    )  # fmt: skip


def prefill_ms(spec: EngineSpec, new: int, before: int = 0) -> float:
    rates = spec.rates
    pairs = new * before + new * new / 2
    return (
        rates.prefill_base_ms
        + new * rates.prefill_ms_per_token
        + pairs * rates.prefill_ms_per_token_sq
    )


def decode_ms(spec: EngineSpec, prompt: int, tokens: int) -> float:
    """The last prompt token once more, and the others of the answer one by one."""
    rates = spec.rates
    return prefill_ms(spec, 1, prompt - 1) + sum(
        rates.decode_ms_base + rates.decode_ms_per_seq + rates.decode_ms_per_kv_token * kv
        for kv in range(prompt, prompt + tokens - 1)
    )


def usd(spec: EngineSpec, busy_ms: float) -> float:
    return busy_ms * spec.micro_usd_per_hour / 3.6e6 / 1e6


def check(result: Result) -> None:
    assert set(result.gauges_at_end.values()) == {0.0}, result.gauges_at_end
    assert sum(result.total.fates.values()) == result.total.started
    wasted = result.wasted_usd
    parts = result.busy_usd + wasted[Waste.IDLE] + wasted[Waste.COLD_START]
    assert parts == pytest.approx(result.fleet_usd, rel=1e-9)
    assert all(each >= -1e-9 for each in wasted.values())


@pytest.mark.parametrize(
    ("first", "second"), [(H100_FP8, H100_FP8), (H100_FP8, A100), (A100, H100_FP8)]
)
def test_a_pair_alone_takes_the_prompt_the_transfer_and_the_decoding(first, second) -> None:
    prefill, decode = replace(PREFILL, gpu=first), replace(DECODE, gpu=second)
    strategy = Split()
    steps = (Step(1_000, 0, 11, 2.0), Step(504, 1_000, 1))
    result = play([plan(*steps)], pair(prefill, decode), strategy, OPTIONS)
    check(result)
    # Both engines hold 992 tokens of the second prompt, in whole blocks: 512 are computed, and 512 moved.
    filled = [prefill_ms(prefill, 1_000), prefill_ms(prefill, 512, 992)]
    moved = [moved_ms(tokens, first, second) for tokens in (1_000, 512)]
    decoded = [decode_ms(decode, 1_000, 11), decode_ms(decode, 1_504, 1)]
    ttft = [
        filled[0] + moved[0] + prefill_ms(decode, 1, 999),
        filled[1] + moved[1] + prefill_ms(decode, 1, 1_503),
    ]
    second_ms = 1_000.0 + filled[0] + moved[0] + decoded[0] + 2_000.0
    expected = [
        (1_000.0 + filled[0], "prefilled"), (1_000.0 + ttft[0], "first"),
        (second_ms + filled[1], "prefilled"), (second_ms + ttft[1], "first"),
    ]  # fmt: skip
    assert [what for _, what in strategy.heard] == [what for _, what in expected]
    assert [at_ms for at_ms, _ in strategy.heard] == pytest.approx(
        [at_ms for at_ms, _ in expected], rel=1e-9
    )
    assert result.ttft.mean_ms == pytest.approx(sum(ttft) / 2, rel=1e-9)
    assert result.e2e.mean_ms == pytest.approx(sum(filled + moved + decoded) / 2, rel=1e-9)
    assert result.busy_usd == pytest.approx(
        usd(prefill, sum(filled)) + usd(decode, sum(decoded)), rel=1e-9
    )
    assert (result.cached_tokens, result.pair_calls) == (992, 2)


def test_the_prefill_engine_holds_a_prompt_until_it_has_moved() -> None:
    strategy = Split()
    # Room for one prompt of 1,000 tokens at a time.
    narrow = replace(PREFILL, kv_tokens=1_500)
    plans = [plan(Step(1_000, 0, 5), number=number) for number in range(2)]
    result = play(plans, pair(narrow), strategy, replace(OPTIONS, has_log=True))
    check(result)
    moved_at_ms = next(float(line.split()[0]) for line in result.log if " moved w0-0 " in line)
    filled_ms = [at_ms for at_ms, what in strategy.heard if what == "prefilled"]
    assert filled_ms[0] < moved_at_ms
    assert filled_ms[1] == pytest.approx(moved_at_ms + prefill_ms(narrow, 1_000), rel=1e-9)


# A prompt of 60,000 tokens is computed for more than 5 s and moved within 50 ms; then 600 tokens are decoded.
LONG = Step(60_000, 0, 600)
FILLED_S = (
    1.0
    + sum(prefill_ms(PREFILL, min(8_192, 60_000 - at), at) for at in range(0, 60_000, 8_192)) / 1e3
)


@pytest.mark.parametrize(
    ("dies_s", "engine", "noticed_s", "lost_ms"),
    [
        (3.0, 0, 3.0, 0.0),
        (FILLED_S + 0.02, 0, FILLED_S + 0.02, (FILLED_S - 1.0) * 1e3),
        (3.0, 1, FILLED_S, (FILLED_S - 1.0) * 1e3),
        (FILLED_S + 0.02, 1, FILLED_S + 0.02, (FILLED_S - 1.0) * 1e3),
        (FILLED_S + 2.0, 1, FILLED_S + 2.0, (FILLED_S - 1.0) * 1e3 + prefill_ms(DECODE, 1, 59_999)),
    ],
    ids=["prefill computes", "prefill is read", "decode before", "decode reads", "decode decodes"],
)
def test_a_call_whose_engine_dies_waits_again_and_ends(dies_s, engine, noticed_s, lost_ms) -> None:
    strategy = Split()
    death = (EngineDeath(at_s=dies_s, engine=engine),)
    result = play([plan(LONG)], pair(), strategy, replace(OPTIONS, faults=death))
    check(result)
    assert result.total.fates == {Fate.SUCCEEDED: 1}
    failed_ms = [at_ms for at_ms, what in strategy.heard if what == "failed"]
    assert failed_ms == [pytest.approx(noticed_s * 1e3, rel=1e-9)]
    # What runs unchanged when an engine dies is not accounted for; a prompt that was computed is.
    assert result.wasted_usd[Waste.RETRIES] == pytest.approx(usd(PREFILL, lost_ms), rel=1e-9)
    if engine == 0:
        # Nothing of the prompt is left anywhere: it is computed and moved as if for the first time.
        again_ms = (dies_s + PREFILL.cold_start_s + FILLED_S - 1.0) * 1e3
        first_ms = again_ms + moved_ms(60_000, H100_FP8) + prefill_ms(DECODE, 1, 59_999)
        assert strategy.heard[-1] == (pytest.approx(first_ms, rel=1e-9), "first")


# ------------------------------------------------------------ policies on a fleet with roles

DEATHS = (
    EngineDeath(at_s=30.0, engine=0),
    EngineDeath(at_s=31.0, engine=1),
    EngineDeath(at_s=70.0, engine=3),
    SlowEngine(at_s=20.0, until_s=60.0, engine=2),
)


def chats(load: float) -> tuple[Plan, ...]:
    cell = Cell(workload="chat", deadlines=Deadlines.OWN, fleet="pairs", load=load)
    return drawn(cell, 3, SPAN)


def pairs_fleet(**changes: object) -> FleetSpec:
    named = fleet("pairs")
    engines = tuple(replace(spec, cold_start_s=15.0, **changes) for spec in named.engines)
    return replace(named, engines=engines)


BASELINES = ("round-robin", "llm-d", "dynamo", "mooncake", "sticky", "plas", "vllm-priority")
MAKERS = tuple(each.configs[0].make for each in FAMILIES if each.name in BASELINES)


def test_headway_leaks_nothing_where_engines_die_and_clients_hang_up() -> None:
    options = WorldOptions(seed=3, horizon_s=120.0, faults=DEATHS)
    first, again = (play(chats(1.2), pairs_fleet(), Headway(), options) for _ in range(2))
    check(first)
    assert first.digest == again.digest
    assert first.pair_calls > 0
    assert first.total.fates[Fate.LATE] > 0
    assert first.wasted_usd[Waste.RETRIES] > 0.0


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker().name)
def test_nothing_leaks_where_engines_die_memory_is_short_and_clients_hang_up(maker) -> None:
    plans, spec = chats(2.0), pairs_fleet(kv_tokens=80_000)
    options = WorldOptions(seed=3, horizon_s=120.0, faults=DEATHS)
    first, again = (play(plans, spec, maker(), options) for _ in range(2))
    check(first)
    assert first.digest == again.digest
    assert first.pair_calls > 0
    assert first.preemptions > 0
    assert first.total.fates[Fate.LATE] > 0
    assert first.wasted_usd[Waste.RETRIES] > 0.0


class Witness(Headway):
    """Writes down where the live placement sends calls, and whose credits a prefill leg gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.placed: list[tuple[str, str, str | None]] = []

    def _send(self, job) -> None:
        prefill, decode = job.placement.prefill, job.placement.decode
        name = None if prefill is None else prefill.engine_id
        self.placed.append((job.call.id, decode.engine_id, name))
        super()._send(job)

    def prefilled(self, call: Call) -> None:
        prefill, decode = call.own.placement.prefill, call.own.placement.decode
        before = (prefill.seats_taken, prefill.kv_tokens_taken, decode.seats_taken)
        self._pass = lambda: None  # what is freed must not be taken at once
        super().prefilled(call)
        del self._pass
        assert prefill.seats_taken == before[0] - 1
        assert prefill.kv_tokens_taken == before[1] - call.prompt_tokens
        assert decode.seats_taken == before[2]


def words(result: Result, *events: str) -> list[tuple[float, str, str, int]]:
    lines = (line.split() for line in result.log)
    return [
        (float(at_ms), event, name, int(engine))
        for at_ms, event, name, engine in lines
        if event in events
    ]


def test_headway_sends_to_the_pair_or_the_engine_that_the_live_placement_chose() -> None:
    spec, witness = pairs_fleet(), Witness()
    result = play(chats(1.0), spec, witness, WorldOptions(seed=3, horizon_s=120.0, has_log=True))
    check(result)
    index = {each.name: at for at, each in enumerate(spec.engines)}
    expected = []
    for name, decode, prefill in witness.placed:
        expected.append(("send", name, index[decode]))
        if prefill is not None:
            expected.append(("prefill", name, index[prefill]))
    assert [entry[1:] for entry in words(result, "send", "prefill")] == expected
    split = sum(prefill is not None for *_, prefill in witness.placed)
    assert 0 < split < len(witness.placed)


def test_headway_goes_on_without_a_prefill_engine_that_dies_as_the_relay_does() -> None:
    spec = pairs_fleet()
    dead = next(at for at, each in enumerate(spec.engines) if each.role is Role.PREFILL)
    options = WorldOptions(
        seed=3, horizon_s=120.0, has_log=True, faults=(EngineDeath(at_s=60.0, engine=dead),)
    )
    result = play(chats(1.0), spec, Headway(), options)
    check(result)
    computing: dict[str, int] = {}
    log = words(result, "send", "prefill", "prefilled", "hang_up")
    decode_of: dict[str, int] = {}
    for at_ms, event, name, engine in log:
        if at_ms >= 60_000.0:
            break
        if event == "send":
            decode_of[name] = engine
        elif event == "prefill" and engine == dead:
            computing[name] = decode_of[name]
        else:
            computing.pop(name, None)
    assert computing
    for name, decode in computing.items():
        after = [entry for entry in log if entry[0] >= 60_000.0 and entry[2] == name]
        assert after[0] == (60_000.0, "send", name, decode)
        assert not any(event == "prefill" for _, event, *_ in after)
