"""Faults that an engine can be told to have, for tests of whoever depends on it."""

import msgspec

from dataplane.engines.simulated.options import SimulatedOptions


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """All at once possible. Counts are in tokens of one request, 0 is never; the rate is a share
    of requests.

    `cut_after_tokens` closes the connection, `error_after_tokens` sends an error event in a stream,
    `drop_before_first_byte` closes it without an answer, `hang` stops the batching loop, `refuse`
    answers 503, `slow_factor` stretches every step.
    """

    error_rate: float = 0.0
    drop_before_first_byte: bool = False
    cut_after_tokens: int = 0
    error_after_tokens: int = 0
    hang: bool = False
    refuse: bool = False
    slow_factor: float = 1.0


def initial_faults(options: SimulatedOptions) -> Faults:
    return Faults(
        error_rate=options.fault_error_rate,
        drop_before_first_byte=options.fault_drop_before_first_byte,
        cut_after_tokens=options.fault_cut_after_tokens,
        error_after_tokens=options.fault_error_after_tokens,
        hang=options.fault_hang,
        refuse=options.fault_refuse,
        slow_factor=options.fault_slow_factor,
    )


class ErrorRate:
    """Spreads a share of failures evenly over the requests, without randomness."""

    def __init__(self) -> None:
        self._owed = 0.0

    def strikes(self, rate: float) -> bool:
        self._owed += rate
        if self._owed >= 1.0:
            self._owed -= 1.0
            return True
        return False
