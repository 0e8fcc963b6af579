"""The process in which bundles are checked: reads them from standard input, a line each, and answers.

It knows neither database nor bus, and ends when its input does.
"""

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from controlplane.domain.errors import ConfigurationError
from policies.load import bundle_of


def main() -> int:
    """Serve until the input ends."""
    # What a library prints must not stand between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        answers.write(json.dumps(answer_to(json.loads(line))) + "\n")
        answers.flush()
    return 0


def answer_to(asked: dict[str, Any]) -> dict[str, Any]:
    """The members of the report, or `{"error"}` with the words for whoever wrote the bundle."""
    try:
        return asdict(bundle_of(asked["files"], asked["where"]).report)
    except ConfigurationError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    sys.exit(main())
