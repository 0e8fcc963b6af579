"""`headway keys`: keys of tenants and of operators."""

from typing import Annotated

import typer

from cli import complete
from cli.client import JsonObject, segment
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session, with_change, with_session
from cli.output import instant, table
from cli.paging import CursorOption, LimitOption, page_of, show_page
from cli.policy.compare import seconds_of
from cli.watch import YesOption, confirm

app = typer.Typer(no_args_is_help=True, help="Keys of tenants and of operators.")

KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="Key id.", autocompletion=complete.keys)
]
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
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", help="A key of this tenant.", autocompletion=complete.tenants),
    ] = None,
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
    if session.out.is_for_programs:
        session.out.document(document)
        return
    # The key alone goes to standard output, so that a script can take it from there.
    print(document["key"])
    typer.echo(f"{document['id']}: shown this once, keep it now", err=True)


@app.command("limit")
@with_change
def limit_key(
    session: Session,
    key_id: KeyArgument,
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


@app.command("rotate")
@with_change
def rotate_key(
    session: Session,
    key_id: KeyArgument,
    overlap: Annotated[
        str,
        typer.Option(
            "--overlap",
            metavar="TIME",
            help="How long the old key goes on working: 30m, 24h or 7d.",
        ),
    ] = "24h",
) -> None:
    """Replace a key by a new one with the same owner, limits and budgets, and print that, this once."""
    document = session.api.post(
        f"keys/{segment(key_id)}/rotate", {"overlap_s": seconds_of(overlap)}
    )
    if session.out.is_for_programs:
        session.out.document(document)
        return
    print(document["key"])
    until = instant(document["replaced_works_until"])
    typer.echo(
        f"{document['id']}: shown this once, keep it now; {key_id} works until {until}", err=True
    )


@app.command("revoke")
@with_change
def revoke_key(session: Session, key_id: KeyArgument, *, is_sure: YesOption = False) -> None:
    """Revoke a key. Replicas refuse it within two seconds."""
    confirm(session, f"whoever uses {key_id} is refused from now on", is_sure=is_sure)
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
