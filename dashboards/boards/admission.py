"""Who is let in, who waits, who is refused and why; money, retries, breakers, and the policy on trial."""

from typing import Final

from dashboards.board import (
    ANY_IS_BAD,
    BREAKER_STATES,
    MODEL,
    TENANT_CLASS,
    Board,
    Kind,
    Panel,
    Query,
    Row,
    Unit,
)

BOARD: Final = Board(
    uid="headway-admission",
    title="Headway / Admission",
    description="Admit, queue or refuse: for whom, why, and what would change it.",
    variables=(MODEL, TENANT_CLASS),
    rows=(
        Row(
            title="The decision",
            panels=(
                Panel(
                    title="How are calls decided?",
                    description=(
                        "Decisions a second by verdict; a call that waited is decided again"
                        " when it is placed. Worry when `queue` or `refuse` outgrow `admit`."
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                    queries=(
                        Query(
                            expr=(
                                "sum by (verdict)"
                                " (rate(headway_admissions_total[$__rate_interval]))"
                            ),
                            legend="{{verdict}}",
                        ),
                    ),
                ),
                Panel(
                    title="Why is work refused, and to which class?",
                    description=(
                        "Refusals a second by reason and tenant class. Load must refuse the"
                        " lowest class first: gold that is shed while bronze is served is a"
                        " policy mistake."
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "sum by (reason, tenant_class)"
                                ' (rate(headway_refusals_total{tenant_class=~"$tenant_class"}[$__rate_interval]))'
                            ),
                            legend="{{reason}} {{tenant_class}}",
                        ),
                    ),
                ),
                Panel(
                    title="Whose calls are refused?",
                    description=(
                        "Refusals a second by tenant, of those that spend most. One tenant"
                        " alone is its own limit or mistake: `headway tenants list`, `headway"
                        " requests list`."
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "sum by (tenant)"
                                ' (rate(headway_tenant_requests_total{outcome="refused"}[$__rate_interval]))'
                            ),
                            legend="{{tenant}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Waiting",
            panels=(
                Panel(
                    title="How long do nine in ten wait, against their target?",
                    description=(
                        "90th percentile of the queueing of placed calls by class, and the"
                        " TTFT targets of the SLO classes. A wait above its class's target is"
                        " a promise broken before any engine was asked."
                    ),
                    unit=Unit.SECONDS,
                    is_latency=True,
                    queries=(
                        Query(
                            expr=(
                                "histogram_quantile(0.9, sum by (le, tenant_class)"
                                " (rate(headway_queue_duration_seconds_bucket"
                                '{model=~"$model",tenant_class=~"$tenant_class"}[$__rate_interval])))'
                            ),
                            legend="{{tenant_class}}",
                        ),
                        Query(
                            expr='max by (slo_class) (headway_slo_target_seconds{target="ttft"})',
                            legend="target {{slo_class}}",
                        ),
                    ),
                ),
                Panel(
                    title="How many calls wait?",
                    description=(
                        "Calls in the queue by model, over all replicas. It may rise in a"
                        " burst; worry when it stays, for then more comes than is served."
                    ),
                    unit=Unit.COUNT,
                    queries=(
                        Query(
                            expr='sum by (model) (headway_queue_depth{model=~"$model"})',
                            legend="{{model}}",
                        ),
                    ),
                ),
                Panel(
                    title="What must a second of work be worth to begin?",
                    description=(
                        "The price at the door, 0 while there is room. Above it stands who is"
                        " let in; workflows worth less are told that coming back does not"
                        " help. Worry when it stays above 0 for hours: buy or move capacity."
                    ),
                    unit=Unit.USD,
                    queries=(
                        Query(
                            expr=(
                                "max by (model)"
                                ' (headway_pool_price_usd_per_second{model=~"$model"})'
                            ),
                            legend="{{model}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Money and retries",
            panels=(
                Panel(
                    title="What is spent and held of all budgets?",
                    description=(
                        "Budgets of tenants: spent in the window that holds, held by replicas"
                        " in advance (reserved), and held for calls that run. Worry when"
                        " `reserved` stays while no call runs: a replica died with its slices."
                    ),
                    unit=Unit.USD,
                    queries=(
                        Query(
                            expr=(
                                "max by (kind)"
                                ' (headway_budget_usd{budget_scope="tenant",kind=~"spent|reserved"})'
                            ),
                            legend="{{kind}}",
                        ),
                        Query(expr="sum(headway_calls_reserved_usd)", legend="held for calls"),
                    ),
                ),
                Panel(
                    title="How many retries are left?",
                    description=(
                        "Of each model's budget in the window that holds, and tenants whose"
                        " own is spent. At 0 a failure of an engine reaches the client; look"
                        " at the breakers."
                    ),
                    unit=Unit.COUNT,
                    queries=(
                        Query(
                            expr='min by (model) (headway_pool_retries_left{model=~"$model"})',
                            legend="{{model}}",
                        ),
                        Query(
                            expr="sum(headway_tenants_without_retries)", legend="tenants without"
                        ),
                    ),
                ),
                Panel(
                    title="Are retries wanted, and allowed?",
                    description=(
                        "Retries after a failure before the first byte, a second. `denied`"
                        " means that budgets or engines did not allow one: the client saw the"
                        " failure."
                    ),
                    unit=Unit.PER_SECOND,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "sum by (verdict) (rate(headway_retries_total[$__rate_interval]))"
                            ),
                            legend="{{verdict}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Breakers and the policy on trial",
            panels=(
                Panel(
                    title="Which breakers are open?",
                    description=(
                        "The worst state on any replica, of engines and of models in regions."
                        " Open for minutes means that an engine fails each trial: `headway"
                        " breaker list`, then its log."
                    ),
                    unit=Unit.NUMBER,
                    kind=Kind.STATES,
                    width=12,
                    palette=ANY_IS_BAD,
                    values=BREAKER_STATES,
                    queries=(
                        Query(
                            expr=(
                                'max by (engine) (headway_engine_breaker_state{model=~"$model"})'
                            ),
                            legend="{{engine}}",
                        ),
                        Query(
                            expr=(
                                "max by (model, region)"
                                ' (headway_pool_breaker_state{model=~"$model"})'
                            ),
                            legend="{{model}} in {{region}}",
                        ),
                    ),
                ),
                Panel(
                    title="What would the candidate policy change?",
                    description=(
                        "Calls a second that the candidate rules as well, by what it would"
                        " change; `neither_denies` and `both_deny` are no difference. Without"
                        " a candidate nothing is drawn. Look at it before `headway policy"
                        " promote`."
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                    kind=Kind.AREAS,
                    width=12,
                    queries=(
                        Query(
                            expr=(
                                "sum by (change)"
                                " (rate(headway_policy_comparisons_total[$__rate_interval]))"
                            ),
                            legend="{{change}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
