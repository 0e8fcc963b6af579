"""Subjects and streams of the bus. Prefix `hw.v1`: the major version is part of the name."""

PREFIX = "hw.v1"

COMMAND_STREAM = "HW_COMMANDS"
COMMAND_SUBJECTS = f"{PREFIX}.node.*.cmd"

# What engines' prefix caches hold, from their agents; kept for a while, for replicas that missed some.
KV_STREAM = "HW_KV"
ALL_KV = f"{PREFIX}.node.*.kv"

ALL_HELLOS = f"{PREFIX}.node.*.hello"
ALL_BEATS = f"{PREFIX}.node.*.beat"
ALL_BYES = f"{PREFIX}.node.*.bye"
ALL_TELEMETRY = f"{PREFIX}.node.*.telemetry"
ALL_ACKNOWLEDGEMENTS = f"{PREFIX}.node.*.ack"
ALL_PROGRESS = f"{PREFIX}.node.*.progress"

# What the leader tells all replicas; the stream keeps the last message of each subject for those to come.
CONTROL_STREAM = "HW_CONTROL"
CONTROL_PLAN = f"{PREFIX}.control.plan"
CONTROL_PRICES = f"{PREFIX}.control.prices"

# Whoever changes which policies rule wakes the replicas, which then ask PostgreSQL. Nobody keeps it.
CONTROL_POLICIES = f"{PREFIX}.control.policies"

# A replica that has just started asks every agent to say hello again.
ROLL_CALL = f"{PREFIX}.control.rollcall"


def node_subject(node_id: str, kind: str) -> str:
    """Subject of one node; `kind` is hello, beat, bye, telemetry, progress, credits, cmd or ack."""
    return f"{PREFIX}.node.{node_id}.{kind}"


def node_of(subject: str) -> str:
    """The node id inside a subject made by `node_subject`. Trusted: the server checks who may publish there."""
    return subject.split(".")[3]


def inbox_prefix(name: str) -> str:
    """Reply subjects are private to one client, so that no agent reads another's replies."""
    return f"_INBOX_{name}"
