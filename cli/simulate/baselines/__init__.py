"""What Headway is compared with: honest ports of published policies, each with the knobs that it is tuned by.

A family is one policy; its configs are the grid that tuning chooses from, on seeds that are never evaluated. All
of them get the same engines, with prefix cache and chunked prefill.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Final

from cli.simulate.baselines.balancing import LeastRequest, PowerOfTwo, RoundRobin
from cli.simulate.baselines.buckets import TokenBuckets
from cli.simulate.baselines.clairvoyant import EdfTrueSizes
from cli.simulate.baselines.dynamo import DynamoCost
from cli.simulate.baselines.llmd import LlmdTokens, LlmdWeights, Weights
from cli.simulate.baselines.mooncake import Mooncake, Targets
from cli.simulate.baselines.sticky import PlasSticky, StaticGate, StickyFcfs, VllmDeadlines
from cli.simulate.contracts import FleetSpec, Strategy
from cli.simulate.workloads import tenant_shares

# Context that a bound on an engine's sequences is computed for, in tokens.
CONTEXT_TOKENS: Final = 40_000
SEATS_MIN: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One setting of a policy. `tpot_stretch` sets the engines' `--max-num-seqs` so that a token takes at most
    so many times as long as on an empty engine; None leaves vLLM's default.
    """

    label: str
    make: Callable[[], Strategy]
    tpot_stretch: float | None = None

    def fitted(self, fleet: FleetSpec) -> FleetSpec:
        """The fleet with its engines configured as this setting wants them."""
        if self.tpot_stretch is None:
            return fleet
        engines = []
        for spec in fleet.engines:
            rates = spec.rates
            each_ms = rates.decode_ms_per_seq + rates.decode_ms_per_kv_token * CONTEXT_TOKENS
            seats = ceil((self.tpot_stretch - 1.0) * rates.decode_ms_base / each_ms)
            engines.append(replace(spec, seats=max(SEATS_MIN, min(spec.seats, seats))))
        return replace(fleet, engines=tuple(engines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`is_reference`: knows what no live policy can know; it is shown and is no baseline."""

    name: str
    configs: tuple[Config, ...]
    is_reference: bool = False


def _llmd(label: str, weights: Weights) -> Config:
    return Config(label=label, make=partial(LlmdWeights, weights))


def _mooncake(label: str, targets: Targets) -> Config:
    return Config(label=label, make=partial(Mooncake, targets))


def _plas(quantum_s: float, *, moves_short: bool) -> Config:
    label = f"quantum {quantum_s:g} s{', short ones move' if moves_short else ''}"
    return Config(label=label, make=partial(PlasSticky, quantum_s, moves_short=moves_short))


def _buckets(factor: float, *, spares_begun: bool) -> Config:
    label = f"{factor:g} x the share{', first steps only' if spares_begun else ''}"
    return Config(
        label=label, make=partial(TokenBuckets, factor, tenant_shares(), spares_begun=spares_begun)
    )


FAMILIES: Final[tuple[Family, ...]] = (
    Family(name="round-robin", configs=(Config(label="", make=RoundRobin),)),
    Family(name="least-request", configs=(Config(label="", make=LeastRequest),)),
    Family(name="power-of-two", configs=(Config(label="", make=PowerOfTwo),)),
    Family(
        name="llm-d",
        configs=(
            _llmd("prefix 2, load 1", Weights(prefix=2, load=1)),
            _llmd("prefix 10, queue 1", Weights(prefix=10, queue=1)),
            _llmd("queue 2, kv 2, prefix 3", Weights(prefix=3, queue=2, kv=2)),
            _llmd("queue 2, kv 2, prefix 3, no hit 2", Weights(prefix=3, queue=2, kv=2, no_hit=2)),
        ),
    ),
    Family(
        name="llm-d-tokens",
        configs=tuple(
            Config(
                label=f"tau {seconds:g} s of prefill", make=partial(LlmdTokens, seconds)
            )
            for seconds in (2.0, 6.0, 18.0)
        ),
    ),
    Family(
        name="dynamo",
        configs=tuple(
            Config(label=f"overlap weight {weight:g}", make=partial(DynamoCost, weight))
            for weight in (1.0, 4.0, 16.0)
        ),
    ),
    Family(
        name="mooncake",
        configs=(
            _mooncake("no rejection", Targets(ttft_s=5.0, tbt_s=0.025, is_rejecting=False)),
            _mooncake("early rejection", Targets(ttft_s=5.0, tbt_s=0.03)),
            _mooncake("early rejection, first steps only",
                      Targets(ttft_s=5.0, tbt_s=0.025, spares_begun=True)),
            _mooncake("prediction, first steps only",
                      Targets(ttft_s=5.0, tbt_s=0.025, decode_s=8.0, spares_begun=True)),
            _mooncake("prediction, first steps only, tight",
                      Targets(ttft_s=5.0, tbt_s=0.02, decode_s=8.0, spares_begun=True)),
        ),
    ),
    Family(
        name="sticky",
        configs=(
            Config(label="never leaves", make=StickyFcfs),
            Config(label="leaves when 16 calls ahead", make=partial(StickyFcfs, 16)),
        ),
    ),
    Family(
        name="static-gate",
        configs=tuple(
            Config(label=f"{most} workflows an engine", make=partial(StaticGate, most))
            for most in (24, 32, 48)
        ),
    ),
    Family(
        name="plas",
        configs=(
            _plas(2.0, moves_short=False),
            _plas(8.0, moves_short=False),
            _plas(2.0, moves_short=True),
        ),
    ),
    Family(
        name="token-bucket",
        configs=(
            _buckets(1.0, spares_begun=True),
            _buckets(1.5, spares_begun=True),
            _buckets(1.0, spares_begun=False),
        ),
    ),
    Family(
        name="vllm-priority",
        configs=tuple(
            Config(label=f"stretch {stretch:g}", make=VllmDeadlines, tpot_stretch=stretch)
            for stretch in (1.2, 1.35, 1.5, 2.0, 2.5)
        ),
    ),
    Family(
        name="edf-true-sizes",
        configs=tuple(
            Config(
                label=f"stretch {stretch:g}{', slack' if by_slack else ''}",
                make=partial(EdfTrueSizes, stretch, slack_order=by_slack),
            )
            for stretch in (1.5, 2.0)
            for by_slack in (True, False)
        ),
        is_reference=True,
    ),
)  # fmt: skip


def family(name: str) -> Family:
    """Raises KeyError when no baseline is called so."""
    for each in FAMILIES:
        if each.name == name:
            return each
    raise KeyError(name)
