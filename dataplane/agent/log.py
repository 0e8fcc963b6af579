"""Events of the agent as JSON lines on stderr. No prompt and no secret ever reaches this."""

import logging
import sys
from datetime import UTC, datetime

import msgspec

_logger = logging.getLogger("headway.agent")


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def info(event: str, **fields: str | float | None) -> None:
    _logger.info(event, extra={"fields": fields})


def warning(event: str, **fields: str | float | None) -> None:
    _logger.warning(event, extra={"fields": fields})
