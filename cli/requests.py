"""`headway requests`: calls, where they ran, what they cost."""

from typing import Annotated

import typer

from cli import complete, tail
from cli.client import segment
from cli.operator import Session, with_session
from cli.output import cell, dollars, instant, table
from cli.paging import CursorOption, LimitOption, page_of, show_page

app = typer.Typer(no_args_is_help=True, help="Calls, where they ran, what they cost.")
app.command("tail")(tail.tail)


@app.command("list")
@with_session
def list_requests(
    session: Session,
    *,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only of this tenant.")] = None,
    state: Annotated[str | None, typer.Option("--state", help="Only in this state.")] = None,
    workflow: Annotated[
        str | None, typer.Option("--workflow", help="Only of this workflow.")
    ] = None,
    limit: LimitOption = 20,
    cursor: CursorOption = None,
) -> None:
    """List requests, newest first."""
    page = page_of(
        session, "requests", limit, cursor, tenant=tenant, state=state, workflow=workflow
    )
    show_page(
        session,
        page,
        table(
            ("REQUEST", "TENANT", ">PROMPT", ">OUT", ">TTFT MS", ">COST", "STATE"),
            (
                (
                    request["id"],
                    request["tenant_id"],
                    request["prompt_tokens"],
                    request["completion_tokens"],
                    request["ttft_ms"],
                    dollars(request["settled_micro_usd"]),
                    request["reason"] or request["state"],
                )
                for request in page["data"]
            ),
        ),
    )


@app.command("show")
@with_session
def show_request(
    session: Session,
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="Request id.", autocompletion=complete.requests)
    ],
) -> None:
    """Show one request with its attempts."""
    document = session.api.get(f"requests/{segment(request)}")
    attempts = document.get("attempts", [])
    nested = {"object", "attempts", "decisions"}
    session.out.show(
        document,
        table(
            ("FIELD", "VALUE"),
            (
                (name, instant(value) if name.endswith("_at") else cell(value))
                for name, value in document.items()
                if name not in nested
            ),
        ),
        table(
            (">TRY", "LEG", "ENGINE", "OUTCOME", "DETAIL"),
            (
                (
                    attempt["number"],
                    attempt["leg"],
                    attempt["engine_id"],
                    attempt["outcome"],
                    attempt["detail"],
                )
                for attempt in attempts
            ),
            title="\nattempts",
        ),
    )
