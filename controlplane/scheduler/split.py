"""When a call is worth two engines, and where its prompt is computed after its prefill engine has failed.

Pure. What pairs cost is `place.py`'s; here stands what no price tells: the time of a hand-over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from controlplane.domain.decision import Placement
from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.legs import DECODE, WHOLE
from controlplane.scheduler.perf_model import INFEASIBLE, Forecast, uncached_prefill_ms
from controlplane.scheduler.place import prefill_choices, price

# What a second call, its answer and the fetching take beside the computing: a prompt that is computed in less
# stays where it is decoded. The same figure that a transferred call may add to its first token.
HANDOVER_MS: Final = 15.0


def is_worth_splitting(
    request: Request, decodes: Mapping[int, EngineRow], cached: Mapping[int, int]
) -> bool:
    """Whether the prompt is long where it would be decoded: on the engine that holds most of it.

    `decodes` are engines by index, at least one; when none holds any of it, one stands for all. Costs the
    same however many they are.
    """
    nearest, most = next(iter(decodes)), 0
    for index, tokens in cached.items():
        if tokens > most and index in decodes:
            nearest, most = index, tokens
    return uncached_prefill_ms(request, decodes[nearest], most) >= HANDOVER_MS


def other_prefill(
    request: Request,
    failed: Placement,
    rows: Sequence[EngineRow],
    cached: Mapping[int, int],
    now_ms: int,
) -> Placement | None:
    """The placement with the cheapest other prefill engine of `rows`; None: the decode engine is cheaper.

    What was lost to the failed leg is not predicted again: the times of such a placement teach nothing, so
    its first token is predicted at 0 ms, which stands for none.
    """
    held = cached if isinstance(cached, dict) else dict(cached)
    decode = failed.decode
    mates = [row for row in rows if row.pair_key == decode.pair_key and row is not failed.prefill]
    choice = prefill_choices(request, mates, held, now_ms).get(decode.pair_key)
    if choice is None:
        return None
    tokens = held.get(decode.index, 0)
    alone = price(request, decode, Forecast(request, decode, tokens, now_ms, WHOLE, 0.0))
    fetched = Forecast(request, decode, tokens, now_ms, DECODE, choice.ttft_ms)
    # A decode engine that this very call fills up objects to both; then the prompt is kept away from it.
    if alone != INFEASIBLE and alone <= choice.cost_micro_usd + price(request, decode, fetched):
        return None
    return replace(
        failed,
        prefill=choice.row,
        cached_tokens=min(held.get(choice.row.index, 0), request.prompt_tokens),
        ttft_ms_predicted=0.0,
        e2e_ms_predicted=failed.e2e_ms_predicted - failed.ttft_ms_predicted,
    )


def without_prefill(failed: Placement, cached_tokens: int) -> Placement:
    """The same call on its decode engine alone, which holds `cached_tokens` of the prompt."""
    return replace(
        failed,
        prefill=None,
        cached_tokens=cached_tokens,
        ttft_ms_predicted=0.0,
        e2e_ms_predicted=failed.e2e_ms_predicted - failed.ttft_ms_predicted,
    )
