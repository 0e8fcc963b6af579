"""What one tenant gets and pays. Tenants that spend most are named, the others stand together as `other`."""

from typing import Final

from dashboards.board import FULL_IS_BAD, TENANT, Board, Kind, Panel, Query, Row, Unit

BOARD: Final = Board(
    uid="headway-tenant",
    title="Headway / Tenant",
    description="What tenants get and pay; the 20 that spend most by name.",
    variables=(TENANT,),
    rows=(
        Row(
            title="Money",
            panels=(
                Panel(
                    title="What does it spend an hour?",
                    description=(
                        "Dollars charged. Worry about a jump that the tenant does not expect:"
                        " a loop of its own, or a key in the wrong hands (`headway keys"
                        " list`)."
                    ),
                    unit=Unit.USD,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "3600 * sum by (tenant)"
                                ' (rate(headway_tenant_spent_usd_total{tenant=~"$tenant"}[$__rate_interval]))'
                            ),
                            legend="{{tenant}}",
                        ),
                    ),
                ),
                Panel(
                    title="How much of its budget is used?",
                    description=(
                        "Spent and held over the limit of the window that holds. At 100 % its"
                        " calls end with `insufficient_quota`: `headway budgets show"
                        " tenant:ID`, `headway budgets set`."
                    ),
                    unit=Unit.RATIO,
                    palette=FULL_IS_BAD,
                    queries=(
                        Query(
                            expr=(
                                "sum by (tenant) (max by (tenant, kind)"
                                ' (headway_tenant_budget_usd{tenant=~"$tenant",kind=~"spent|reserved"}))'
                                " / max by (tenant)"
                                ' (headway_tenant_budget_usd{tenant=~"$tenant",kind="limit"})'
                            ),
                            legend="{{tenant}}",
                        ),
                    ),
                ),
                Panel(
                    title="What does it have left?",
                    description=(
                        "Dollars of its budget that are neither spent nor held by a replica."
                    ),
                    unit=Unit.USD,
                    kind=Kind.BARS,
                    queries=(
                        Query(
                            expr=(
                                "max by (tenant)"
                                ' (headway_tenant_budget_usd{tenant=~"$tenant",kind="limit"})'
                                " - sum by (tenant) (max by (tenant, kind)"
                                ' (headway_tenant_budget_usd{tenant=~"$tenant",kind=~"spent|reserved"}))'
                            ),
                            legend="{{tenant}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Service",
            panels=(
                Panel(
                    title="How do its calls end?",
                    description=(
                        "Calls a second by how they ended. Worry when `failed` or `refused`"
                        " grow for one tenant alone: `headway requests list`, then `headway"
                        " explain REQUEST`."
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                    kind=Kind.AREAS,
                    width=12,
                    queries=(
                        Query(
                            expr=(
                                "sum by (tenant, outcome)"
                                ' (rate(headway_tenant_requests_total{tenant=~"$tenant"}[$__rate_interval]))'
                            ),
                            legend="{{tenant}} {{outcome}}",
                        ),
                    ),
                ),
                Panel(
                    title="Which share of its calls is refused?",
                    description=(
                        "Refused over all of its calls. A tenant that is refused more than"
                        " its class is over a limit of its own."
                    ),
                    unit=Unit.RATIO,
                    most=1.0,
                    width=12,
                    queries=(
                        Query(
                            expr=(
                                "sum by (tenant)"
                                " (rate(headway_tenant_requests_total"
                                '{tenant=~"$tenant",outcome="refused"}[$__rate_interval]))'
                                " / sum by (tenant)"
                                ' (rate(headway_tenant_requests_total{tenant=~"$tenant"}[$__rate_interval]))'
                            ),
                            legend="{{tenant}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
