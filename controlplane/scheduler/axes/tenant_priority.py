"""Who may use scarce seats: their price rises as an engine fills, and falls with tenant weight."""

# Runs for every engine: comparisons are cheaper than calls of max() and min().
# ruff: noqa: PLR1730

from typing import Final

from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.perf_model import INFEASIBLE, Forecast

# An engine is contended from this share of its seats or KV on.
CONTENDED_RATIO: Final = 0.8
# One seat in so many is kept for tenants of at least WEIGHT_KEPT_MIN (silver in the default policy).
SEATS_PER_KEPT: Final = 16
WEIGHT_KEPT_MIN: Final = 2.0
WEIGHT_MIN: Final = 0.01


def may_take_seat(request: Request, row: EngineRow, sequences: int) -> bool:
    """The last seats of an engine are not for the lowest class. Monotone: weight never hurts."""
    if request.weight >= WEIGHT_KEPT_MIN:
        return True
    return sequences < row.seats_capacity - row.seats_capacity // SEATS_PER_KEPT


def cost(request: Request, row: EngineRow, forecast: Forecast) -> float:
    """Micro-dollars of the value that this call may displace on a nearly full engine.

    With saturation s after the call, ((s - 0.8) / 0.2)^2 x value of a call / weight: the chance that
    something worth more arrives and finds no room grows towards certainty, and is smaller for who
    is worth more. Below 0.8 it is nothing.
    """
    if not may_take_seat(request, row, forecast.sequences):
        return INFEASIBLE
    saturation = (forecast.sequences + 1.0) / (row.seats_capacity or 1)
    if saturation < forecast.kv_saturation:
        saturation = forecast.kv_saturation
    if saturation <= CONTENDED_RATIO:
        return 0.0
    if saturation > 1.0:
        saturation = 1.0
    pressure = (saturation - CONTENDED_RATIO) / (1.0 - CONTENDED_RATIO)
    return pressure * pressure * request.value_micro_usd / max(request.weight, WEIGHT_MIN)


def objection(request: Request, row: EngineRow, forecast: Forecast) -> str | None:
    if may_take_seat(request, row, forecast.sequences):
        return None
    kept = row.seats_capacity // SEATS_PER_KEPT
    return f"its last {kept:,} seats are kept for tenants of weight {WEIGHT_KEPT_MIN:g} or more"
