"""Faults that an engine can be told to have, for tests of whoever depends on it."""

from enum import StrEnum

import msgspec

from dataplane.engines.simulated.options import SimulatedOptions


class Death(StrEnum):
    """How all streams of an engine end at once, and what becomes of calls that come later.

    ERROR is an error event and `[DONE]`, as when the core process dies. ABORT is a last token with the
    finish reason `abort`, as at the end of a shutdown; later calls get an empty answer of that kind. DONE
    is `[DONE]` and nothing else, EOF a clean end without it, RESET a broken connection, SILENT nothing
    any more on the open connections of answers that have begun. In all but one case later calls are hung
    up on.
    """

    NONE = ""
    ERROR = "error"
    ABORT = "abort"
    DONE = "done"
    EOF = "eof"
    RESET = "reset"
    SILENT = "silent"


class Faults(msgspec.Struct, forbid_unknown_fields=True):
    """All at once possible. Counts are in tokens of one request, 0 is never; the rate is a share
    of requests.

    `cut_after_tokens` closes the connection, `error_after_tokens` sends an error event in a stream,
    `drop_before_first_byte` closes it without an answer, `hang` stops the batching loop, `refuse`
    answers 503, `slow_factor` stretches every step. Of prompts that are held
    for another engine: `kv_withheld` does not tell where, `kv_finish_reason` says how they ended,
    `kv_unreachable` lets who fetches them wait. The engine dies of `death` when it has generated
    `death_after_tokens` more in all, and comes back when it is told of other faults. Of the next messages
    of KV events so many are `kv_events_dropped`, which can be replayed, or `kv_events_lost`, which can not.
    """

    error_rate: float = 0.0
    drop_before_first_byte: bool = False
    cut_after_tokens: int = 0
    error_after_tokens: int = 0
    hang: bool = False
    refuse: bool = False
    slow_factor: float = 1.0
    kv_withheld: bool = False
    kv_finish_reason: str = ""
    kv_unreachable: bool = False
    death: Death = Death.NONE
    death_after_tokens: int = 0
    kv_events_dropped: int = 0
    kv_events_lost: int = 0


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
