"""Exceptions: broken contracts and broken I/O only. Expected refusals are values.

HeadwayError
├── Refused            a refusal that crosses an async boundary of the shell, carrying its value
├── StateUnavailable   PostgreSQL can not be reached or asked in time
├── BusUnavailable     NATS can not be reached
├── KeyExists, KeyRevoked a key can not be made or replaced; never leave `api/`
├── UpstreamError      an engine can not be reached or breaks HTTP; never leaves `gateway/`
├── UnknownFieldError  a log line names a field that is not on the list of `telemetry/logging`
├── PreconditionFailed a change was asked for of a version that is no longer there
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


class PreconditionFailed(HeadwayError):
    """What is to be changed is not, or no longer, what its author saw. Nothing was changed."""
