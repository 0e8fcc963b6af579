"""`headway keys`: keys of tenants and of operators."""

from typing import Annotated

import typer

from cli.client import JsonObject, segment
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session, with_change, with_session
from cli.output import instant, table
from cli.paging import CursorOption, LimitOption, page_of, show_page

app = typer.Typer(no_args_is_help=True, help="Keys of tenants and of operators.")

RpmOption = Annotated[int | None, typer.Option("--rpm", min=0, help="Requests a minute.")]
TpmOption = Annotated[int | None, typer.Option("--tpm", min=0, help="Tokens a minute.")]
ConcurrencyOption = Annotated[
    int | None, typer.Option("--concurrency", min=0, help="Calls in flight at once.")
]


@app.command("list")
@with_session
def list_keys(session: Session, limit: LimitOption = 50, cursor: CursorOption = None) -> None:
    """List keys. The keys themselves are stored nowhere."""
    page = page_of(session, "keys", limit, cursor)
    show_page(
        session,
        page,
        table(
            ("KEY", "OWNER", "NAME", "LIMITS", "CREATED", "REVOKED"),
            (
                (
                    key["id"],
                    key["tenant_id"] or f"operator ({key['operator_role']})",
                    key["name"],
                    _limits(key),
                    instant(key["created_at"]),
                    instant(key["revoked_at"]),
                )
                for key in page["data"]
            ),
        ),
    )


@app.command("create")
@with_change
def create_key(
    session: Session,
    tenant: Annotated[str | None, typer.Option("--tenant", help="A key of this tenant.")] = None,
    role: Annotated[
        str | None, typer.Option("--role", help="An operator key: viewer, operator or admin.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="What the key is for.")] = "cli",
    rpm: RpmOption = None,
    tpm: TpmOption = None,
    concurrency: ConcurrencyOption = None,
) -> None:
    """Create a key and print it, this once."""
    if (tenant is None) == (role is None):
        raise CommandFailure(
            ExitCode.USAGE, "a key belongs to a tenant or to an operator", "give --tenant or --role"
        )
    owner = {"tenant_id": tenant} if tenant else {"operator_role": role}
    document = session.api.post("keys", {"name": name, **owner, **_changes(rpm, tpm, concurrency)})
    if session.out.is_json:
        session.out.document(document)
        return
    # The key alone goes to standard output, so that a script can take it from there.
    print(document["key"])
    typer.echo(f"{document['id']}: shown this once, keep it now", err=True)


@app.command("limit")
@with_change
def limit_key(
    session: Session,
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="Key id.")],
    rpm: RpmOption = None,
    tpm: TpmOption = None,
    concurrency: ConcurrencyOption = None,
) -> None:
    """Set the limits of a tenant's key; 0 lifts one. `headway budgets` sets what it may spend."""
    changes = _changes(rpm, tpm, concurrency)
    if not changes:
        raise CommandFailure(
            ExitCode.USAGE, "there is no limit to set", "give --rpm, --tpm or --concurrency"
        )
    document = session.api.patch(f"keys/{segment(key_id)}", changes)
    session.out.say(document, f"{key_id}: {_limits(document) or 'no limits'}")


@app.command("revoke")
@with_change
def revoke_key(
    session: Session, key_id: Annotated[str, typer.Argument(metavar="KEY", help="Key id.")]
) -> None:
    """Revoke a key. Replicas refuse it within two seconds."""
    document = session.api.delete(f"keys/{segment(key_id)}")
    session.out.say(document, f"{key_id} is revoked")


def _changes(rpm: int | None, tpm: int | None, concurrency: int | None) -> JsonObject:
    """What was given, for the API: 0 is no limit there."""
    given = {
        "requests_per_minute": rpm,
        "tokens_per_minute": tpm,
        "calls_in_flight_max": concurrency,
    }
    return {name: value or None for name, value in given.items() if value is not None}


def _limits(key: JsonObject) -> str:
    words = (
        ("requests_per_minute", "requests/min"),
        ("tokens_per_minute", "tokens/min"),
        ("calls_in_flight_max", "at once"),
    )
    return ", ".join(f"{key[name]:,} {word}" for name, word in words if key[name] is not None)
