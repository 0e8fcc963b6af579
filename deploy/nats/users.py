"""Prints the users of a NATS server for Headway: the control plane, and one for each node named.

Each node's agent may touch its own subjects alone, with the permissions that `headway up` gives. A password is
made on first use and kept, one file a user, in FOLDER/passwords; later runs use it again.
"""
# A script, and no part of a package.
# ruff: noqa: INP001

import argparse
import json
import sys
from pathlib import Path

from controlplane.domain.errors import ConfigurationError
from controlplane.embedded.nats import agent_user, control_user, user_entry


def users_conf(folder: Path, nodes: list[str]) -> str:
    """The `authorization` block, whose JSON nats-server reads as its own format.

    Raises ConfigurationError on a node id that can not be one token of a subject.
    """
    users = [control_user(folder), *(agent_user(folder, node) for node in nodes)]
    entries = [user_entry(user) for user in users]
    return f"authorization: {json.dumps({'users': entries}, indent=2)}\n"


def main() -> int:
    """Exit code 0, or 2 when a node id can not be used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the folder `passwords` is, or is made"
    )
    parser.add_argument("nodes", nargs="*", metavar="NODE", help="ids of declared nodes")
    given = parser.parse_args()
    try:
        sys.stdout.write(users_conf(given.folder, given.nodes))
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
