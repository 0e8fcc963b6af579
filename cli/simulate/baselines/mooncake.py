"""Mooncake's conductor: the lowest predicted TTFT, and early rejection with or without prediction.

Algorithm 1 and section 7 of the paper (arXiv 2407.00079). TTFT = queue + prefill of what is not cached;
load is the larger of predicted TTFT and TBT over their targets, and a request is answered 429 before it begins
when the load exceeds 1. With prediction, TBT is that of the instant at which the request would begin to
decode: requests whose uniform decode time is over by then are taken off, those that will have finished
prefill are added. Here one engine does both phases, so the pair of prefill and decode instances is one
engine: the lowest TTFT among those that keep the target of TBT, as the paper's decode instance must; without
one, the lowest TBT. There is no transfer between engines to balance hot blocks with.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cli.simulate.baselines.placing import Counting
from cli.simulate.contracts import MS_PER_S, Call, EngineView


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Seconds to the first token and between tokens. `decode_s` is the uniform time that decoding is
    taken to last, None for no prediction. `spares_begun`: only first steps are rejected.
    """

    ttft_s: float
    tbt_s: float
    is_rejecting: bool = True
    decode_s: float | None = None
    spares_begun: bool = False


class Mooncake(Counting):
    name = "mooncake"

    def __init__(self, targets: Targets) -> None:
        super().__init__()
        self.targets = targets
        # By engine, when the calls that decode there began, oldest first.
        self._began_ms: dict[int, deque[tuple[float, str]]] = {}
        self._decoding: set[str] = set()

    def choose(self, call: Call, engines: Sequence[EngineView]) -> int | None:
        targets = self.targets
        offers = []
        for engine in engines:
            index = engine.index
            ttft_ms = self.ledger.prefill_tokens[
                index
            ] * engine.rates.prefill_ms_per_token + self.floor.prefill_ms(call, index)
            tbt_ms = self._tbt_ms(call, engine, ttft_ms)
            is_over = tbt_ms > targets.tbt_s * MS_PER_S
            offers.append((is_over, tbt_ms if is_over else ttft_ms, tbt_ms, ttft_ms, index))
        _, _, tbt_ms, ttft_ms, index = min(offers)
        if not targets.is_rejecting or (targets.spares_begun and call.step_number > 0):
            return index
        load = max(ttft_ms / (targets.ttft_s * MS_PER_S), tbt_ms / (targets.tbt_s * MS_PER_S))
        if load > 1.0:
            self.floor.refuse(call, None)
            return None
        return index

    def _tbt_ms(self, call: Call, engine: EngineView, ttft_ms: float) -> float:
        sequences = engine.in_flight + 1
        held = self.ledger.held_tokens[engine.index]
        if self.targets.decode_s is not None and engine.in_flight:
            began = self._began_ms.get(engine.index, deque())
            while began and began[0][1] not in self._decoding:
                began.popleft()
            starts_ms = self.floor.now_ms + ttft_ms
            over = sum(
                call_id in self._decoding
                and began_ms + self.targets.decode_s * MS_PER_S < starts_ms
                for began_ms, call_id in began
            )
            left_ratio = max(0.0, 1.0 - over / engine.in_flight)
            sequences, held = 1 + round(engine.in_flight * left_ratio), round(held * left_ratio)
        rates = engine.rates
        return (
            rates.decode_ms_base
            + sequences * rates.decode_ms_per_seq
            + (held + call.prompt_tokens) * rates.decode_ms_per_kv_token
        )

    def first_token(self, call: Call) -> None:
        super().first_token(call)
        self._decoding.add(call.id)
        self._began_ms.setdefault(call.engine, deque()).append((self.floor.now_ms, call.id))

    def ended(self, call: Call) -> None:
        super().ended(call)
        self._decoding.discard(call.id)

    def failed(self, call: Call) -> None:
        self._decoding.discard(call.id)
        super().failed(call)

    def expired(self, call: Call) -> None:
        self._decoding.discard(call.id)
        super().expired(call)
