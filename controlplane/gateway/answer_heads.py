"""Header lines that tell a client what was decided about its call, on every answer to an accepted one whose
head was not sent while it waited.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from controlplane.runtime.call import Ticket

Lines = list[tuple[bytes, bytes]]

WARNING_CHARS_MAX: Final = 300


def id_lines(request_id: str) -> Lines:
    """The id under which the call is known to us, as SDKs look for it, and as `explain` takes it."""
    text = request_id.encode()
    return [(b"x-request-id", text), (b"x-headway-decision", text)]


def ticket_lines(ticket: "Ticket") -> Lines:
    """Ids, limits, warnings, the time in the queue when there was any, the model when it is another."""
    request_id = ticket.id.encode()
    lines = [(b"x-request-id", request_id), (b"x-headway-decision", request_id)]
    if ticket.rate_headers:
        lines += ticket.rate_headers
    if ticket.queue_ms:
        lines.append((b"x-headway-queue-ms", b"%d" % ticket.queue_ms))
    if ticket.model.name != ticket.call.model:
        lines.append((b"x-headway-model", header_text(ticket.model.name)))
    for warning in ticket.warnings:
        lines.append((b"x-headway-warning", header_text(warning)))
    return lines


def header_text(text: str) -> bytes:
    """Words as the value of a header: printable ASCII, the rest as question marks."""
    shown = "".join(
        character if character.isascii() and character.isprintable() else "?"
        for character in text[:WARNING_CHARS_MAX]
    )
    return shown.strip().encode("ascii")
