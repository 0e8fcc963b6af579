"""What the shell offers when it completes ids: what the server knows, asked quickly, or nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx2
import typer

from cli.client import DATA_DIR
from cli.contexts import connection
from cli.failure import CommandFailure

# Whoever presses TAB does not wait longer than this.
ANSWER_S_MAX: Final = 1.0
OFFERED_MAX: Final = 200


def _names(path: str, member: str = "id", prefix: str = "") -> Callable[..., list[str]]:
    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        given = ctx.params
        try:
            found = connection(
                given.get("url"), given.get("key"), Path(given.get("data_dir") or DATA_DIR),
                given.get("context"),
            )  # fmt: skip
            response = httpx2.get(
                f"{found.url}/operator/v1/{path}",
                params={"limit": OFFERED_MAX},
                headers={"authorization": f"Bearer {found.key}"},
                timeout=ANSWER_S_MAX,
                trust_env=False,
            )
            entries = response.json()["data"]
        except (
            CommandFailure,
            httpx2.HTTPError,
            httpx2.InvalidURL,
            ValueError,
            KeyError,
            TypeError,
        ):
            # A completion that fails says nothing: the command will say what is wrong.
            return []
        names = (f"{prefix}{entry[member]}" for entry in entries)
        return [name for name in names if name.startswith(incomplete)]

    return complete


engines = _names("engines")
nodes = _names("nodes")
models = _names("models", "name")
tenants = _names("tenants")
keys = _names("keys")
workflows = _names("workflows")
requests = _names("requests")
commands = _names("commands")
budgets = _names("budgets")
breakers = _names("breakers", "target")


def requests_and_workflows(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids that can be explained."""
    if "plan".startswith(incomplete) and incomplete:
        return ["plan"]
    if incomplete.startswith("wf-"):
        return workflows(ctx, incomplete)
    return requests(ctx, incomplete)
