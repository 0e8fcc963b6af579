"""Workflows from their start to their end: how many, how long, what they cost, and what was paid for in vain."""

from typing import Final

from dashboards.board import LOW_IS_BAD, SCOPE, TENANT_CLASS, Board, Kind, Panel, Query, Row, Unit

BOARD: Final = Board(
    uid="headway-workflow",
    title="Headway / Workflow",
    description="Tasks of many calls: whether they end well, and what that takes.",
    variables=(SCOPE, TENANT_CLASS),
    rows=(
        Row(
            title="How they end",
            panels=(
                Panel(
                    title="How many workflows are under way?",
                    description=(
                        "By scope, on all replicas. Worry when it only rises: workflows that"
                        " nobody ends hold their promised seats until their deadline. `headway"
                        " workflows list`."
                    ),
                    unit=Unit.COUNT,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr='sum by (scope) (headway_workflows_running{scope=~"$scope"})',
                            legend="{{scope}}",
                        ),
                    ),
                ),
                Panel(
                    title="How do workflows of each scope end?",
                    description=(
                        "Ended workflows a second. `expired` ones were let in and did not"
                        " make it: worry when they outgrow a twentieth."
                    ),
                    unit=Unit.PER_SECOND,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "sum by (scope, state)"
                                " (rate(headway_workflows_ended_total"
                                '{scope=~"$scope",tenant_class=~"$tenant_class"}[$__rate_interval]))'
                            ),
                            legend="{{scope}} {{state}}",
                        ),
                    ),
                ),
                Panel(
                    title="Which tenant classes succeed?",
                    description=(
                        "Share of ended workflows, without cancelled ones, that succeeded."
                        " Under load the lowest class should suffer first, at the door and not"
                        " in the middle."
                    ),
                    unit=Unit.RATIO,
                    palette=LOW_IS_BAD,
                    most=1.0,
                    queries=(
                        Query(
                            expr=(
                                "sum by (tenant_class)"
                                " (rate(headway_workflows_ended_total"
                                '{state="succeeded",scope=~"$scope",tenant_class=~"$tenant_class"}[$__rate_interval]))'
                                " / sum by (tenant_class)"
                                " (rate(headway_workflows_ended_total"
                                '{state!="cancelled",scope=~"$scope",tenant_class=~"$tenant_class"}[$__rate_interval]))'
                            ),
                            legend="{{tenant_class}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="What one takes",
            panels=(
                Panel(
                    title="How long do workflows last?",
                    description=(
                        "Median and nine in ten of those that succeeded, by scope. Worry when"
                        " nine in ten comes near the deadlines that tenants give."
                    ),
                    unit=Unit.SECONDS,
                    queries=(
                        Query(
                            expr=(
                                "histogram_quantile(0.5, sum by (le, scope)"
                                " (rate(headway_workflow_duration_seconds_bucket"
                                '{state="succeeded",scope=~"$scope"}[$__rate_interval])))'
                            ),
                            legend="{{scope}} median",
                        ),
                        Query(
                            expr=(
                                "histogram_quantile(0.9, sum by (le, scope)"
                                " (rate(headway_workflow_duration_seconds_bucket"
                                '{state="succeeded",scope=~"$scope"}[$__rate_interval])))'
                            ),
                            legend="{{scope}} nine in ten",
                        ),
                    ),
                ),
                Panel(
                    title="What does one workflow cost?",
                    description=(
                        "Nine in ten were charged at most this, by scope and how they ended."
                        " Those that do not succeed should cost less than those that do: they"
                        " should be ended early."
                    ),
                    unit=Unit.USD,
                    queries=(
                        Query(
                            expr=(
                                "histogram_quantile(0.9, sum by (le, scope, state)"
                                ' (rate(headway_workflow_cost_usd_bucket{scope=~"$scope"}[$__rate_interval])))'
                            ),
                            legend="{{scope}} {{state}}",
                        ),
                    ),
                ),
                Panel(
                    title="How many steps do workflows do?",
                    description=(
                        "Nine in ten did at most so many steps, by scope and how they ended."
                        " A sudden rise is an agent in a loop: its scope's limit of steps ends"
                        " it."
                    ),
                    unit=Unit.COUNT,
                    queries=(
                        Query(
                            expr=(
                                "histogram_quantile(0.9, sum by (le, scope, state)"
                                ' (rate(headway_workflow_steps_bucket{scope=~"$scope"}[$__rate_interval])))'
                            ),
                            legend="{{scope}} {{state}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="What was paid for in vain",
            panels=(
                Panel(
                    title="What do workflows cost an hour, by how they end?",
                    description=(
                        "Dollars that ended workflows were charged, an hour. What did not"
                        " succeed is waste, whoever is to blame."
                    ),
                    unit=Unit.USD,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "3600 * sum by (state)"
                                " (rate(headway_workflow_spent_usd_total"
                                '{scope=~"$scope",tenant_class=~"$tenant_class"}[$__rate_interval]))'
                            ),
                            legend="{{state}}",
                        ),
                    ),
                ),
                Panel(
                    title="Which share of dollars is wasted?",
                    description=(
                        "Dollars charged in vain over all that was charged, in the last hour."
                        " The alert HeadwayDollarsWasted fires above a fifth."
                    ),
                    unit=Unit.RATIO,
                    queries=(Query(expr="headway:wasted_usd_ratio:1h", legend="wasted"),),
                ),
                Panel(
                    title="How many were killed late?",
                    description=(
                        "Workflows an hour that expired or were cancelled after half of their"
                        " steps had been paid for. Worry about any trend: admission let in"
                        " what could not end in time."
                    ),
                    unit=Unit.COUNT,
                    queries=(
                        Query(
                            expr=(
                                "sum by (scope, state)"
                                ' (increase(headway_workflow_late_kills_total{scope=~"$scope"}[1h]))'
                            ),
                            legend="{{scope}} {{state}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="What is promised",
            panels=(
                Panel(
                    title="How many seats are promised to workflows?",
                    description=(
                        "Seats that the workflows which were let in need to end in time, and"
                        " workflows that were told when to come back. Worry when promises stay"
                        " above the seats that Fleet shows."
                    ),
                    unit=Unit.COUNT,
                    width=12,
                    queries=(
                        Query(
                            expr="sum by (model) (headway_pool_seats_promised)",
                            legend="{{model}} seats",
                        ),
                        Query(
                            expr="sum by (model) (headway_pool_appointments)",
                            legend="{{model}} appointments",
                        ),
                    ),
                ),
                Panel(
                    title="How much more is asked for than can be done?",
                    description=(
                        "Work that is asked for over what each pool can do in that time; 0"
                        " before that is known. Above 1 somebody is refused: Admission tells"
                        " at what price."
                    ),
                    unit=Unit.RATIO,
                    width=12,
                    queries=(
                        Query(expr="max by (model) (headway_pool_load_ratio)", legend="{{model}}"),
                    ),
                ),
            ),
        ),
    ),
)
