"""Exceptions: broken contracts and broken I/O only. Expected refusals are values.

HeadwayError
├── Refused            a refusal that crosses an async boundary of the shell, carrying its value
├── StateUnavailable   PostgreSQL can not be reached or asked in time
├── BusUnavailable     NATS can not be reached
├── UpstreamError      an engine can not be reached or breaks HTTP; never leaves `gateway/`
├── UnknownFieldError  a log line names a field that is not on the list of `telemetry/logging`
└── ConfigurationError what an operator wrote can not be used; says where and what to do
"""

from controlplane.domain.decision import Refuse


class HeadwayError(Exception):
    """Root of the tree."""


class Refused(HeadwayError):
    def __init__(self, refusal: Refuse) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal


class StateUnavailable(HeadwayError):
    """PostgreSQL is away."""


class BusUnavailable(HeadwayError):
    """NATS is away."""


class ConfigurationError(HeadwayError):
    """Something that an operator wrote can not be used."""
