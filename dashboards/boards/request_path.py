"""One call from its arrival to its last byte: times, engine calls, resumes, and who went away."""

from typing import Final

from dashboards.board import MODEL, TENANT_CLASS, Board, Kind, Panel, Query, Row, Unit

_OF: Final = 'model=~"$model",tenant_class=~"$tenant_class"'

BOARD: Final = Board(
    uid="headway-request-path",
    title="Headway / Request path",
    description="What clients feel: first token, pace, whole answer, and what broke on the way.",
    variables=(MODEL, TENANT_CLASS),
    rows=(
        Row(
            title="What clients feel",
            panels=(
                Panel(
                    title="How soon does the first token come?",
                    description=(
                        "TTFT of streams, queueing included, by class: median and 99th"
                        " percentile. Dots are sampled calls; one leads to its trace, whose"
                        " `headway.request` is what `headway explain` takes."
                    ),
                    unit=Unit.SECONDS,
                    is_latency=True,
                    queries=(
                        Query(
                            expr=(
                                "histogram_quantile(0.5, sum by (le, tenant_class)"
                                " (rate(gen_ai_server_time_to_first_token_seconds_bucket"
                                f"{{{_OF}}}[$__rate_interval])))"
                            ),
                            legend="{{tenant_class}} median",
                        ),
                        Query(
                            expr=(
                                "histogram_quantile(0.99, sum by (le, tenant_class)"
                                " (rate(gen_ai_server_time_to_first_token_seconds_bucket"
                                f"{{{_OF}}}[$__rate_interval])))"
                            ),
                            legend="{{tenant_class}} 99th percentile",
                            has_exemplars=True,
                        ),
                    ),
                ),
                Panel(
                    title="How fast do the tokens after it come?",
                    description=(
                        "Mean time per token after the first of one stream (TPOT), by class."
                        " It rises with the batch: worry when nine in ten pass the class's"
                        " target."
                    ),
                    unit=Unit.SECONDS,
                    is_latency=True,
                    queries=(
                        Query(
                            expr=(
                                "histogram_quantile(0.5, sum by (le, tenant_class)"
                                " (rate(gen_ai_server_time_per_output_token_seconds_bucket"
                                f"{{{_OF}}}[$__rate_interval])))"
                            ),
                            legend="{{tenant_class}} median",
                        ),
                        Query(
                            expr=(
                                "histogram_quantile(0.9, sum by (le, tenant_class)"
                                " (rate(gen_ai_server_time_per_output_token_seconds_bucket"
                                f"{{{_OF}}}[$__rate_interval])))"
                            ),
                            legend="{{tenant_class}} nine in ten",
                        ),
                    ),
                ),
                Panel(
                    title="How long does a whole answer take?",
                    description=(
                        "Arrival to last byte of calls that succeeded, by class. Dots lead to"
                        " traces. Worry when the 99th percentile comes near the SLO class's"
                        " end-to-end target."
                    ),
                    unit=Unit.SECONDS,
                    is_latency=True,
                    queries=(
                        Query(
                            expr=(
                                "histogram_quantile(0.5, sum by (le, tenant_class)"
                                f" (rate(gen_ai_server_request_duration_seconds_bucket{{{_OF}}}[$__rate_interval])))"
                            ),
                            legend="{{tenant_class}} median",
                        ),
                        Query(
                            expr=(
                                "histogram_quantile(0.99, sum by (le, tenant_class)"
                                f" (rate(gen_ai_server_request_duration_seconds_bucket{{{_OF}}}[$__rate_interval])))"
                            ),
                            legend="{{tenant_class}} 99th percentile",
                            has_exemplars=True,
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="What they ask for",
            panels=(
                Panel(
                    title="How do calls end?",
                    description=(
                        "Calls a second by how they ended. `failed` reached a client as an"
                        " error or a broken stream."
                    ),
                    unit=Unit.REQUESTS_PER_SECOND,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "sum by (outcome)"
                                f" (rate(headway_requests_total{{{_OF}}}[$__rate_interval]))"
                            ),
                            legend="{{outcome}}",
                        ),
                    ),
                ),
                Panel(
                    title="How many calls are in flight, and how many leave?",
                    description=(
                        "Calls that were accepted and have not ended; and clients a minute"
                        " that went away before the end. Many who leave have time-outs below"
                        " what they are served in."
                    ),
                    unit=Unit.COUNT,
                    queries=(
                        Query(
                            expr='sum by (model) (headway_requests_in_flight{model=~"$model"})',
                            legend="{{model}} in flight",
                        ),
                        Query(
                            expr=(
                                "sum by (model)"
                                ' (increase(headway_client_disconnects_total{model=~"$model"}[1m]))'
                            ),
                            legend="{{model}} left, a minute",
                        ),
                    ),
                ),
                Panel(
                    title="How many tokens are used?",
                    description=(
                        "Tokens a second by kind; `cached` is a part of `prompt`. Worry when"
                        " `cached` falls: prompts changed at their beginning, or engines lost"
                        " their caches."
                    ),
                    unit=Unit.PER_SECOND,
                    queries=(
                        Query(
                            expr=(
                                "sum by (kind)"
                                f" (rate(headway_tokens_total{{{_OF}}}[$__rate_interval]))"
                            ),
                            legend="{{kind}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            title="What breaks on the way",
            panels=(
                Panel(
                    title="How do calls of engines end, leg by leg?",
                    description=(
                        "Engine calls a second: `whole` on one engine, or `prefill` and"
                        " `decode` of a pair, and those that went on with a stream. Worry"
                        " about anything but `ok`, `client_error` and `cancelled`."
                    ),
                    unit=Unit.PER_SECOND,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "sum by (leg, outcome)"
                                " (rate(headway_attempts_total[$__rate_interval]))"
                            ),
                            legend="{{leg}} {{outcome}}",
                        ),
                    ),
                ),
                Panel(
                    title="Which engines fail?",
                    description=(
                        "Failed engine calls a second, by engine and how. One engine: its"
                        " log, its node. All at once: the network, or a version that was"
                        " rolled out."
                    ),
                    unit=Unit.PER_SECOND,
                    kind=Kind.AREAS,
                    queries=(
                        Query(
                            expr=(
                                "sum by (engine, outcome)"
                                " (rate(headway_upstream_errors_total[$__rate_interval]))"
                            ),
                            legend="{{engine}} {{outcome}}",
                        ),
                    ),
                ),
                Panel(
                    title="What becomes of streams that lose their engine?",
                    description=(
                        "Streams in the last hour that lost their engine. `resumed` and"
                        " `ended` are whole; the others were told that the stream broke"
                        " (docs/streams.md says which calls can go on)."
                    ),
                    unit=Unit.COUNT,
                    queries=(
                        Query(
                            expr=(
                                "sum by (resume_class, outcome)"
                                " (increase(headway_stream_resumes_total[1h]))"
                            ),
                            legend="{{resume_class}} {{outcome}}",
                        ),
                    ),
                ),
                Panel(
                    title="How long is the pause of a stream that moves?",
                    description=(
                        "From the loss of an engine to the next one's first new words, nine"
                        " in ten. Worry above the time-outs that clients have between two"
                        " pieces, often 10 s."
                    ),
                    unit=Unit.SECONDS,
                    width=12,
                    queries=(
                        Query(
                            expr=(
                                "histogram_quantile(0.9, sum by (le)"
                                " (rate(headway_stream_resume_gap_seconds_bucket[$__rate_interval])))"
                            ),
                            legend="nine in ten",
                        ),
                    ),
                ),
                Panel(
                    title="Is PostgreSQL fast enough?",
                    description=(
                        "Journal entries that are not written yet. It is near 0; worry when"
                        " it grows: at 50,000 replicas stop taking calls."
                    ),
                    unit=Unit.COUNT,
                    width=12,
                    queries=(Query(expr="sum(headway_journal_entries_pending)", legend="entries"),),
                ),
            ),
        ),
    ),
)
