"""Finds misconfiguration: what was looked at, what was measured, how bad it is, and what to do about it.

Looks only; changes nothing.
"""

import asyncio
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Final

import httpx2
from fastapi import APIRouter

from controlplane.api.security import ServicesDep, ViewerDep
from controlplane.api.services import Services
from controlplane.api.shapes import Answer
from controlplane.bus import BusFacts
from controlplane.domain.catalog import Catalog
from controlplane.domain.errors import StateUnavailable
from controlplane.runtime.call import Address
from controlplane.store import catalog as stored_catalog
from controlplane.store import doctor as database
from controlplane.store import migrate, policies
from controlplane.store.catalog import EngineRecord
from controlplane.store.doctor import CONNECTIONS_PER_REPLICA, DatabaseFacts
from controlplane.store.migrate import Standing
from controlplane.store.policies import Rollout
from dataplane.protocol.messages import EngineState

EXAMINE_S_MAX: Final = 5.0
# Engines that are asked for a sign of life, so many at once, each for no longer than this.
ENGINES_PROBED_MAX: Final = 200
PROBES_AT_ONCE: Final = 16
PROBE_S_MAX: Final = 2.0
NAMES_TOLD_MAX: Final = 8

# Two clocks this far apart make deadlines and leases wrong that are told as instants.
SKEW_MS_WARNED: Final = 1_000.0
SKEW_MS_ERROR: Final = 5_000.0
# An engine's clock is read from the header `date`, which has whole seconds.
HEADER_CLOCK_MS: Final = 1_000.0
POSTGRES_VERSION_MIN: Final = 14
CONNECTIONS_WARNED_RATIO: Final = 0.8
BUS_ROUND_TRIP_MS_WARNED: Final = 50.0
PAYLOAD_BYTES_MIN: Final = 64 * 1024
PEPPER_BYTES_ADVISED: Final = 32
PEPPER_BYTES_DIFFERENT_MIN: Final = 8
REPLICA_TTL_S: Final = 6.0
# After the rollout was changed, a replica may need this long to follow.
FOLLOW_S_MAX: Final = 10.0
_LOCAL_HOSTS: Final = frozenset({"", "localhost", "127.0.0.1", "::1"})

router = APIRouter(tags=["status"])


class Severity(StrEnum):
    """`error`: something does not work or can be lost. `warning`: it will not under load, or on a bad day."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Area(StrEnum):
    CLOCK = "clock"
    POSTGRES = "postgres"
    NATS = "nats"
    FLEET = "fleet"
    CATALOGUE = "catalogue"
    TENANTS = "tenants"
    POLICY = "policy"
    SECRETS = "secrets"
    NETWORK = "network"


class CheckAnswer(Answer):
    """One thing that was looked at. `remedy` is empty where nothing is to be done."""

    area: Area
    subject: str
    severity: Severity
    measured: str
    finding: str
    remedy: str


class DoctorAnswer(Answer):
    """`at` is this replica's clock when the answer was made."""

    replica_id: str
    version: str
    at: datetime
    checks: list[CheckAnswer]


def _check(
    area: Area, subject: str, severity: Severity, measured: str, finding: str, remedy: str = ""
) -> CheckAnswer:
    return CheckAnswer(
        area=area,
        subject=subject,
        severity=severity,
        measured=measured,
        finding=finding,
        remedy=remedy,
    )


@router.get("/doctor")
async def examine(_: ViewerDep, services: ServicesDep) -> DoctorAnswer:
    """Look at clocks, stores, the bus, the fleet and what is declared, from this replica."""
    checks = list(_own(services))
    checks += _bus(await services.bus.examine())
    try:
        checks += await _asked_of_postgres(services)
    except (StateUnavailable, TimeoutError) as error:
        checks.append(
            _check(
                Area.POSTGRES,
                "connection",
                Severity.ERROR,
                str(error) or f"no answer in {EXAMINE_S_MAX:g} s",
                "PostgreSQL can not be asked, so nothing that it knows was looked at",
                "check DATABASE_URL, the server's log and its load",
            )
        )
    checks += await _fleet(services)
    return DoctorAnswer(
        replica_id=services.replica_id,
        version=_version(),
        at=datetime.now(UTC),
        checks=checks,
    )


# ---------------------------------------------------------------- this replica


def _version() -> str:
    from importlib.metadata import version

    return version("headway")


def _own(services: Services) -> Iterator[CheckAnswer]:
    pepper = services.pepper
    is_weak = len(set(pepper)) < PEPPER_BYTES_DIFFERENT_MIN
    is_short = len(pepper) < PEPPER_BYTES_ADVISED
    yield _check(
        Area.SECRETS,
        "HEADWAY_PEPPER",
        Severity.ERROR if is_weak else Severity.WARNING if is_short else Severity.OK,
        "repetitive"
        if is_weak
        else f"{'fewer' if is_short else 'not fewer'} than {PEPPER_BYTES_ADVISED} bytes",
        "digests of API keys could be guessed" if is_weak or is_short else "long enough",
        "make another one with `openssl rand -hex 32`; every key must then be made anew"
        if is_weak or is_short
        else "",
    )
    journal = services.journal
    yield _check(
        Area.POSTGRES,
        "journal",
        Severity.ERROR if journal.is_full else Severity.OK,
        f"{journal.entries_waiting:,} entries wait",
        "the journal is full: calls are refused until PostgreSQL follows"
        if journal.is_full
        else "the journal is written",
        "look at PostgreSQL's load and disk" if journal.is_full else "",
    )
    problem = services.gate.policies.problem
    yield _check(
        Area.POLICY,
        "bundle",
        Severity.ERROR if problem else Severity.OK,
        f"revision {services.gate.policy_revision[:12]} rules",
        problem or "the bundle that is named can be used",
        "`headway policy status`, then `headway policy rollback --reason WHY`" if problem else "",
    )
    host = next((one.value for one in services.settings if one.name == "host"), None) or ""
    if host not in _LOCAL_HOSTS:
        yield _check(
            Area.NETWORK,
            "HEADWAY_HOST",
            Severity.NOTE,
            f"listens on {host} without TLS",
            "keys and prompts cross the network in the clear unless something in front ends TLS",
            "put a proxy with a certificate in front, and let only it reach this port",
        )


def _bus(facts: BusFacts) -> Iterator[CheckAnswer]:
    if not facts.is_connected:
        yield _check(
            Area.NATS,
            "connection",
            Severity.ERROR,
            facts.last_error or "not connected",
            "agents are not heard and can not be told anything",
            "check NATS_URL, HEADWAY_NATS_USER and HEADWAY_NATS_PASSWORD, and the server's log",
        )
        return
    trip_ms = facts.round_trip_ms
    is_slow = trip_ms is None or trip_ms > BUS_ROUND_TRIP_MS_WARNED
    yield _check(
        Area.NATS,
        "connection",
        Severity.WARNING if is_slow else Severity.OK,
        f"version {facts.server_version}, "
        + ("no answer to a ping" if trip_ms is None else f"round trip {trip_ms:.1f} ms"),
        "credits and telemetry come late" if is_slow else "connected",
        "bring the bus near to the replicas, or look at its load" if is_slow else "",
    )
    yield _check(
        Area.NATS,
        "permissions",
        Severity.OK if facts.may_ask else Severity.ERROR,
        facts.last_error
        or ("requests are answered" if facts.may_ask else "no answer to a request"),
        "the control user may ask agents"
        if facts.may_ask
        else "the control user may not ask agents for capacity, or gets no replies",
        ""
        if facts.may_ask
        else "let this user publish and subscribe `hw.v1.>`, its `_INBOX_control-*.>` and `$JS.API.>`",
    )
    broken = facts.jetstream_problem or (
        f"missing: {', '.join(facts.streams_missing)}" if facts.streams_missing else ""
    )
    yield _check(
        Area.NATS,
        "JetStream",
        Severity.ERROR if facts.jetstream_problem else Severity.WARNING if broken else Severity.OK,
        broken or "three streams are there",
        "commands do not reach agents, and prices no replica" if broken else "streams are kept",
        "switch JetStream on (`jetstream {}`) for the account of the control user"
        if facts.jetstream_problem
        else "restart a replica: it makes the streams when it connects"
        if broken
        else "",
    )
    is_small = facts.payload_bytes_max < PAYLOAD_BYTES_MIN
    yield _check(
        Area.NATS,
        "max_payload",
        Severity.ERROR if is_small else Severity.OK,
        f"{facts.payload_bytes_max:,} bytes",
        "telemetry of large nodes does not fit" if is_small else "messages fit",
        f"raise max_payload to {PAYLOAD_BYTES_MIN:,} bytes or more" if is_small else "",
    )


# ---------------------------------------------------------------- PostgreSQL and what is declared


async def _asked_of_postgres(services: Services) -> list[CheckAnswer]:
    async with asyncio.timeout(EXAMINE_S_MAX):
        began = datetime.now(UTC)
        facts = await database.examine(services.engine, replica_ttl_s=REPLICA_TTL_S)
        ended = datetime.now(UTC)
        url = services.engine.url.render_as_string(hide_password=False)
        standing = await asyncio.to_thread(migrate.standing, url)
        rollout = await policies.rollout(services.engine)
        known = await stored_catalog.list_engines(services.engine)
        declared = await stored_catalog.load_catalog(services.engine)
    checks = [_database_clock(facts, began, ended), _schema(standing)]
    checks += _database(services, facts)
    checks += _catalogue(services, declared, known)
    checks += _tenants(services, facts)
    checks += _policies(facts, rollout)
    return checks


def _database_clock(facts: DatabaseFacts, began: datetime, ended: datetime) -> CheckAnswer:
    """The database's clock was read at some instant between the two of this replica."""
    early_ms = (began - facts.at).total_seconds() * 1_000.0
    late_ms = (facts.at - ended).total_seconds() * 1_000.0
    return _skew("PostgreSQL", max(0.0, early_ms, late_ms), "this replica")


def _skew(subject: str, skew_ms: float, against: str) -> CheckAnswer:
    """A difference of clocks, of which the time that it took to ask is taken away already."""
    is_bad = skew_ms >= SKEW_MS_WARNED
    return _check(
        Area.CLOCK,
        subject,
        Severity.ERROR if skew_ms >= SKEW_MS_ERROR else Severity.WARNING if is_bad else Severity.OK,
        f"{skew_ms / 1_000:.1f} s apart from {against}",
        "deadlines and windows of budgets end too early or too late" if is_bad else "clocks agree",
        "run chrony or another NTP client on both machines" if is_bad else "",
    )


def _schema(standing: Standing) -> CheckAnswer:
    severity = {Standing.CURRENT: Severity.OK, Standing.NEWER: Severity.NOTE}.get(
        standing, Severity.ERROR
    )
    return _check(
        Area.POSTGRES,
        "schema",
        severity,
        str(standing),
        {
            Standing.CURRENT: "the schema is this program's",
            Standing.NEWER: "the schema is of a newer program, which this one can use",
            Standing.OLDER: "migrations are missing",
            Standing.EMPTY: "there is no schema",
            Standing.FOREIGN: "the schema is none of Headway's",
        }[standing],
        {
            Standing.OLDER: "run `headway db upgrade`",
            Standing.EMPTY: "run `headway db upgrade`",
            Standing.FOREIGN: "check DATABASE_URL",
        }.get(standing, ""),
    )


def _database(services: Services, facts: DatabaseFacts) -> Iterator[CheckAnswer]:
    is_old = facts.version < POSTGRES_VERSION_MIN
    yield _check(
        Area.POSTGRES,
        "version",
        Severity.ERROR if is_old else Severity.OK,
        str(facts.version),
        f"older than {POSTGRES_VERSION_MIN}" if is_old else "recent enough",
        "upgrade PostgreSQL" if is_old else "",
    )
    most = int(facts.settings.get("max_connections", 0))
    most -= int(facts.settings.get("superuser_reserved_connections", 0))
    needed = facts.replicas_live * CONNECTIONS_PER_REPLICA
    is_short, is_tight = needed > most, facts.connections > CONNECTIONS_WARNED_RATIO * most
    yield _check(
        Area.POSTGRES,
        "max_connections",
        Severity.ERROR if is_short else Severity.WARNING if is_tight else Severity.OK,
        f"{facts.connections} of {most} in use; {facts.replicas_live} replicas may take"
        f" {CONNECTIONS_PER_REPLICA} each",
        "replicas will be refused connections under load"
        if is_short
        else "most connections are in use"
        if is_tight
        else "there is room for every replica's pool",
        f"set max_connections to {2 * max(needed, most)} or more" if is_short or is_tight else "",
    )
    for name, wanted, words in (
        ("fsync", {"on"}, "a crash of the machine can corrupt all data"),
        ("full_page_writes", {"on"}, "a crash of the machine can corrupt tables"),
        (
            "synchronous_commit",
            {"on", "remote_apply", "remote_write", "local"},
            "a crash loses settlements that were already told: money is not exact",
        ),
        (
            "default_transaction_isolation",
            {"read committed"},
            "statements fail that are written for read committed",
        ),
    ):
        value = facts.settings.get(name, "")
        is_well = value in wanted
        yield _check(
            Area.POSTGRES,
            name,
            Severity.OK if is_well else Severity.ERROR,
            value,
            "as it should be" if is_well else words,
            "" if is_well else f"set {name} to {'on' if 'on' in wanted else min(wanted)}",
        )
    url = services.engine.url
    host = url.host or ""
    if host not in _LOCAL_HOSTS and not host.startswith("/"):
        mode = str(url.query.get("sslmode", "prefer"))
        is_safe = mode in {"require", "verify-ca", "verify-full"}
        yield _check(
            Area.NETWORK,
            "DATABASE_URL",
            Severity.OK if is_safe else Severity.WARNING,
            f"sslmode={mode} to {host}",
            "the connection is encrypted" if is_safe else "the connection may be in the clear",
            "" if is_safe else "add ?sslmode=verify-full to DATABASE_URL",
        )


def _catalogue(
    services: Services, declared: Catalog, known: list[EngineRecord]
) -> Iterator[CheckAnswer]:
    fleet = services.fleet
    revision = fleet.catalog.revision
    yield _names(
        Area.CATALOGUE,
        "nodes without a declaration",
        Severity.ERROR,
        fleet.unknown_nodes(),
        "agents speak for nodes that are not in the catalogue: their engines get no calls",
        "declare them in a cluster document: `headway apply FILE`",
        f"catalogue revision {revision}",
    )
    silent = [
        node for node in declared.nodes if node not in fleet.nodes or not fleet.nodes[node].heard_ms
    ]
    yield _names(
        Area.FLEET,
        "silent nodes",
        Severity.ERROR,
        sorted(silent),
        "no agent of them is heard",
        "look at `headway agent` on them: its log, NATS_URL and its password",
        f"{len(declared.nodes) - len(silent)} of {len(declared.nodes)} nodes are heard",
    )
    served = {record.model for record in known if record.state != EngineState.STOPPED}
    yield _names(
        Area.CATALOGUE,
        "models without engines",
        Severity.WARNING,
        sorted(model for model in declared.models if model not in served),
        "calls for them are refused with `no_capacity`",
        "`headway engines load ENGINE --node NODE --model MODEL`, or let the planner act",
        f"{len(served)} of {len(declared.models)} models have engines",
    )
    unpriced = [
        name for name, kind in declared.gpu_types.items() if kind.price_micro_usd_per_hour <= 0
    ]
    yield _names(
        Area.CATALOGUE,
        "GPU types without a price",
        Severity.WARNING,
        sorted(unpriced),
        "placement and plans take their time for free",
        "give `price_usd_per_hour` in the cluster document",
        f"{len(declared.gpu_types)} GPU types",
    )


def _tenants(services: Services, facts: DatabaseFacts) -> Iterator[CheckAnswer]:
    yield _names(
        Area.TENANTS,
        "tenants without keys",
        Severity.WARNING,
        list(facts.tenants_without_keys),
        "they can not call",
        "`headway keys create --tenant TENANT`, or `headway tenants disable TENANT`",
        f"{sum(facts.tenant_classes.values()):,} tenants are active",
    )
    classes = services.gate.policies.policy.bundle.tenant_classes.classes
    strange = sorted(name for name in facts.tenant_classes if name not in classes)
    yield _names(
        Area.POLICY,
        "classes of tenants",
        Severity.ERROR,
        strange,
        "tenants have classes that the bundle does not know: every call of theirs is refused",
        "add them to tenant_classes.yaml: `headway policy apply FOLDER --reason WHY`",
        f"{len(facts.tenant_classes)} classes are in use",
    )
    yield _check(
        Area.SECRETS,
        "admin keys",
        Severity.OK if facts.operators else Severity.ERROR,
        f"{facts.operators} admin keys",
        "somebody can administrate" if facts.operators else "nobody can make or revoke keys",
        "" if facts.operators else "make one on the machine of the database with `headway up`",
    )


def _policies(facts: DatabaseFacts, rollout: Rollout) -> Iterator[CheckAnswer]:
    """By what replicas rule, told from their latest decisions."""
    allowed = {rollout.active_digest, rollout.candidate_digest}
    is_settled = (facts.at - rollout.changed_at).total_seconds() > FOLLOW_S_MAX
    strange = [
        f"{one.replica_id} rules by {one.policy_revision[:12]}"
        for one in facts.ruled
        if is_settled
        and one.policy_revision not in allowed
        and (one.decided_at - rollout.changed_at).total_seconds() > FOLLOW_S_MAX
    ]
    yield _names(
        Area.POLICY,
        "replicas",
        Severity.ERROR,
        strange,
        "these replicas do not follow the rollout",
        "look at `headway_policy_load_failures_total` and the log of these replicas, or restart them",
        f"{len(facts.ruled)} of {facts.replicas_live} live replicas decided within"
        f" {database.RULED_S_MAX} s",
    )


def _names(
    area: Area,
    subject: str,
    severity: Severity,
    names: list[str],
    finding: str,
    remedy: str,
    measured: str,
) -> CheckAnswer:
    """A check that finds names: none of them is well."""
    told = ", ".join(names[:NAMES_TOLD_MAX])
    if len(names) > NAMES_TOLD_MAX:
        told += f" and {len(names) - NAMES_TOLD_MAX} more"
    return _check(
        area,
        subject,
        severity if names else Severity.OK,
        told or measured,
        finding if names else "none",
        remedy if names else "",
    )


# ---------------------------------------------------------------- engines


async def _fleet(services: Services) -> list[CheckAnswer]:
    """Whether engines that should answer do, asked from here as calls are, and what their clocks say."""
    asked = [
        (str(entry.row.engine_id), entry.address)
        for entry in services.fleet.entries()
        if entry.facts.state is EngineState.SERVING
    ][:ENGINES_PROBED_MAX]
    gate = asyncio.Semaphore(PROBES_AT_ONCE)
    unreachable: list[str] = []
    skews: dict[str, float] = {}
    async with httpx2.AsyncClient(timeout=PROBE_S_MAX, trust_env=False) as client:

        async def probe(engine_id: str, address: Address) -> None:
            host, port = address[:2]
            name = f"[{host}]" if ":" in host else host
            async with gate:
                began = datetime.now(UTC)
                try:
                    response = await client.get(f"http://{name}:{port}/health")
                except httpx2.HTTPError as error:
                    unreachable.append(
                        f"{engine_id} at {host}:{port} ({str(error) or type(error).__name__})"
                    )
                    return
                skew_ms = _header_skew_ms(response.headers.get("date"), began, datetime.now(UTC))
                if skew_ms is not None:
                    skews[engine_id] = skew_ms

        async with asyncio.TaskGroup() as group:
            for engine_id, address in asked:
                group.create_task(probe(engine_id, address))
    checks = [
        _names(
            Area.FLEET,
            "unreachable engines",
            Severity.ERROR,
            sorted(unreachable),
            "their agents say that they serve, and this replica can not reach them",
            "check the address that the node declares, --bind-address of its agent, and firewalls",
            f"{len(asked)} serving engines were asked",
        )
    ]
    if skews:
        worst = max(skews, key=lambda engine_id: skews[engine_id])
        checks.append(_skew(f"engine {worst}", skews[worst], "this replica, the worst of all"))
    return checks


def _header_skew_ms(text: str | None, began: datetime, ended: datetime) -> float | None:
    """How far a clock is from ours at least, by the header `date`; None when there is none."""
    if not text:
        return None
    try:
        told = parsedate_to_datetime(text)
    except ValueError:
        return None
    if told.tzinfo is None:
        return None
    # It was cut to whole seconds, and read at some instant between ours.
    early_ms = (began - told).total_seconds() * 1_000.0 - HEADER_CLOCK_MS
    late_ms = (told - ended).total_seconds() * 1_000.0
    skew_ms = max(0.0, early_ms, late_ms)
    return skew_ms if math.isfinite(skew_ms) else None
