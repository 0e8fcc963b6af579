"""Process entry of `headway serve`: read settings, start, serve."""

import sys

import uvloop
from pydantic import ValidationError

from controlplane.bootstrap import serve
from controlplane.domain.errors import ConfigurationError
from controlplane.settings import Settings
from controlplane.telemetry.logging import EventLog, configure


def main() -> int:
    """Exit code 0 after a requested stop, 2 when the settings can not be used."""
    configure(EventLog(), "info")
    try:
        settings = Settings()
        uvloop.run(serve(settings))
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"])
            variable = name if name.isupper() else f"HEADWAY_{name.upper()}"
            words = problem["msg"].lower()
            print(f"error: environment variable {variable}: {words}", file=sys.stderr)  # noqa: T201
        print(  # noqa: T201
            "hint: `headway up` brings stores of its own; for yours set DATABASE_URL, NATS_URL and"
            " HEADWAY_PEPPER",
            file=sys.stderr,
        )
        return 2
    except ConfigurationError as error:
        print(str(error), file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
