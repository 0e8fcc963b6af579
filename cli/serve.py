"""`headway serve`: one control-plane replica."""

import typer


def serve() -> None:
    """Run one control-plane replica. Its settings come from the environment.

    DATABASE_URL, NATS_URL and HEADWAY_PEPPER must be set; `headway up` sets them for its own.
    """
    from controlplane.scheduler import compile as core

    if core.is_stale():
        # Python would run them in place of sources that say something else.
        core.remove()
    from controlplane.main import main

    raise typer.Exit(main())
