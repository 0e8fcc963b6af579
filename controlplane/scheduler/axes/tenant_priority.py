"""Who may use scarce seats: what the call takes from those who live there, and from those still to come."""

# Runs for every engine: comparisons are cheaper than calls of max() and min().
# ruff: noqa: FURB136, PLR1730

from math import exp, log

from controlplane.domain.fleet import EngineRow
from controlplane.domain.request import Request
from controlplane.scheduler.flow import caused_ms
from controlplane.scheduler.perf_model import INFEASIBLE, MS_PER_S, Forecast


def may_take_seat(request: Request, row: EngineRow, sequences: int) -> bool:
    """The engine has a seat at all, whoever asks; with more calls than seats they would wait inside it.

    What is kept free for higher classes is decided where a workflow begins, from what they hold.
    """
    del request
    return sequences < row.seats_capacity


def displaced_ratio(row: EngineRow, forecast: Forecast) -> float:
    """Chance in 0..1 that the rest of the seats fills before one frees, so that somebody finds none.

    Seats that are found full with ratio r fill one after the other like a queue's places: r to the power
    of the calls that still fit, after this one, by seats or by KV, whichever end first.
    """
    ratio = row.offered_ratio
    if ratio <= 0.0:
        return 0.0
    seats = row.seats_bound if row.seats_bound < row.seats_lent else row.seats_lent
    free = float(seats - row.seats_taken - 1)
    rest = float(row.seats_capacity - forecast.sequences - 1)
    if rest < free:
        free = rest
    if forecast.kv_tokens_pinned > 0.0:
        calls = (1.0 - forecast.kv_saturation) * row.kv_tokens_capacity / forecast.kv_tokens_pinned
        if calls < free:
            free = calls
    if free <= 0.0 or ratio >= 1.0:
        return 1.0
    return exp(free * log(ratio))


def cost(request: Request, row: EngineRow, forecast: Forecast) -> float:
    """Micro-dollars: delay caused to the flows that live there, and value displaced.

    Delay of a newcomer's whole workflow x the urgency of all flows there; who has a home paid when it
    came there. And where a call that finds no seat is worth more than this one (weight x value), the
    difference x the chance of that: nobody of equal worth is displaced at a loss.
    """
    if not may_take_seat(request, row, forecast.sequences):
        return INFEASIBLE
    total = 0.0
    if request.home is None and row.flows_micro_usd_per_s > 0.0:
        delay_ms = caused_ms(request, row, forecast.leg, forecast.prefill_ms)
        total = row.flows_micro_usd_per_s * delay_ms / MS_PER_S
    loss = row.bid_micro_usd - request.weight * request.value_micro_usd
    if loss > 0.0:
        total += loss * displaced_ratio(row, forecast)
    return total


def objection(request: Request, row: EngineRow, forecast: Forecast) -> str | None:
    if may_take_seat(request, row, forecast.sequences):
        return None
    return f"it runs {forecast.sequences:,} calls and has {row.seats_capacity:,} seats"
