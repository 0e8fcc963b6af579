"""`headway apply`: declares regions, GPU types, models, classes, tenants and nodes from a YAML
file.
"""

from pathlib import Path
from typing import Annotated

import typer

from cli.operator import Session, with_change


@with_change
def apply(
    session: Session,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Cluster document, YAML.")],
) -> None:
    """Declare what a cluster document says. What it does not name stays as it is."""
    from cli.documents import read_cluster

    document = session.api.post("cluster", read_cluster(file).model_dump(mode="json"))
    counts = ", ".join(
        f"{count} {name.replace('_', ' ')}"
        for name, count in document.items()
        if isinstance(count, int) and name != "revision"
    )
    session.out.say(document, f"applied {counts}; catalogue revision {document['revision']}")
