"""Dynamo's port against round robin here, and against Dynamo's own replay where it is installed.

Set HEADWAY_DYNAMO_PYTHON to a Python with `ai-dynamo` to have the other world play too.
"""

import json
import os
from pathlib import Path
from random import Random

import pytest

from cli.simulate.contracts import Plan
from cli.simulate.referee import (
    BLOCK_TOKENS,
    KV_ROUTER,
    ROUND_ROBIN,
    agrees,
    as_mooncake,
    conversations,
    ours,
    theirs,
)
from cli.simulate.traces import read_trace

DYNAMO = os.environ.get("HEADWAY_DYNAMO_PYTHON", "")
REQUESTS = 300
WORKERS = 4
# How far the worlds may be apart on engines that are alike: of TTFT, and of prompt tokens reused.
TTFT_RATIO_MAX = 1.15
REUSE_MAX = 0.03


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, ...]:
    """Conversations whose prompts grow by a few blocks a turn, in Mooncake's format."""
    random, rows, fresh = Random(5), [], 1
    for session in range(REQUESTS // 6):
        blocks, at_ms = [0], session * 1_500
        for _ in range(6):
            grown = random.randint(2, 16)
            blocks = [*blocks, *range(fresh, fresh + grown)]
            fresh += grown
            rows.append(
                {
                    "timestamp": at_ms,
                    "input_length": len(blocks) * BLOCK_TOKENS,
                    "output_length": random.randint(20, 300),
                    "hash_ids": blocks,
                }
            )
            at_ms += random.randint(8_000, 30_000)
    rows.sort(key=lambda row: row["timestamp"])
    path = tmp_path_factory.mktemp("trace") / "conversations.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return conversations(read_trace(str(path)), REQUESTS)


def test_what_the_other_world_is_given_is_what_is_played_here(plans: tuple[Plan, ...]) -> None:
    """An endless cache that knows nothing but block hashes finds what the plans call reusable."""
    rows = [json.loads(line) for line in as_mooncake(plans)]
    steps = [step for plan in plans for step in plan.steps]
    assert len(rows) == len(steps) == REQUESTS
    seen: set[int] = set()
    for row, step in zip(rows, steps, strict=True):
        assert (row["input_length"], row["output_length"]) == (
            step.prompt_tokens,
            step.completion_tokens,
        )
        assert len(row["hash_ids"]) == -(-row["input_length"] // BLOCK_TOKENS)
        known = [block in seen for block in row["hash_ids"]]
        found = (known.index(False) if False in known else len(known)) * BLOCK_TOKENS
        # Nobody has sent the block that all share before the first.
        assert found == (step.reusable_tokens if seen else 0)
        seen.update(row["hash_ids"])
    waits_ms = [row["delay"] for row in rows if "delay" in row]
    gaps_s = [step.gap_s for plan in plans for step in plan.steps[:-1]]
    assert waits_ms == pytest.approx([1_000 * gap_s for gap_s in gaps_s], abs=0.001)


def test_routing_by_kv_cost_reuses_more_and_answers_sooner(plans: tuple[Plan, ...]) -> None:
    here = ours(plans, WORKERS)
    by_turn, by_cost = here[ROUND_ROBIN], here[KV_ROUTER]
    assert by_turn.requests == by_cost.requests == REQUESTS
    reusable = sum(step.reusable_tokens for plan in plans for step in plan.steps)
    prompts = sum(step.prompt_tokens for plan in plans for step in plan.steps)
    # Nobody reuses more than there is; round robin finds the latest context only by chance.
    assert by_turn.reuse_ratio < by_cost.reuse_ratio <= reusable / prompts
    assert by_cost.reuse_ratio > 1.2 * by_turn.reuse_ratio
    assert by_cost.ttft_ms_mean < by_turn.ttft_ms_mean
    swapped = {ROUND_ROBIN: by_cost, KV_ROUTER: by_turn}
    assert agrees(here, here)
    assert not agrees(here, swapped)


@pytest.mark.skipif(not Path(DYNAMO).is_file(), reason="HEADWAY_DYNAMO_PYTHON names no Python")
def test_dynamo_ranks_the_routers_alike_and_its_engines_are_as_fast(
    plans: tuple[Plan, ...],
) -> None:
    here, there = ours(plans, WORKERS), theirs(plans, WORKERS, DYNAMO)
    assert agrees(here, there), (here, there)
    for router, each in here.items():
        other = there[router]
        assert each.requests == other.requests
        assert abs(each.reuse_ratio - other.reuse_ratio) < REUSE_MAX, (each, other)
        ratio = each.ttft_ms_mean / other.ttft_ms_mean
        assert 1 / TTFT_RATIO_MAX < ratio < TTFT_RATIO_MAX, (each, other)
