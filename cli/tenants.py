"""`headway tenants`: who may send requests, and how much they may spend."""

from typing import Annotated

import typer

from cli import complete
from cli.client import segment
from cli.money import micro_usd_given
from cli.operator import Session, with_change, with_session
from cli.output import dollars, table
from cli.paging import CursorOption, LimitOption, page_of, show_page
from cli.watch import YesOption, confirm

app = typer.Typer(no_args_is_help=True, help=__doc__.split(": ", 1)[1].capitalize())

TenantArgument = Annotated[
    str, typer.Argument(metavar="TENANT", help="Tenant id.", autocompletion=complete.tenants)
]


@app.command("list")
@with_session
def list_tenants(session: Session, limit: LimitOption = 50, cursor: CursorOption = None) -> None:
    """List tenants with their budgets."""
    page = page_of(session, "tenants", limit, cursor)
    show_page(
        session,
        page,
        table(
            ("TENANT", "CLASS", "SLO", ">BUDGET", ">SPENT", ">RESERVED", "STATE"),
            (
                (
                    tenant["id"],
                    tenant["tenant_class"],
                    tenant["slo_class"],
                    dollars(tenant["limit_micro_usd"]),
                    dollars(tenant["spent_micro_usd"]),
                    dollars(tenant["reserved_micro_usd"]),
                    "disabled" if tenant["is_disabled"] else "active",
                )
                for tenant in page["data"]
            ),
        ),
    )


@app.command("create")
@with_change
def create_tenant(
    session: Session,
    *,
    tenant: TenantArgument,
    tenant_class: Annotated[str, typer.Option("--class", help="Class of the policy bundle.")],
    slo_class: Annotated[str, typer.Option("--slo", help="SLO class.")],
    budget_usd: Annotated[float, typer.Option("--budget", help="Most it may spend, in dollars.")],
    name: Annotated[str | None, typer.Option(help="Name for people; the id when left out.")] = None,
) -> None:
    """Create a tenant."""
    micro_usd_given(budget_usd)
    document = session.api.post(
        "tenants",
        {
            "id": tenant,
            "name": name or tenant,
            "tenant_class": tenant_class,
            "slo_class": slo_class,
            "budget_usd": budget_usd,
        },
    )
    session.out.say(
        document, f"created {tenant}; give it a key with `headway keys create --tenant {tenant}`"
    )


@app.command("budget")
@with_change
def set_budget(
    session: Session,
    tenant: TenantArgument,
    budget_usd: Annotated[float, typer.Argument(metavar="USD", help="Most it may ever spend.")],
) -> None:
    """Set what a tenant may spend in all. Never below what is spent and reserved."""
    asked = micro_usd_given(budget_usd)
    document = session.api.patch(f"tenants/{segment(tenant)}", {"budget_usd": budget_usd})
    limit = document["limit_micro_usd"]
    sentence = f"{tenant} may spend {dollars(limit)}"
    if limit > asked:
        sentence += ": that much is already spent or reserved"
    session.out.say(document, sentence)


@app.command("disable")
@with_change
def disable_tenant(session: Session, tenant: TenantArgument, *, is_sure: YesOption = False) -> None:
    """Refuse every further request of a tenant. Running ones finish."""
    confirm(session, f"every call of {tenant} is refused from now on", is_sure=is_sure)
    document = session.api.patch(f"tenants/{segment(tenant)}", {"is_disabled": True})
    session.out.say(document, f"{tenant} is disabled")


@app.command("enable")
@with_change
def enable_tenant(session: Session, tenant: TenantArgument) -> None:
    """Let a disabled tenant in again."""
    document = session.api.patch(f"tenants/{segment(tenant)}", {"is_disabled": False})
    session.out.say(document, f"{tenant} is active")
