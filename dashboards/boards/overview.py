"""One screen for the question whether Headway does what it is for, and what stands in the way."""

from typing import Final

from dashboards.board import (
    FULL_IS_BAD,
    LOW_IS_BAD,
    MODEL,
    ONE_OR_ZERO,
    UP_OR_DOWN,
    Board,
    Kind,
    Panel,
    Query,
    Row,
    Unit,
)

BOARD: Final = Board(
    uid="headway-overview",
    title="Headway / Overview",
    description=(
        "Cost per successful task, who is served how well, and what is short. Begin here."
    ),
    variables=(MODEL,),
    rows=(
        Row(
            title="What comes of it",
            panels=(
                Panel(
                    title="What does a successful task cost?",
                    description=(
                        "Dollars of the whole fleet over workflows that succeeded, in the"
                        " last hour (CPST). Worry when it doubles against the day before: the"
                        " fleet is too large, or work is paid for and thrown away."
                    ),
                    unit=Unit.USD,
                    kind=Kind.NUMBER,
                    width=5,
                    queries=(Query(expr="headway:cost_per_successful_task_usd:1h"),),
                ),
                Panel(
                    title="How many tasks succeed per dollar charged?",
                    description=(
                        "Workflows that succeeded over what all workflows were charged, in"
                        " the last hour. Worry when it falls: the dashboard Workflow tells"
                        " what the dollars went to."
                    ),
                    unit=Unit.NUMBER,
                    kind=Kind.NUMBER,
                    width=5,
                    queries=(Query(expr="headway:successful_tasks_per_usd:1h"),),
                ),
                Panel(
                    title="Which share of workflows succeeds?",
                    description=(
                        "Workflow goodput: of those that ended in the last hour and were not"
                        " cancelled. The objective is 95 %; the alerts HeadwayGoodputBurns…"
                        " fire when the budget below it is spent too fast."
                    ),
                    unit=Unit.RATIO,
                    kind=Kind.NUMBER,
                    width=5,
                    palette=LOW_IS_BAD,
                    queries=(Query(expr="1 - headway:workflow_failure_ratio:1h"),),
                ),
                Panel(
                    title="How full is the fullest model?",
                    description=(
                        "Used over usable seats. Above 95 % first steps wait or are refused:"
                        " Admission tells who, Fleet which engines are missing."
                    ),
                    unit=Unit.RATIO,
                    kind=Kind.NUMBER,
                    width=4,
                    palette=FULL_IS_BAD,
                    queries=(Query(expr='max(headway_pool_saturation_ratio{model=~"$model"})'),),
                ),
                Panel(
                    title="Do all parts answer?",
                    description=(
                        "PostgreSQL and NATS as every replica sees them, and whether one"
                        " replica leads. Any `no` has an alert with a runbook."
                    ),
                    unit=Unit.NUMBER,
                    kind=Kind.NUMBER,
                    width=5,
                    palette=UP_OR_DOWN,
                    values=ONE_OR_ZERO,
                    queries=(
                        Query(expr="min(headway_postgres_reachable)", legend="PostgreSQL"),
                        Query(expr="min(headway_nats_connected)", legend="NATS"),
                        Query(expr="sum(headway_leader)", legend="leader"),
                    ),
                ),
            ),
        ),
        Row(
            title="For whom",
            panels=(
                Panel(
                    title="How do workflows end?",
                    description=(
                        "Ended workflows a second. `failed` is the tenant's own word,"
                        " `expired` the deadline's: worry when that grows, for the work before"
                        " it was paid for."
                    ),
                    unit=Unit.PER_SECOND,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "sum by (state)"
                                " (rate(headway_workflows_ended_total[$__rate_interval]))"
                            ),
                            legend="{{state}}",
                        ),
                    ),
                ),
                Panel(
                    title="Which share of calls keeps its targets?",
                    description=(
                        "By SLO class: ended calls that met TTFT, TPOT and deadline, over"
                        " all; refusals for load count as missed. Worry below 95 %: Request"
                        " path tells which target is missed."
                    ),
                    unit=Unit.RATIO,
                    palette=LOW_IS_BAD,
                    most=1.0,
                    queries=(
                        Query(expr="headway:slo_attainment_ratio:5m", legend="{{slo_class}}"),
                    ),
                ),
                Panel(
                    title="Who spends how much an hour?",
                    description=(
                        "Dollars charged, of the tenants that spend most; the rest is"
                        " `other`. Worry about a jump that its tenant does not expect:"
                        " `headway tenants list`, `headway budgets show`."
                    ),
                    unit=Unit.USD,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "3600 * sum by (tenant)"
                                " (rate(headway_tenant_spent_usd_total[$__rate_interval]))"
                            ),
                            legend="{{tenant}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="At what price",
            panels=(
                Panel(
                    title="What does the fleet cost an hour, and what is charged?",
                    description=(
                        "GPUs of the nodes that are heard, and what tenants are charged. A"
                        " fleet that costs more than it earns for hours is too large: `headway"
                        " plan show`."
                    ),
                    unit=Unit.USD,
                    queries=(
                        Query(
                            expr=(
                                "3600 * sum(rate(headway_fleet_cost_usd_total[$__rate_interval]))"
                            ),
                            legend="fleet",
                        ),
                        Query(
                            expr="3600 * sum(rate(headway_settled_usd_total[$__rate_interval]))",
                            legend="charged",
                        ),
                    ),
                ),
                Panel(
                    title="What is paid for in vain, and why?",
                    description=(
                        "Dollars an hour charged to workflows and calls that did not succeed."
                        " Worry when it passes a fifth of what is charged; expired workflows"
                        " are the ones that Headway could have refused."
                    ),
                    unit=Unit.USD,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "3600 * sum by (cause)"
                                " (rate(headway_wasted_usd_total[$__rate_interval]))"
                            ),
                            legend="{{cause}}",
                        ),
                    ),
                ),
                Panel(
                    title="How full is each model?",
                    description=(
                        "Used over usable seats of its engines, the calls of all replicas. At"
                        " 100 % nothing more fits; `headway engines list` tells which engine"
                        " holds what."
                    ),
                    unit=Unit.RATIO,
                    palette=FULL_IS_BAD,
                    queries=(
                        Query(
                            expr=(
                                'max by (model) (headway_pool_saturation_ratio{model=~"$model"})'
                            ),
                            legend="{{model}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="What stands in the way",
            panels=(
                Panel(
                    title="What is refused, and why?",
                    description=(
                        "Refused calls a second. `shed_overload` and `queue_full` are load,"
                        " `no_capacity` and `warming` engines, `insufficient_quota` and"
                        " `rate_limited` limits. `headway explain REQUEST` tells what would"
                        " have let one in."
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                    kind=Kind.AREAS,
                    width=12,
                    queries=(
                        Query(
                            expr=(
                                "sum by (reason) (rate(headway_refusals_total[$__rate_interval]))"
                            ),
                            legend="{{reason}}",
                        ),
                    ),
                ),
                Panel(
                    title="Which alerts are pending or firing?",
                    description=(
                        "Each one's page in docs/runbooks says what it means, what tenants"
                        " feel, and what to do."
                    ),
                    unit=Unit.NUMBER,
                    kind=Kind.STATES,
                    width=12,
                    queries=(
                        Query(
                            expr=(
                                'max by (alertname, alertstate) (ALERTS{alertname=~"Headway.*"})'
                            ),
                            legend="{{alertname}} {{alertstate}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
