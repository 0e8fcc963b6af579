"""Keeps a copy of an answer on its way to the client, up to a limit.

Used for calls whose answer may be given again; other calls never meet it.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

OK: Final = 200


class Recorder:
    """`send` passes on what it is given. `body` is what a client got, None when that was too much."""

    __slots__ = ("_bytes_left", "_pieces", "_send", "status")

    def __init__(self, send: Send, bytes_max: int) -> None:
        self._send = send
        self._bytes_left = bytes_max
        self._pieces: list[bytes] = []
        # A stream whose head went out while it waited has no other status.
        self.status = OK

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif self._bytes_left >= 0:
            piece: bytes = message["body"]
            self._bytes_left -= len(piece)
            if self._bytes_left >= 0:
                self._pieces.append(piece)
            else:
                self._pieces.clear()
        await self._send(message)

    @property
    def body(self) -> bytes | None:
        return None if self._bytes_left < 0 else b"".join(self._pieces)
