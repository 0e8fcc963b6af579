"""Exit codes, and the one exception that ends a command with words for a person."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What scripts may rely on."""

    OK = 0
    FAILED = 1  # refused by the server, or done and found wanting
    USAGE = 2  # the command line, a file or the environment is wrong
    UNREACHABLE = 3  # no answer from the server


class CommandFailure(Exception):
    """Ends the command. `message` says what is wrong, `remedy` what to do about it; `reason` is the code that
    the server gave, empty where it did not answer.
    """

    def __init__(self, code: ExitCode, message: str, remedy: str = "", *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.code = code
        self.message = message
        self.remedy = remedy
