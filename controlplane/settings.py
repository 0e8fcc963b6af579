"""The only reader of the environment. Every limit has a name and a unit."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of `headway serve`, from the environment (`HEADWAY_…`, `DATABASE_URL`, `NATS_URL`)."""

    model_config = SettingsConfigDict(env_prefix="HEADWAY_", extra="ignore", frozen=True)

    database_url: Annotated[SecretStr, Field(validation_alias="DATABASE_URL")]
    nats_url: Annotated[str, Field(validation_alias="NATS_URL")]
    nats_user: str = ""
    nats_password: SecretStr = SecretStr("")
    # Key of the digests under which API keys are stored; changing it voids every key.
    pepper: Annotated[SecretStr, Field(min_length=16)]
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    policies_path: Path | None = None

    replica_ttl_s: Annotated[float, Field(gt=0)] = 6.0
    leader_ttl_s: Annotated[float, Field(gt=0)] = 6.0
    node_silence_s_max: Annotated[float, Field(gt=0)] = 4.0
    # How long an engine that came back, and a pool of which every engine is new, take to full load.
    engine_ramp_s: Annotated[float, Field(ge=0)] = 30.0
    pool_ramp_s: Annotated[float, Field(ge=0)] = 60.0
    queue_calls_max: Annotated[int, Field(ge=0)] = 1024
    queue_bytes_max: Annotated[int, Field(ge=0)] = 256 * 1024 * 1024
    queue_wait_ms_max: Annotated[int, Field(ge=0)] = 30_000
    # Age at which rows go. `headway policy replay` reads decisions of at most 31 days.
    decisions_kept_days: Annotated[int, Field(ge=1, le=3_650)] = 31
    attempts_kept_days: Annotated[int, Field(ge=1, le=3_650)] = 31
    commands_kept_days: Annotated[int, Field(ge=1, le=3_650)] = 31
    # Calls with what each was charged; the database keeps them for 30 days at least. Sums stay.
    requests_kept_days: Annotated[int, Field(ge=31, le=3_650)] = 400
    budget_slice_micro_usd: Annotated[int, Field(gt=0)] = 100_000
    drain_s_max: Annotated[float, Field(ge=0)] = 30.0
    # Streams of an engine that is drained have so long to end there before they go on elsewhere: what is nearly
    # done need not be handed over.
    stream_leave_s: Annotated[float, Field(ge=0, le=3_600)] = 2.0
    # The planner of the fleet: time between two rounds, and the most that the solver may take of one.
    planner_interval_s: Annotated[float, Field(gt=0)] = 10.0
    planner_solve_s_max: Annotated[float, Field(gt=0, le=600)] = 4.0
    # Nodes that an autoscaler may add to each shape of node. 0: the fleet is what it is, and is paid for.
    planner_nodes_more_max: Annotated[int, Field(ge=0, le=1_000)] = 0
    planner_provision_s: Annotated[float, Field(ge=0)] = 300.0
    # Which calls leave a trace and a line in the log: this share of all, and always those that were refused, failed,
    # lost an engine, or were slow to their first token or their end; of these at most so many a second.
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    trace_slow_ms: Annotated[float, Field(gt=0)] = 10_000.0
    trace_ttft_slow_ms: Annotated[float, Field(gt=0)] = 2_000.0
    trace_kept_per_s_max: Annotated[float, Field(ge=0)] = 100.0
    otlp_endpoint: Annotated[str, Field(validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT")] = ""
