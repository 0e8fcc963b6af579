"""Makes policies of bundles' files without holding up the calls that this process serves.

Trying the rules out on a thousand inputs takes nine tenths of the time, and all of it Python's lock: that
is done in a process of its own, which waits for the next bundle. What is left is done in a thread. A
process that can not be had, or that ends, is no reason to rule by the old bundle: the thread then does all
of it.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from controlplane.domain.errors import ConfigurationError
from controlplane.runtime import policy_worker
from controlplane.runtime.line_process import LineProcess
from controlplane.store.policies import Check
from policies.evaluate import Policy, compile_policy
from policies.load import Report, bundle_of

log = logging.getLogger(__name__)

COMMAND: Final = (sys.executable, "-m", policy_worker.__name__)
CHECK_S_MAX: Final = 20.0
ANSWER_BYTES_MAX: Final = 1024 * 1024


def compile_files(
    files: Mapping[str, str], where: str = "", *, report: Report | None = None
) -> Policy:
    """A policy from its files, which are checked here unless `report` says what that told.

    Raises ConfigurationError. CPU-long.
    """
    return compile_policy(bundle_of(files, where, report=report))


@cache
def checker() -> str:
    """Digest of the program that checks bundles: two with the same one come to the same findings."""
    root = Path(__file__).parents[2]
    told = hashlib.sha256(
        f"{sys.version} {version('cel-expr-python')} {version('PyYAML')}".encode()
    )
    for folder in (root / "policies", root / "controlplane" / "domain"):
        for file in sorted(folder.glob("*.py")):
            told.update(file.name.encode() + b"\0" + file.read_bytes())
    return told.hexdigest()


def checked(policy: Policy) -> Check:
    """What checking a policy has told, to be kept beside its bundle."""
    report = asdict(policy.bundle.report)
    return Check(checker=checker(), report={**report, "notes": list(report["notes"])})


def report_from(told: Mapping[str, Any] | None) -> Report | None:
    """The report in `told`; None when there is none that this program can read."""
    if told is None:
        return None
    try:
        return Report(**{**told, "notes": tuple(told["notes"])})
    except (KeyError, TypeError):
        return None


class PolicyCompiler:
    """One child at most. Belongs to one event loop; bundles are checked one after another."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._child = LineProcess(command, answer_bytes_max=ANSWER_BYTES_MAX)
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._child.pid

    async def start(self) -> None:
        """Let the child load what it needs, so that the first bundle does not wait for that."""
        with contextlib.suppress(OSError):
            await self._child.start()

    async def compile(
        self, files: Mapping[str, str], where: str = "", *, report: Report | None = None
    ) -> Policy:
        """The policy of a bundle, whose rules are tried out unless `report` says what that told.

        Raises ConfigurationError with file, rule, column and remedy.
        """
        try:
            if report is None:
                async with self._turn:
                    report = await self._check(files, where)
        except (OSError, ValueError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            log.warning("policy_checked_in_a_thread", extra={"fields": {"why": why}})
        return await asyncio.to_thread(compile_files, files, where, report=report)

    async def end(self) -> None:
        """End the child, if there is one."""
        await self._child.end()

    async def _check(self, files: Mapping[str, str], where: str) -> Report:
        """Raises ConfigurationError; OSError, ValueError and TimeoutError when there is no answer."""
        asked = json.dumps({"files": dict(files), "where": where}).encode() + b"\n"
        async with asyncio.timeout(CHECK_S_MAX):
            answer = await self._child.ask(asked)
        try:
            told: dict[str, Any] = json.loads(answer)
        except ValueError:
            # Whose answer comes next would not be known.
            await self.end()
            raise
        if "error" in told:
            raise ConfigurationError(str(told["error"]))
        report = report_from(told)
        if report is None:
            raise ValueError("the process that checks bundles gave no report")
        return report
