"""The process in which plans are solved: reads problems from standard input, a line each, and answers.

It knows neither database nor bus. It ends when its input does, or when its parent dies.
"""

import ctypes
import json
import os
import signal
import sys
from typing import Final

from controlplane.scheduler.planner.problem import JSON_BYTES_MAX, Problem, as_json, from_json

# Above the event loops that serve, which have the first right to the processors.
NICE: Final = 10
_PR_SET_PDEATHSIG: Final = 1


def main(parent: int) -> int:
    """Serve until the input ends. An answer is a plan, or an object with the one member `error`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        return 1
    os.nice(NICE)
    # What a solver prints must not stand between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from controlplane.scheduler.planner.fleet import solve

    while line := sys.stdin.readline(JSON_BYTES_MAX + 1):
        try:
            answer = as_json(solve(from_json(Problem, line)))
        except Exception as error:  # noqa: BLE001 - the outermost frame of the process: told, not hidden
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        answers.write(answer + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
