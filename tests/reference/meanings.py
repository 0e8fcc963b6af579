"""Meanings that stand nowhere in the code, for the reference; a name that is missing or too much fails."""

from typing import Final

from controlplane.domain.decision import Reason
from controlplane.gateway.hot_path import CHAT, COMPLETIONS, MODELS

SERVE: Final = {
    "database_url": "PostgreSQL, `postgresql://USER:PASSWORD@HOST/DATABASE`.",
    "nats_url": "NATS with JetStream, `nats://HOST:4222` or `tls://HOST:4222`.",
    "nats_user": "The control plane's user there; none where the server asks for none.",
    "nats_password": "Its password.",
    "pepper": "Key of the digests under which API keys are stored: the same for all replicas. Who changes it voids"
    " every key.",
    "host": "Address to listen at.",
    "port": "Port to listen at; 0 takes a free one.",
    "policies_path": "Folder of the bundle that a database without one starts with; the one that ships when unset.",
    "replica_ttl_s": "Seconds of silence after which a replica is taken for dead, and its open calls are settled.",
    "leader_ttl_s": "Seconds for which a claim to lead holds. Another replica can lead after that.",
    "node_silence_s_max": "Seconds without a sign of life after which nothing new goes to a node.",
    "engine_ramp_s": "Seconds that an engine that came back takes to full load; 0 is at once.",
    "pool_ramp_s": "The same for a model of which every engine is new.",
    "queue_calls_max": "Calls that may wait at this replica.",
    "queue_bytes_max": "Bytes of their bodies.",
    "queue_wait_ms_max": "Milliseconds for which a call without a deadline of its own waits.",
    "decisions_kept_days": "Days for which decisions are kept; `headway policy replay` reads at most 31.",
    "attempts_kept_days": "Days for which attempts are kept.",
    "commands_kept_days": "Days for which commands that have ended are kept.",
    "requests_kept_days": "Days for which calls and what each was charged are kept. Sums stay.",
    "budget_slice_micro_usd": "Micro-dollars of a budget that a replica takes at once: what it can spend while"
    " PostgreSQL is away, and what the other replicas can not spend meanwhile.",
    "stream_leave_s": "Seconds for which streams of a drained engine may end there before they go on elsewhere.",
    "drain_s_max": "Seconds for which calls in flight may go on when the replica is asked to stop.",
    "planner_interval_s": "Seconds between two rounds of the planner.",
    "planner_solve_s_max": "Seconds of a round that the solver may take.",
    "planner_nodes_more_max": "Nodes that an autoscaler may add to each shape of node. 0: the fleet is fixed, and"
    " paid for.",
    "planner_provision_s": "Seconds until a node that was asked for is there.",
    "trace_sample_ratio": "Share of the calls that are traced, of those whose client sends no `traceparent` that"
    " says so or not.",
    "trace_slow_ms": "Milliseconds from which on a call is slow, and always traced and logged.",
    "trace_ttft_slow_ms": "The same for its first token.",
    "trace_kept_per_s_max": "Refused, failed and slow calls that are traced and logged in a second, at most.",
    "otlp_endpoint": "Collector of traces and metrics over OTLP/HTTP, `http://HOST:4318`; none sends nothing.",
}

AGENT_ONLY: Final = {
    "HEADWAY_AGENT_PASSWORD": "Password of the node's NATS user, where there is no `--password-file`.",
}

# Read by other programs than the two above, or for other purposes.
OTHERS: Final = {
    "HEADWAY_URL": "Server that the command line asks.",
    "HEADWAY_OPERATOR_KEY": "Operator key that it shows there.",
    "HEADWAY_CONTEXT": "Context of the command line, as `--context` names it.",
    "HEADWAY_CONFIG": "File in which the command line keeps its contexts.",
    "HEADWAY_PURE": "1: `python -m controlplane.scheduler.compile` removes the compiled decision core.",
    "HEADWAY_LOG_SECRETS": "Set by the agent for itself.",
    "HEADWAY_ENGINE_LAUNCH": "Set by the agent: by this it knows the processes that it started.",
    "HEADWAY_ENGINE_OWNER": "Set by the agent, for the same purpose.",
    "HEADWAY_TRACES": "Folder of published traces that `headway simulate` may play.",
    "OTEL_EXPORTER_OTLP_HEADERS": "Headers for the collector, as the OpenTelemetry SDK reads them.",
}

HOT_PATHS: Final = {
    CHAT: "chat completions, streaming and not",
    COMPLETIONS: "completions, streaming and not",
    MODELS: "the models that the key's tenant may use",
    MODELS + "/{model}": "one of them",
}

REASONS: Final = {
    Reason.INVALID_API_KEY: "The key is missing, unknown or revoked, or its tenant is disabled.",
    Reason.FORBIDDEN_BY_POLICY: "A rule or an entitlement does not allow it; `x-headway-rule` names the rule.",
    Reason.INVALID_REQUEST: "The body or a header can not be used; `param` names the member.",
    Reason.REQUEST_TOO_LARGE: "Body or head are over their limit.",
    Reason.NOT_FOUND: "There is nothing of that name.",
    Reason.METHOD_NOT_ALLOWED: "The path does not take this method.",
    Reason.MODEL_NOT_FOUND: "There is no such model.",
    Reason.WORKFLOW_NOT_FOUND: "No such workflow of this tenant.",
    Reason.WORKFLOW_ENDED: "The workflow is over.",
    Reason.CONFLICT: "It changed meanwhile, or is there already.",
    Reason.PRECONDITION_FAILED: "It is not any more what `If-Match` names.",
    Reason.CONTEXT_LENGTH_EXCEEDED: "Prompt and answer do not fit into the model's context.",
    Reason.INSUFFICIENT_QUOTA: "A budget of tenant, key or workflow is spent; the message names it.",
    Reason.IDEMPOTENCY_IN_PROGRESS: "The call with this key is under way.",
    Reason.IDEMPOTENCY_MISMATCH: "The key came with another body before.",
    Reason.RESPONSE_NOT_STORED: "The call with this key has succeeded, and its answer is not kept here.",
    Reason.POLICY_ERROR: "A rule can not be evaluated: the operator's fault.",
    Reason.RATE_LIMITED: "Requests or tokens a minute, or calls at once, of key or tenant.",
    Reason.SHED_OVERLOAD: "More work than the engines can do, and others bring more for it.",
    Reason.DEFERRED: "A rule postpones it beyond its deadline.",
    Reason.QUEUE_FULL: "The queue of the replica is full.",
    Reason.DEADLINE_UNREACHABLE: "It would not end in time even now.",
    Reason.FAN_OUT_EXCEEDED: "More calls of the workflow at once than its scope allows.",
    Reason.NO_CAPACITY: "No engine can take it now, or the replica stops.",
    Reason.WARMING: "The model is being loaded.",
    Reason.STATE_UNAVAILABLE: "PostgreSQL can not be asked for what is needed.",
    Reason.UPSTREAM_ERROR: "The engine failed before the first byte, and so did the tries elsewhere.",
    Reason.UPSTREAM_TIMEOUT: "The engine did not answer in time.",
    Reason.STREAM_INTERRUPTED: "The last event of a stream that lost its engine and could not go on.",
    Reason.INTERNAL_ERROR: "A defect of Headway.",
}
