"""Bundles are checked in a process of their own, and all the same when that is not to be had."""

import asyncio
import sys

import pytest

from controlplane.domain.errors import ConfigurationError
from controlplane.runtime.policy_compile import PolicyCompiler
from tests.integration.policy_world import LONG_ANSWERS, files, policy, without_rules

STRICT = files(LONG_ANSWERS)
BROKEN = {**without_rules(), "made-up.yaml": "kind: rules\n"}


async def test_a_process_checks_one_bundle_after_another_and_the_same_comes_of_it() -> None:
    compiler = PolicyCompiler()
    try:
        await compiler.start()
        pid = compiler.pid
        for given in (STRICT, without_rules(), STRICT):
            made, expected = await compiler.compile(given), policy(given)
            assert made.revision == expected.revision
            report, by_hand = made.bundle.report, expected.bundle.report
            assert (report.rules, report.inputs) == (by_hand.rules, by_hand.inputs)
        with pytest.raises(ConfigurationError, match=r"there/made-up\.yaml"):
            await compiler.compile(BROKEN, "there")
        first, second = await asyncio.gather(compiler.compile(STRICT), compiler.compile(STRICT))
        assert first.revision == second.revision
        assert compiler.pid == pid
    finally:
        await compiler.end()
    assert compiler.pid is None


@pytest.mark.parametrize(
    "command",
    [
        ("/nonexistent/python",),
        (sys.executable, "-c", ""),
        (sys.executable, "-c", "print('[]')"),
        (sys.executable, "-c", "input(); print('no json')"),
        (sys.executable, "-c", "input(); print('{}')"),
    ],
    ids=["not there", "ends", "says something first", "no json", "no report"],
)
async def test_without_an_answer_a_thread_checks(command: tuple[str, ...]) -> None:
    compiler = PolicyCompiler(command)
    try:
        made = await compiler.compile(STRICT)
        assert made.revision == policy(STRICT).revision
        assert made.bundle.report.inputs == policy(STRICT).bundle.report.inputs
        with pytest.raises(ConfigurationError, match=r"made-up\.yaml"):
            await compiler.compile(BROKEN)
    finally:
        await compiler.end()


async def test_one_that_is_given_up_leaves_no_answer_for_the_next() -> None:
    compiler = PolicyCompiler()
    try:
        await compiler.start()
        pid = compiler.pid
        asking = asyncio.create_task(compiler.compile(STRICT))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait({asking})
        made = await compiler.compile(without_rules())
        assert made.bundle.report.rules == policy(without_rules()).bundle.report.rules
        assert compiler.pid != pid
    finally:
        await compiler.end()
