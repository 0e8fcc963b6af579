"""The undo log against deep copies taken at every tick."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.domain.fleet import EngineRow, Rates
from controlplane.scheduler.tick_log import TickLog
from tests.decision_builders import engine_row

CHANGES = {
    "is_accepting": st.booleans(),
    "is_suspect": st.booleans(),
    "is_warm": st.booleans(),
    "running": st.integers(0, 2),
    "waiting": st.integers(0, 2),
    "kv_tokens_used": st.integers(0, 2),
    "rates": st.sampled_from([0.5, 1.0, 2.0]).map(lambda rate: Rates(*[rate] * 8)),
    "seats_lent": st.integers(0, 2),
    "kv_tokens_lent": st.integers(0, 2),
    "credits_expire_ms": st.integers(0, 2),
    "credits_epoch": st.integers(0, 2),
    "seats_taken": st.integers(0, 2),
    "kv_tokens_taken": st.integers(0, 2),
    "prefill_tokens_pending": st.integers(0, 2),
    "generation": st.integers(0, 2),
}
change = st.sampled_from(sorted(CHANGES)).flatmap(
    lambda name: st.tuples(st.integers(0, 2), st.just(name), CHANGES[name])
)
FIELDS = EngineRow.__slots__ if hasattr(EngineRow, "__slots__") else tuple(vars(EngineRow))


def copy_of(row):
    """Every field that a builder sets or a report changes, read one by one."""
    names = (
        *CHANGES,
        "index",
        "engine_id",
        "model",
        "role",
        "load_ms",
        "decode_ms_base",
        "prefill_ms_per_token",
        "tpot_correction",
        "tie_seed",
    )
    return {name: getattr(row, name) for name in names}


@given(st.lists(change, max_size=30), st.integers(1, 12))
def test_rows_at_a_tick_are_what_they_were(changes, entries_max):
    rows = [engine_row(index) for index in range(3)]
    log = TickLog(entries_max)
    copies = {log.mark(): [copy_of(row) for row in rows]}
    for index, name, value in changes:
        log.before_change(rows[index])
        if name == "rates":
            rows[index].use_rates(value)
        else:
            setattr(rows[index], name, value)
        copies[log.mark()] = [copy_of(row) for row in rows]
    for tick, expected in copies.items():
        then = log.rows_at(tick, rows)
        if len(changes) - tick > entries_max:
            assert then is None
            continue
        assert then is not None
        assert [copy_of(row) for row in then] == expected
        assert not {id(row) for row in then} & {id(row) for row in rows}


def test_a_change_of_several_fields_is_one_entry():
    row = engine_row()
    log = TickLog()
    log.before_change(row)
    row.seats_taken, row.kv_tokens_taken = 1, 7
    log.before_change(row)
    row.seats_taken, row.kv_tokens_taken = 2, 9
    then = log.rows_at(1, [row])
    assert then is not None
    assert (then[0].seats_taken, then[0].kv_tokens_taken) == (1, 7)
