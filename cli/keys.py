"""`headway keys`: keys of tenants and of operators."""

from typing import Annotated

import typer

from cli.client import segment
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session, with_session
from cli.output import instant, table
from cli.paging import CursorOption, LimitOption, page_of, show_page

app = typer.Typer(no_args_is_help=True, help="Keys of tenants and of operators.")


@app.command("list")
@with_session
def list_keys(session: Session, limit: LimitOption = 50, cursor: CursorOption = None) -> None:
    """List keys. The keys themselves are stored nowhere."""
    page = page_of(session, "keys", limit, cursor)
    show_page(
        session,
        page,
        table(
            ("KEY", "OWNER", "NAME", "CREATED", "REVOKED"),
            (
                (
                    key["id"],
                    key["tenant_id"] or f"operator ({key['operator_role']})",
                    key["name"],
                    instant(key["created_at"]),
                    instant(key["revoked_at"]),
                )
                for key in page["data"]
            ),
        ),
    )


@app.command("create")
@with_session
def create_key(
    session: Session,
    tenant: Annotated[str | None, typer.Option("--tenant", help="A key of this tenant.")] = None,
    role: Annotated[
        str | None, typer.Option("--role", help="An operator key: viewer, operator or admin.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="What the key is for.")] = "cli",
) -> None:
    """Create a key and print it, this once."""
    if (tenant is None) == (role is None):
        raise CommandFailure(
            ExitCode.USAGE, "a key belongs to a tenant or to an operator", "give --tenant or --role"
        )
    owner = {"tenant_id": tenant} if tenant else {"operator_role": role}
    document = session.api.post("keys", {"name": name, **owner})
    if session.out.is_json:
        session.out.document(document)
        return
    # The key alone goes to standard output, so that a script can take it from there.
    print(document["key"])
    typer.echo(f"{document['id']}: shown this once, keep it now", err=True)


@app.command("revoke")
@with_session
def revoke_key(
    session: Session, key_id: Annotated[str, typer.Argument(metavar="KEY", help="Key id.")]
) -> None:
    """Revoke a key. Replicas refuse it within two seconds."""
    document = session.api.delete(f"keys/{segment(key_id)}")
    session.out.say(document, f"{key_id} is revoked")
