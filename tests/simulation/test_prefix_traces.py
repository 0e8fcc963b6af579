"""Cached tokens as predicted against a block cache, on sizes of real coding agents and conversations."""

import pytest

from tests.simulation.prefix_traces import chat, coding, folder, mean_error_ratio

PLAYS = {
    "coding, ample": (coding, 24, 1_000_000),
    "coding, short of room": (coding, 24, 300_000),
    "chat, ample": (chat, 2_000, 5_000_000),
    "chat, short of room": (chat, 2_000, 500_000),
}
ERROR_RATIO_MAX = 0.05


@pytest.mark.skipif(folder() is None, reason="HEADWAY_TRACES names no folder of data sets")
@pytest.mark.parametrize("name", PLAYS)
def test_the_mean_error_is_a_twentieth_of_the_prompt_at_most(name):
    play, many, kv_tokens = PLAYS[name]
    path = folder()
    assert path is not None
    error, actual, calls = mean_error_ratio(play(path, many), 4, kv_tokens)
    print(f"{name}: {calls:,} calls, {actual:.1%} cached, mean error {error:.2%}")
    assert calls > 1_000
    assert error <= ERROR_RATIO_MAX
