"""Token buckets by tenant, as API gateways limit: refuse what exceeds the tenant's rate, place sticky."""

from collections.abc import Mapping, Sequence
from typing import Final

from cli.simulate.baselines.placing import Placing, least_loaded
from cli.simulate.contracts import MS_PER_S, Call, EngineView

# A tenant may save up so much of its rate.
BURST_S: Final = 60.0


class TokenBuckets(Placing):
    """Each tenant may use its share of `factor` times the fleet's time, in milliseconds of engines.

    `shares` are those of the offered load, as an operator who sized the limits well would have set them.
    A call is charged its uncached prompt, and its expected answer in a batch of `batch` calls.
    """

    name = "token-bucket"

    def __init__(
        self, factor: float, shares: Mapping[str, float], *, spares_begun: bool, batch: int = 16
    ) -> None:
        super().__init__()
        self.factor = factor
        self.shares = shares
        self.spares_begun = spares_begun
        self.batch = batch
        self._left_ms: dict[str, float] = {}
        self._seen_ms: dict[str, float] = {}

    def choose(self, call: Call, engines: Sequence[EngineView]) -> int | None:
        engine = next(
            (each.index for each in engines if each.index == call.home),
            least_loaded(engines).index,
        )
        tenant = call.plan.tenant
        rate = self.factor * len(engines) * self.shares.get(tenant, 1.0 / max(1, len(self.shares)))
        most_ms = rate * BURST_S * MS_PER_S
        now_ms = self.floor.now_ms
        passed_ms = now_ms - self._seen_ms.get(tenant, now_ms)
        left_ms = min(most_ms, self._left_ms.get(tenant, most_ms) + rate * passed_ms)
        self._seen_ms[tenant] = now_ms
        cost_ms = self._cost_ms(call, self.floor.engines[engine])
        if left_ms < 0.0 and not (self.spares_begun and call.step_number > 0):
            self._left_ms[tenant] = left_ms
            self.floor.refuse(call, -left_ms / rate)
            return None
        # A bucket may be overdrawn by one call, or a call dearer than the bucket could never pass.
        self._left_ms[tenant] = left_ms - cost_ms
        return engine

    def _cost_ms(self, call: Call, engine: EngineView) -> float:
        rates = engine.rates
        return self.floor.prefill_ms(call, engine.index) + call.completion_tokens_expected * (
            rates.decode_ms_base / self.batch
            + rates.decode_ms_per_seq
            + call.prompt_tokens * rates.decode_ms_per_kv_token
        )
