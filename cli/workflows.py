"""`headway workflows`: tasks of one or many calls."""

from typing import Annotated

import typer

from cli import complete
from cli.client import segment
from cli.operator import Session, with_change, with_session
from cli.output import cell, dollars, instant, table
from cli.paging import CursorOption, LimitOption, page_of, show_page
from cli.watch import YesOption, confirm

app = typer.Typer(no_args_is_help=True, help="Tasks of one or many calls.")

WorkflowArgument = Annotated[
    str,
    typer.Argument(metavar="WORKFLOW", help="Workflow id.", autocompletion=complete.workflows),
]


@app.command("list")
@with_session
def list_workflows(
    session: Session,
    *,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only of this tenant.")] = None,
    state: Annotated[str | None, typer.Option("--state", help="Only in this state.")] = None,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
) -> None:
    """List workflows, newest first."""
    page = page_of(session, "workflows", limit, cursor, tenant=tenant, state=state)
    show_page(
        session,
        page,
        table(
            ("WORKFLOW", "TENANT", "KIND", ">STEPS", ">SPENT", "STATE", "DEADLINE"),
            (
                (
                    workflow["id"],
                    workflow["tenant_id"],
                    workflow["kind"],
                    f"{workflow['steps_done']}/{workflow['steps_expected']}",
                    dollars(workflow["spent_micro_usd"]),
                    workflow["state"],
                    instant(workflow["deadline_at"]),
                )
                for workflow in page["data"]
            ),
        ),
    )


@app.command("show")
@with_session
def show_workflow(session: Session, workflow: WorkflowArgument) -> None:
    """Show one workflow."""
    document = session.api.get(f"workflows/{segment(workflow)}")
    session.out.show(
        document,
        table(
            ("FIELD", "VALUE"),
            ((name, cell(value)) for name, value in document.items() if name != "object"),
        ),
    )


@app.command("cancel")
@with_change
def cancel_workflow(
    session: Session, workflow: WorkflowArgument, *, is_sure: YesOption = False
) -> None:
    """End a running workflow: its further calls are refused."""
    confirm(session, f"what {workflow} has cost so far is lost", is_sure=is_sure)
    document = session.api.post(f"workflows/{segment(workflow)}/cancel")
    session.out.say(document, f"{workflow} is {document['state']}")
