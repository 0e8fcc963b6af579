"""`headway doctor`: looks for misconfiguration from here and from the server, and names what to do about it."""

import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import Annotated, Final
from urllib.parse import urlsplit

import httpx2
import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cli.client import DATA_DIR, OPERATOR_FILE, JsonObject
from cli.contexts import Connection, path_of_contexts
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session, with_session

CONNECT_S_MAX: Final = 5.0
SKEW_S_WARNED: Final = 2.0
SKEW_S_ERROR: Final = 10.0
CERTIFICATE_DAYS_WARNED: Final = 21
SLOW_S: Final = 1.0
SECONDS_PER_DAY: Final = 86_400
_LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_MARKS: Final = {
    "error": Text("✗", style="bold red"),
    "warning": Text("!", style="bold yellow"),
    "note": Text("·", style="dim"),
    "ok": Text("✓", style="green"),
}
_ORDER: Final = tuple(_MARKS)
# What makes the exit code 1.
_WRONG: Final = frozenset({"error", "warning"})


@with_session
def doctor(
    session: Session,
    *,
    is_all: Annotated[bool, typer.Option("--all", help="Also what is well.")] = False,
) -> None:
    """Find misconfiguration: clocks, PostgreSQL, NATS, engines, the catalogue, policies, secrets, certificates.

    Exit code 0: nothing wrong. 1: something is. 3: the server does not answer.
    """
    connection = session.connection
    checks = [] if connection is None else list(_from_here(connection))
    document = session.api.get("doctor")
    checks = [*checks, *_of_versions(document), *document["checks"]]
    checks.sort(key=lambda check: _ORDER.index(check["severity"]))
    wrong = [check for check in checks if check["severity"] in _WRONG]
    told = {**document, "checks": checks, "wrong": len(wrong)}
    if session.out.is_for_programs:
        session.out.document(told)
    else:
        _print(session, checks, len(wrong), is_all=is_all)
    if wrong:
        raise typer.Exit(int(ExitCode.FAILED))


def _print(session: Session, checks: list[JsonObject], wrong: int, *, is_all: bool) -> None:
    console = session.out.console
    shown = [check for check in checks if is_all or check["severity"] != "ok"]
    if shown:
        view = Table(box=None, pad_edge=False, header_style="bold")
        view.add_column("", width=1)
        view.add_column("WHAT", overflow="fold", max_width=24)
        view.add_column("FOUND", overflow="fold", ratio=1)
        for check in shown:
            found = Text(check["finding"])
            found.append(f"\n{check['measured']}", style="dim")
            if check["remedy"]:
                found.append(f"\n→ {check['remedy']}", style="cyan")
            view.add_row(
                _MARKS[check["severity"]],
                Text.assemble((check["area"], "bold"), f"\n{check['subject']}"),
                found,
            )
        console.print(view)
        console.print()
    well = sum(check["severity"] == "ok" for check in checks)
    words = f"{len(checks)} checks: {wrong} wrong, {well} well"
    more = "" if is_all else "; --all shows what is well"
    console.print(
        Text(words, style="bold red" if wrong else "bold green"), Text(more, style="dim"), sep=""
    )


def _check(
    area: str, subject: str, severity: str, measured: str, finding: str, remedy: str = ""
) -> JsonObject:
    return {
        "area": area,
        "subject": subject,
        "severity": severity,
        "measured": measured,
        "finding": finding,
        "remedy": remedy,
    }


# ---------------------------------------------------------------- from here


def _from_here(connection: Connection) -> Iterator[JsonObject]:
    """What can be seen from this machine: the way to the server, its clock, its certificate, files with keys."""
    yield from _way(connection)
    yield from _files()


def _way(connection: Connection) -> Iterator[JsonObject]:
    parts = urlsplit(connection.url)
    host = parts.hostname or ""
    began = time.time()
    try:
        response = httpx2.get(
            f"{connection.url}/health/ready", timeout=CONNECT_S_MAX, trust_env=False
        )
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise CommandFailure(
            ExitCode.UNREACHABLE,
            f"no answer from {connection.url}: {str(error) or type(error).__name__}",
            "start one with `headway up`, or name another with --url or HEADWAY_URL",
        ) from error
    ended = time.time()
    took_s = ended - began
    yield _check(
        "network",
        "server",
        "warning" if took_s > SLOW_S else "ok",
        f"{connection.url} answered in {took_s * 1_000:.0f} ms",
        "the server is slow to answer" if took_s > SLOW_S else "the server answers",
        "look at its load, and at the way to it" if took_s > SLOW_S else "",
    )
    problems = response.json().get("problems", []) if response.status_code == 503 else []  # noqa: PLR2004
    yield _check(
        "network",
        "readiness",
        "error" if problems else "ok",
        "; ".join(problems) or "ready",
        "the replica should get no traffic" if problems else "the replica takes traffic",
        "put right what it names" if problems else "",
    )
    skew = _skew_s(response.headers.get("date"), began, ended)
    if skew is not None:
        severity = "error" if skew >= SKEW_S_ERROR else "warning" if skew >= SKEW_S_WARNED else "ok"
        is_well = severity == "ok"
        yield _check(
            "clock",
            "this machine",
            severity,
            f"{skew:.0f} s apart from the server",
            "clocks agree" if is_well else "times that you read here are not those of the server",
            "" if is_well else "run chrony or another NTP client on both machines",
        )
    if parts.scheme == "https":
        yield _certificate(host, parts.port or 443)
    elif host not in _LOCAL_HOSTS:
        yield _check(
            "network",
            "TLS",
            "warning",
            connection.url,
            "your operator key crosses the network in the clear",
            "put a proxy with a certificate in front of the server, and use https",
        )


def _skew_s(text: str | None, began: float, ended: float) -> float | None:
    """How far the server's clock is from ours at least, by its header `date`, which has whole seconds."""
    if not text:
        return None
    try:
        told = parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None
    return max(0.0, began - told - 1.0, told - ended)


def _certificate(host: str, port: int) -> JsonObject:
    try:
        with (
            socket.create_connection((host, port), timeout=CONNECT_S_MAX) as plain,
            ssl.create_default_context().wrap_socket(plain, server_hostname=host) as secured,
        ):
            ends = ssl.cert_time_to_seconds(str((secured.getpeercert() or {})["notAfter"]))
    except (OSError, KeyError, ValueError) as error:
        return _check(
            "network", "certificate", "error", str(error), "the certificate can not be trusted",
            "renew it, or let this machine trust who signed it",
        )  # fmt: skip
    days = (ends - time.time()) / SECONDS_PER_DAY
    is_near = days < CERTIFICATE_DAYS_WARNED
    return _check(
        "network",
        "certificate",
        "warning" if is_near else "ok",
        f"ends {datetime.fromtimestamp(ends, UTC):%Y-%m-%d}, in {days:.0f} days",
        "the certificate ends soon" if is_near else "the certificate holds",
        "renew it" if is_near else "",
    )


def _files() -> Iterator[JsonObject]:
    """Files of this machine that hold keys."""
    for path in (path_of_contexts(), DATA_DIR / OPERATOR_FILE):
        try:
            mode = os.stat(path).st_mode  # noqa: PTH116 (the mode alone)
        except OSError:
            continue
        is_open = bool(mode & _OTHERS)
        yield _check(
            "secrets",
            path.name,
            "error" if is_open else "ok",
            f"{path} is {stat.filemode(mode)}",
            "others on this machine may read the keys in it" if is_open else "only you may read it",
            f"chmod 600 {path}" if is_open else "",
        )


def _of_versions(document: JsonObject) -> Iterator[JsonObject]:
    here, there = version("headway"), document["version"]
    is_same = here == there
    yield _check(
        "network",
        "versions",
        "ok" if is_same else "warning",
        escape(f"this command is {here}, the server {there}"),
        "the same" if is_same else "commands may show less than the server has",
        "" if is_same else "install the server's version here",
    )
