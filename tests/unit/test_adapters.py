"""Adapters in the decision: only where they are loaded, dearer where they must take turns, told when nowhere."""

import pytest

from controlplane.domain.decision import Axis, Placement, Reason
from controlplane.scheduler.axes import AXES, weight_warmth
from controlplane.scheduler.legs import WHOLE
from controlplane.scheduler.perf_model import INFEASIBLE, Forecast
from controlplane.scheduler.place import Objection, place
from tests.decision_builders import NOW_MS, call, engine_row


def row_with(index: int, *adapters: str, slots: int = 2, **changes: object):
    row = engine_row(index, **changes)
    row.adapters = frozenset(adapters)
    row.adapter_slots = slots
    return row


def test_a_call_goes_where_its_adapter_is_though_others_are_idle() -> None:
    rows = (
        row_with(0, seats_taken=0),
        row_with(1, "med", seats_taken=0),
        row_with(2, "law", "med", seats_taken=5, running=5),
    )
    found = place(call(adapter="law"), rows, {}, NOW_MS)
    assert isinstance(found, Placement)
    assert found.decode is rows[2]
    plain = place(call(), rows, {}, NOW_MS)
    assert isinstance(plain, Placement)
    assert plain.decode is not rows[2]


def test_without_an_engine_that_has_it_the_refusal_names_it() -> None:
    found = place(call(adapter="law"), (row_with(0, "med"), row_with(1)), {}, NOW_MS)
    assert isinstance(found, Objection)
    assert found.reason is Reason.NO_CAPACITY
    assert "`law` is loaded on no engine of `m`" in found.detail
    assert found.retry_after_ms is not None
    # Full is another matter: it passes by itself.
    full = row_with(0, "law", seats_taken=8)
    found = place(call(adapter="law"), (full, row_with(1)), {}, NOW_MS)
    assert isinstance(found, Objection)
    assert found.reason is Reason.QUEUE_FULL


@pytest.mark.parametrize(
    ("loaded", "slots", "ratio"), [(1, 1, 0.0), (2, 2, 0.0), (4, 1, 0.75), (4, 3, 0.25)]
)
def test_more_adapters_than_slots_take_turns(loaded: int, slots: int, ratio: float) -> None:
    names = ["law", "a", "b", "c"][:loaded]
    row = row_with(0, *names, slots=slots)
    request = call(adapter="law")
    forecast = Forecast(request, row, 0, NOW_MS, WHOLE, 0.0)
    expected = ratio * forecast.e2e_ms * row.micro_usd_per_ms
    assert weight_warmth.cost(request, row, forecast) == pytest.approx(expected)
    # The model itself takes no turn.
    assert weight_warmth.cost(call(), row, forecast) == 0.0


def test_adapters_spread_over_engines_by_their_turns() -> None:
    crowded, free = row_with(0, "law", "a", "b", "c", slots=1), row_with(1, "law", slots=1)
    for rows in ((crowded, free), (free, crowded)):
        found = place(call(adapter="law"), rows, {}, NOW_MS)
        assert isinstance(found, Placement)
        assert found.decode is free


def test_the_axis_says_why_in_words_and_dollars() -> None:
    row = row_with(0, "med")
    request = call(adapter="law")
    forecast = Forecast(request, row, 0, NOW_MS, WHOLE, 0.0)
    [functions] = [each for each in AXES if each.axis is Axis.WEIGHT_WARMTH]
    assert functions.cost(request, row, forecast) == INFEASIBLE
    assert functions.objection(request, row, forecast) == ("the adapter `law` is not loaded there")
    row.adapters = frozenset({"law"})
    assert functions.objection(request, row, forecast) is None


def test_a_past_decision_is_explained_by_the_adapters_of_then() -> None:
    row = row_with(0, "law")
    then = row.dynamic()
    row.adapters = frozenset()
    past = row.as_of(then)
    assert past.adapters == {"law"}
    assert past.adapter_slots == row.adapter_slots
    assert isinstance(place(call(adapter="law"), (past,), {}, NOW_MS), Placement)
    assert isinstance(place(call(adapter="law"), (row,), {}, NOW_MS), Objection)
