"""What no schema can say, for schemathesis: cursors come from answers, models have names, nobody ends its own key."""

import os
from typing import Any

import schemathesis

MODEL = "small"


@schemathesis.hook
def before_call(_: Any, case: Any, **__: Any) -> None:
    """Make of what could be a cursor or a model one that there is, and never end the key that asks."""
    if (case.path_parameters or {}).get("key_id") == os.environ["OWN_KEY_ID"]:
        case.path_parameters["key_id"] = "nosuchkey"
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if case.query:
        case.query.pop("cursor", None)
    body = case.body
    if isinstance(body, dict) and "model" in body and {"messages", "prompt", "node_id"} & set(body):
        body["model"] = MODEL
