"""How fast and how well calls are placed: decisions, axes, predictions, the plan and its prices."""

from typing import Final

from dashboards.board import MODEL, Board, Kind, Panel, Query, Row, Unit

BOARD: Final = Board(
    uid="headway-scheduler",
    title="Headway / Scheduler",
    description="Time and quality of decisions, what they weigh, and what the planner wants.",
    variables=(MODEL,),
    rows=(
        Row(
            title="Deciding",
            panels=(
                Panel(
                    title="How long does one decision take?",
                    description=(
                        "The fast path: median and 99th percentile of one call's decision"
                        " over the fleet. Tens of microseconds at a hundred engines; worry"
                        " above 5 ms, for the request path waits for it."
                    ),
                    unit=Unit.SECONDS,
                    queries=(
                        Query(
                            expr=(
                                "histogram_quantile(0.5, sum by (le)"
                                " (rate(headway_decision_duration_seconds_bucket[$__rate_interval])))"
                            ),
                            legend="median",
                        ),
                        Query(
                            expr=(
                                "histogram_quantile(0.99, sum by (le)"
                                " (rate(headway_decision_duration_seconds_bucket[$__rate_interval])))"
                            ),
                            legend="99th percentile",
                        ),
                    ),
                ),
                Panel(
                    title="How long does one pass over the queue take?",
                    description=(
                        "The batch: waiting calls weighed together, and offered what is free."
                        " Only while calls wait. Worry above 10 ms: nothing else of the"
                        " replica runs meanwhile."
                    ),
                    unit=Unit.SECONDS,
                    queries=(
                        Query(
                            expr=(
                                "histogram_quantile(0.5, sum by (le)"
                                " (rate(headway_dispatch_duration_seconds_bucket[$__rate_interval])))"
                            ),
                            legend="median",
                        ),
                        Query(
                            expr=(
                                "histogram_quantile(0.99, sum by (le)"
                                " (rate(headway_dispatch_duration_seconds_bucket[$__rate_interval])))"
                            ),
                            legend="99th percentile",
                        ),
                    ),
                ),
                Panel(
                    title="Does weighing calls together pay?",
                    description=(
                        "Batches a second by whether they were better than one call after the"
                        " other. Never better is no fault: it means that calls do not compete"
                        " for the same engines."
                    ),
                    unit=Unit.PER_SECOND,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "sum by (result) (rate(headway_batches_total[$__rate_interval]))"
                            ),
                            legend="{{result}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="What decides",
            panels=(
                Panel(
                    title="What does a placement cost, axis by axis?",
                    description=(
                        "Mean dollars of each axis over the latest explained placements;"
                        " below 0 it speaks for the engine that was taken. One axis that"
                        " dwarfs the others decides alone: `headway explain REQUEST` shows the"
                        " rivals."
                    ),
                    unit=Unit.USD,
                    kind=Kind.BARS,
                    queries=(
                        Query(expr="avg by (axis) (headway_axis_cost_usd)", legend="{{axis}}"),
                    ),
                ),
                Panel(
                    title="What keeps engines out?",
                    description=(
                        "Engines that could not take a call, by the first axis that objected."
                        " `kv_headroom` is a full fleet, `weight_warmth` a cold one,"
                        " `gpu_type` a policy or a model that does not fit."
                    ),
                    unit=Unit.PER_SECOND,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "sum by (axis)"
                                " (rate(headway_axis_objections_total[$__rate_interval]))"
                            ),
                            legend="{{axis}}",
                        ),
                    ),
                ),
                Panel(
                    title="Is the first token foretold well?",
                    description=(
                        "Median time from placement to first token: as it was predicted, as"
                        " it was, and how far the two lie apart. Worry when the error stays"
                        " above half of the actual: placements rest on it."
                    ),
                    unit=Unit.SECONDS,
                    is_latency=True,
                    queries=(
                        Query(
                            expr=(
                                "histogram_quantile(0.5, sum by (le, kind)"
                                ' (rate(headway_placement_ttft_seconds_bucket{model=~"$model"}[$__rate_interval])))'
                            ),
                            legend="{{kind}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="Prefix caches",
            panels=(
                Panel(
                    title="Which share of prompts is cached, and is that foretold?",
                    description=(
                        "Prompt tokens that engines found in their caches, those that were"
                        " predicted, and the error. Worry when the error passes a fifth: KV"
                        " events are lost, or engines evict what others think they hold."
                    ),
                    unit=Unit.RATIO,
                    queries=(
                        Query(
                            expr=(
                                "sum by (kind)"
                                " (rate(headway_prefix_tokens_total"
                                '{kind=~"predicted|actual|error",model=~"$model"}[$__rate_interval]))'
                                " / ignoring(kind) group_left"
                                " sum(rate(headway_prefix_tokens_total"
                                '{kind="prompt",model=~"$model"}[$__rate_interval]))'
                            ),
                            legend="{{kind}}",
                        ),
                    ),
                ),
                Panel(
                    title="How old is what is known of engines' caches?",
                    description=(
                        "From an engine's event to when it is decided by, 99th percentile."
                        " Worry above a second: the prediction of cached tokens is behind."
                    ),
                    unit=Unit.SECONDS,
                    queries=(
                        Query(
                            expr=(
                                "histogram_quantile(0.99, sum by (le)"
                                " (rate(headway_kv_lag_seconds_bucket[$__rate_interval])))"
                            ),
                            legend="99th percentile",
                        ),
                    ),
                ),
                Panel(
                    title="Are reports of caches lost or refused?",
                    description=(
                        "Reports of prefix caches a second, by what became of them. Anything"
                        " but `applied` for long means that a replica and an agent do not"
                        " agree on what was said: the alert HeadwayKvGaps has the page."
                    ),
                    unit=Unit.PER_SECOND,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "sum by (result) (rate(headway_kv_batches_total[$__rate_interval]))"
                            ),
                            legend="{{result}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="The plan",
            panels=(
                Panel(
                    title="How old is the plan, and how long did it take?",
                    description=(
                        "Time since the leader last made a plan (every ten seconds), and the"
                        " solver's time for it. Worry above two minutes: desired engines and"
                        " prices are those of then."
                    ),
                    unit=Unit.SECONDS,
                    queries=(
                        Query(expr="min(headway_plan_age_seconds)", legend="age"),
                        Query(expr="max(headway_plan_solve_seconds)", legend="solver"),
                    ),
                ),
                Panel(
                    title="How far may the plan lie above the best one?",
                    description=(
                        "By the solver's own bound. A few percent are normal; worry when it"
                        " stays above 20 %: raise HEADWAY_PLANNER_SOLVE_S_MAX."
                    ),
                    unit=Unit.RATIO,
                    queries=(Query(expr="max(headway_plan_gap_ratio)", legend="gap"),),
                ),
                Panel(
                    title="What would one more GPU second save?",
                    description=(
                        "Shadow prices of the plan beyond the rent, by pool. Above 0 for"
                        " long: that pool is too small, and `headway plan procure` says what"
                        " to buy."
                    ),
                    unit=Unit.USD,
                    queries=(
                        Query(
                            expr=(
                                "max by (model, gpu_type, role, region)"
                                ' (headway_pool_gpu_shadow_price_usd_per_second{model=~"$model"})'
                            ),
                            legend="{{model}} {{role}} on {{gpu_type}} in {{region}}",
                        ),
                    ),
                ),
                Panel(
                    title="What would one more KV token-second save?",
                    description=(
                        "The same for KV: above 0, memory is what is short there, and not"
                        " arithmetic."
                    ),
                    unit=Unit.USD,
                    width=12,
                    queries=(
                        Query(
                            expr=(
                                "max by (model, gpu_type, role, region)"
                                ' (headway_pool_kv_shadow_price_usd_per_token_second{model=~"$model"})'
                            ),
                            legend="{{model}} {{role}} on {{gpu_type}} in {{region}}",
                        ),
                    ),
                ),
                Panel(
                    title="What must a workflow be worth to take its place?",
                    description=(
                        "Value that one workflow of a class displaces, by the plan. Below it,"
                        " it is worth less than what it keeps away; the classes with the"
                        " highest prices are the dearest to serve."
                    ),
                    unit=Unit.USD,
                    width=12,
                    queries=(
                        Query(
                            expr="topk(10, max by (class_id) (headway_class_bid_price_usd))",
                            legend="{{class_id}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
