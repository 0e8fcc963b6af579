"""Writes that a client may send again: what a call makes has an id that follows from its author and its key.

Whoever sends a call again finds what the first one made. Nothing else has to be remembered, so a key is good for
as long as the thing is there, on every replica and after every crash.
"""

from typing import Annotated, Final

from fastapi import Header, Response

from controlplane.domain.decision import Reason, Refuse
from controlplane.domain.errors import Refused

KEY_CHARACTERS_MAX: Final = 255

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=KEY_CHARACTERS_MAX,
        pattern=r"^[!-~]+$",
        description="A name of your own for this call. Sent again, it makes nothing anew.",
    ),
]


def show_replay(response: Response) -> None:
    """Tell the client that what it sees was made by an earlier call."""
    response.headers["x-headway-idempotent-replay"] = "true"


def mismatch(key: str, made: str) -> Refused:
    """The refusal of a call whose key belongs to another one, which made `made`."""
    return Refused(
        Refuse(
            Reason.IDEMPOTENCY_MISMATCH,
            f"the key `{key}` belongs to another call, which made `{made}`; take another key",
        )
    )
