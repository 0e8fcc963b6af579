"""Nodes, engines and GPUs: what is there, how full and how warm it is, what moves, and what bounds it."""

from typing import Final

from dashboards.board import FULL_IS_BAD, MODEL, REGION, Board, Kind, Panel, Query, Row, Unit

_OF: Final = 'model=~"$model",region=~"$region"'

BOARD: Final = Board(
    uid="headway-fleet",
    title="Headway / Fleet",
    description="What is there, how full and how warm it is, and what bounds it.",
    variables=(MODEL, REGION),
    rows=(
        Row(
            title="What is there",
            panels=(
                Panel(
                    title="What do the engines do, by GPU type?",
                    description=(
                        "Engines by GPU type, role and state, as the replica that sees most"
                        " tells. Worry about `failed`, `silent` and `cordoned`: `headway"
                        " engines list` says why."
                    ),
                    unit=Unit.COUNT,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "max by (gpu_type, role, state) (sum by (instance, gpu_type,"
                                f" role, state) (headway_engines{{{_OF}}}))"
                            ),
                            legend="{{gpu_type}} {{role}} {{state}}",
                        ),
                    ),
                ),
                Panel(
                    title="Are all nodes heard?",
                    description=(
                        "Nodes of the catalogue by whether their agents are heard. `silent`"
                        " ones serve on, unseen, and get nothing new; `unknown` ones never"
                        " spoke: `headway nodes list`."
                    ),
                    unit=Unit.COUNT,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "max by (gpu_type, region, state)"
                                ' (headway_nodes{region=~"$region"})'
                            ),
                            legend="{{gpu_type}} {{region}} {{state}}",
                        ),
                    ),
                ),
                Panel(
                    title="What is there of what the plan wants?",
                    description=(
                        "Engines that the plan wants and that are there, by model. They may"
                        " differ while moves run; worry when they do for longer than a load"
                        " takes: `headway plan show`."
                    ),
                    unit=Unit.COUNT,
                    queries=(
                        Query(
                            expr=(
                                "sum by (model) (max by (model, gpu_type, role, region)"
                                f" (headway_desired_engines{{{_OF}}}))"
                            ),
                            legend="{{model}} wanted",
                        ),
                        Query(
                            expr=(
                                "max by (model) (sum by (instance, model)"
                                f' (headway_engines{{{_OF},state="serving"}}))'
                            ),
                            legend="{{model}} serving",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="How full",
            panels=(
                Panel(
                    title="What is the GPUs' memory for?",
                    description=(
                        "HBM by weights, KV in use, KV free, and the rest. Much `other` is"
                        " memory that no KV can use: raise gpu_memory_utilization; little"
                        " `kv_free` means that KV bounds the fleet."
                    ),
                    unit=Unit.BYTES,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "sum by (kind) (max by (model, gpu_type, region, kind)"
                                f" (headway_hbm_bytes{{{_OF}}}))"
                            ),
                            legend="{{kind}}",
                        ),
                    ),
                ),
                Panel(
                    title="Which engines have KV headroom?",
                    description=(
                        "Share of KV tokens in use, as engines tell. Above 95 % an engine"
                        " preempts, and prompts are computed twice."
                    ),
                    unit=Unit.RATIO,
                    palette=FULL_IS_BAD,
                    queries=(
                        Query(
                            expr=(
                                f"max by (engine) (headway_engine_kv_tokens_used{{{_OF}}}) /"
                                " max by (engine)"
                                f" (headway_engine_kv_tokens_capacity{{{_OF}}})"
                            ),
                            legend="{{engine}}",
                        ),
                    ),
                ),
                Panel(
                    title="How many seats are lent, and taken?",
                    description=(
                        "Credits: seats that engines have, that agents have lent to replicas,"
                        " and that calls hold. Lent is never more than there are. Taken close"
                        " to lent while seats are left: replicas compete; `headway engines"
                        " list`."
                    ),
                    unit=Unit.COUNT,
                    queries=(
                        Query(
                            expr=f"sum(max by (engine) (headway_engine_seats_capacity{{{_OF}}}))",
                            legend="there are",
                        ),
                        Query(expr=(f"sum(headway_engine_seats_lent{{{_OF}}})"), legend="lent"),
                        Query(expr=(f"sum(headway_engine_seats_taken{{{_OF}}})"), legend="taken"),
                        Query(
                            expr=(f"sum(headway_engine_seats_withheld{{{_OF}}})"), legend="withheld"
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="How warm, and what moves",
            panels=(
                Panel(
                    title="How warm is each model?",
                    description=(
                        "Share of its room that a pool may use, 0 cold, 1 warm. It takes a"
                        " minute; worry when it stays low: engines start again and again."
                    ),
                    unit=Unit.RATIO,
                    most=1.0,
                    queries=(
                        Query(
                            expr='min by (model) (headway_pool_ramp_ratio{model=~"$model"})',
                            legend="{{model}}",
                        ),
                    ),
                ),
                Panel(
                    title="Who starts cold, and how often?",
                    description=(
                        "Starts of engines in the last hour. Each costs its load time; one"
                        " that starts again and again is in a crash loop: `headway engines"
                        " list`."
                    ),
                    unit=Unit.COUNT,
                    queries=(
                        Query(
                            expr=(
                                "max by (engine)"
                                f" (changes(headway_engine_start_time_seconds{{{_OF}}}[1h]))"
                            ),
                            legend="{{engine}}",
                        ),
                    ),
                ),
                Panel(
                    title="How long does a start take?",
                    description=(
                        "What each engine's latest start took until it served. Worry when one"
                        " takes many times its equals: its weights come from a slow disk or"
                        " over the network."
                    ),
                    unit=Unit.SECONDS,
                    kind=Kind.BARS,
                    queries=(
                        Query(
                            expr=f"max by (engine) (headway_engine_load_seconds{{{_OF}}})",
                            legend="{{engine}}",
                        ),
                    ),
                ),
                Panel(
                    title="What does the planner do?",
                    description=(
                        "Rounds of the planner in the last hour by result, and moves of plans"
                        " that ended. `crashed` and `timed_out` leave the last plan standing;"
                        " `failed` and `stuck` moves: `headway plan show`."
                    ),
                    unit=Unit.COUNT,
                    width=12,
                    queries=(
                        Query(
                            expr="sum by (result) (increase(headway_plan_rounds_total[1h]))",
                            legend="rounds {{result}}",
                        ),
                        Query(
                            expr="sum by (kind, result) (increase(headway_plan_moves_total[1h]))",
                            legend="{{kind}} {{result}}",
                        ),
                    ),
                ),
                Panel(
                    title="Are engines bound by compute or by memory?",
                    description=(
                        "Share of arithmetic in an engine's next step, by the roofline: above"
                        " a half compute, below it memory. Work bound by memory gains from"
                        " larger batches, work bound by compute from more GPUs."
                    ),
                    unit=Unit.RATIO,
                    most=1.0,
                    width=12,
                    queries=(
                        Query(
                            expr=f"max by (engine) (headway_engine_compute_ratio{{{_OF}}})",
                            legend="{{engine}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="GPUs, where agents can ask their driver",
            panels=(
                Panel(
                    title="How hot are the GPUs?",
                    description=(
                        "Drawn only for nodes with an NVIDIA driver. Worry above 85 °C: the"
                        " GPU slows itself down."
                    ),
                    unit=Unit.CELSIUS,
                    queries=(
                        Query(
                            expr="max by (node, gpu) (headway_gpu_temperature_celsius)",
                            legend="{{node}} {{gpu}}",
                        ),
                    ),
                ),
                Panel(
                    title="How much GPU memory is in use?",
                    description=(
                        "As the driver tells, of nodes with one. Worry when it is high while"
                        " no engine runs there: a process was left behind."
                    ),
                    unit=Unit.RATIO,
                    queries=(
                        Query(
                            expr=(
                                "max by (node, gpu) (headway_gpu_memory_used_bytes) / max by"
                                " (node, gpu) (headway_gpu_memory_total_bytes)"
                            ),
                            legend="{{node}} {{gpu}}",
                        ),
                    ),
                ),
                Panel(
                    title="Which GPUs can not be trusted?",
                    description=(
                        "1 after an Xid error or a memory error that was not corrected. Their"
                        " engines are cordoned; drain the node and have it looked at."
                    ),
                    unit=Unit.COUNT,
                    queries=(
                        Query(
                            expr="max by (node, gpu) (headway_gpu_at_fault)",
                            legend="{{node}} {{gpu}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
