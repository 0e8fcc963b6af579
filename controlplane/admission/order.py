"""In which order calls of a pool take their turn: deadlines, and the other orders that can be chosen. No clock.

A turn is a number; smaller goes first, and among equals who came first.
"""

from typing import Final, Literal

from controlplane.domain.request import Request

# deadline: the workflow's, within weights. slack: deadline less the time that the rest is thought to
# take. index: value over the tokens still expected, dearest first (Gittins' idea with the mean). plas:
# least service attained by the workflow, in levels (Autellix, arXiv 2502.13965). arrival: first come,
# first served, by whatever tenant and class.
Order = Literal["deadline", "slack", "index", "plas", "arrival"]

WEIGHT_MIN: Final = 0.01
# A call's turn comes at the latest when it has waited this many times what its SLO class thinks serving
# it takes, however far its deadline is and however little it weighs. Generous: where it bounds most of
# what waits, the order is that of arrival, which wastes an overloaded pool.
STARVATION_RATIO: Final = 30.0
SERVICE_MS_MIN: Final = 1_000
# Service attained is told apart by doublings from this many micro-dollars on; a level goes before all
# higher ones for this long, then both go by arrival.
PLAS_LEAST_MICRO_USD: Final = 1_000
PLAS_LEVEL_MS: Final = 60_000.0
# A millisecond of turn for each part of a micro-dollar per token.
INDEX_SCALE_MS: Final = 1e6


def turn_of(request: Request, order: Order) -> float:
    """When a call's turn comes among its tenant's; smaller goes first. Milliseconds, but for `index`."""
    if order == "deadline":
        return turn_ms(request)
    if order == "arrival":
        return float(request.arrival_ms)
    if order == "slack":
        return request.workflow_deadline_ms - expected_left_ms(request)
    if order == "plas":
        attained = max(0, request.workflow_spent_micro_usd) // PLAS_LEAST_MICRO_USD
        return request.arrival_ms + PLAS_LEVEL_MS * attained.bit_length()
    worth = request.weight * request.value_micro_usd / expected_left_tokens(request)
    return -INDEX_SCALE_MS * worth


def turn_ms(request: Request) -> float:
    """Arrival and the time given until the workflow's deadline, divided by the weight.

    Of two calls with equal deadlines the heavier goes first. No call's turn is later than
    STARVATION_RATIO times what its SLO class thinks serving it takes.
    """
    given_ms = max(0, request.workflow_deadline_ms - request.arrival_ms)
    return request.arrival_ms + min(
        given_ms / max(request.weight, WEIGHT_MIN),
        STARVATION_RATIO * max(SERVICE_MS_MIN, service_ms(request)),
    )


def service_ms(request: Request) -> float:
    """How long the SLO class thinks that serving the call takes."""
    return request.ttft_ms_max + request.completion_tokens_expected * request.tpot_ms_max


def expected_left_ms(request: Request) -> float:
    """What the rest of the workflow takes if every step is as its SLO class thinks of this one."""
    later = max(0, request.steps_expected - request.step - 1)
    return (later + 1) * service_ms(request) + later * request.step_gap_ms


def expected_left_tokens(request: Request) -> float:
    """Completion tokens that the workflow is still expected to need, at least one."""
    steps_left = max(1, request.steps_expected - request.step)
    return float(max(1, steps_left * request.completion_tokens_expected))
