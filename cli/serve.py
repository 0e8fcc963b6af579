"""`headway serve`: one control-plane replica."""

import typer


def serve() -> None:
    """Run one control-plane replica. Its settings come from the environment.

    DATABASE_URL, NATS_URL and HEADWAY_PEPPER must be set; `headway up` sets them for its own.
    """
    from controlplane.main import main

    raise typer.Exit(main())
