"""The agent's settings: the one place that reads its arguments, its environment and its engine
file.
"""

import argparse
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from dataplane.agent.vitals import STUCK_S_FAILED
from dataplane.engines.base import EngineError
from dataplane.engines.kinds import kind_of, with_profile
from dataplane.engines.profiles import Profiles, built_in, read_profiles
from dataplane.protocol.messages import EngineSpec

VERSION = "0.1.0"
LOOPBACK = "127.0.0.1"
# One token of a NATS subject; also a folder name.
NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
ENGINE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
ENGINE_FILE_BYTES_MAX = 1024 * 1024


class SettingsError(Exception):
    """A setting that can not be used; the message says where it stands and what to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """`bind_address` is where engines listen and where other nodes reach them; loopback by default.

    `password` is that of the NATS user named like the node. `stops_engines` False leaves the
    engines running when the agent stops, for the next agent to adopt. `stop_grace_s` is the time
    that a stopping engine gets before it is killed, `stuck_s` the time that its calls may run without
    a token. `profiles` are those that a command may name; the engines of the file have theirs worked in
    already.
    """

    node_id: str
    nats_url: str
    password: str = field(default="", repr=False)
    data_dir: Path
    engines: tuple[EngineSpec, ...] = ()
    bind_address: str = LOOPBACK
    stops_engines: bool = True
    stop_grace_s: float = 10.0
    stuck_s: float = STUCK_S_FAILED
    profiles: Profiles = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not NODE_ID.fullmatch(self.node_id):
            raise SettingsError(
                f"node id `{self.node_id}` must be letters, digits, `-` and `_`, at most 63"
            )
        try:
            is_wildcard = ipaddress.ip_address(self.bind_address).is_unspecified
        except ValueError:
            is_wildcard = False
        if is_wildcard:
            raise SettingsError(
                f"bind address `{self.bind_address}` means every interface, but engines tell it to"
                " each other to move KV; give the node's own address"
            )
        if self.stuck_s <= 0 or self.stop_grace_s < 0:
            raise SettingsError("--stuck-s must be more than 0, and --stop-grace-s not less")
        names = [spec.engine_id for spec in self.engines]
        for name in names:
            if names.count(name) > 1:
                raise SettingsError(f"engine `{name}` is declared twice")
        for spec in self.engines:
            check_spec(spec)


def check_spec(spec: EngineSpec) -> None:
    """Raise SettingsError, in words for the operator, when `spec` can not be started."""
    if not ENGINE_ID.fullmatch(spec.engine_id):
        raise SettingsError(
            f"engine id `{spec.engine_id}` must be letters, digits, `.`, `-` and `_`, at most 127"
        )
    try:
        kind_of(spec).check(spec)
    except EngineError as error:
        raise SettingsError(str(error)) from error


def read_engines(path: Path, profiles: Profiles | None = None) -> tuple[EngineSpec, ...]:
    """The engines of a YAML or JSON file: a list, or a mapping with the list under `engines`.

    Those that name a profile get what it says. Raises SettingsError.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the engine file {path} can not be read: {error}") from error
    if len(text) > ENGINE_FILE_BYTES_MAX:
        raise SettingsError(f"the engine file {path} is over {ENGINE_FILE_BYTES_MAX} bytes")
    try:
        document: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is neither YAML nor JSON: {error}") from error
    if isinstance(document, dict):
        document = document.get("engines")
    if not isinstance(document, list):
        raise SettingsError(f"{path} must be a list of engines, or have one under `engines`")
    known = EngineSpec.__struct_fields__
    for at, entry in enumerate(document):
        unknown = sorted(set(entry) - set(known)) if isinstance(entry, dict) else []
        if unknown:
            raise SettingsError(
                f"{path}: engine {at} has no field `{unknown[0]}`; it has: {', '.join(known)}"
            )
    try:
        specs = msgspec.convert(document, list[EngineSpec])
        return tuple(with_profile(spec, profiles or {}) for spec in specs)
    except (msgspec.ValidationError, EngineError) as error:
        raise SettingsError(f"{path}: {error}") from error


def known_profiles(path: Path | None) -> Profiles:
    """The profiles that ship, and those of the node's own file, which may not take their names."""
    shipped = built_in()
    if path is None:
        return shipped
    try:
        own = read_profiles(path)
    except EngineError as error:
        raise SettingsError(str(error)) from error
    for name in own:
        if name in shipped:
            raise SettingsError(f"{path}: profile `{name}` is {shipped[name].source}; rename it")
    return {**shipped, **own}


def argument_parser() -> argparse.ArgumentParser:
    """The agent's command line; each option that can come from the environment says from where."""
    parser = argparse.ArgumentParser(
        prog="headway agent",
        description="Runs a node's engines and lends their capacity. The password of the node's"
        " NATS user is read from --password-file or HEADWAY_AGENT_PASSWORD.",
    )
    parser.add_argument("--node", help="node id, also the NATS user (HEADWAY_NODE_ID)")
    parser.add_argument("--nats-url", help="URL of the NATS server (NATS_URL)")
    parser.add_argument(
        "--password-file", type=Path, help="file with the password of the node's NATS user"
    )
    parser.add_argument("--data-dir", type=Path, help="state of this agent (HEADWAY_AGENT_DATA)")
    parser.add_argument("--engines", type=Path, help="YAML or JSON list (HEADWAY_AGENT_ENGINES)")
    parser.add_argument(
        "--profiles", type=Path, help="YAML of engine profiles (HEADWAY_AGENT_PROFILES)"
    )
    parser.add_argument("--bind-address", help="where engines listen (HEADWAY_BIND_ADDRESS)")
    parser.add_argument(
        "--keep-engines", action="store_true", help="leave engines running when the agent stops"
    )
    parser.add_argument(
        "--stop-grace-s",
        type=float,
        default=10.0,
        help="seconds that a stopping engine gets before it is killed",
    )
    parser.add_argument(
        "--stuck-s",
        type=float,
        default=STUCK_S_FAILED,
        help="seconds that calls may run without a token before their engine counts as failed",
    )
    return parser


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> AgentSettings:
    """Settings from the command line, else from the environment. Raises SettingsError."""
    given = argument_parser().parse_args(arguments)

    def needed(value: str | Path | None, name: str) -> str:
        found = str(value) if value is not None else environment.get(name, "")
        if not found:
            raise SettingsError(f"set {name}, or give its option (see `headway agent --help`)")
        return found

    password = environment.get("HEADWAY_AGENT_PASSWORD", "")
    if given.password_file is not None:
        try:
            password = given.password_file.read_text().strip()
        except OSError as error:
            raise SettingsError(f"the password file can not be read: {error}") from error
    engines = given.engines or environment.get("HEADWAY_AGENT_ENGINES")
    own_profiles = given.profiles or environment.get("HEADWAY_AGENT_PROFILES")
    profiles = known_profiles(Path(own_profiles) if own_profiles else None)
    return AgentSettings(
        node_id=needed(given.node, "HEADWAY_NODE_ID"),
        nats_url=needed(given.nats_url, "NATS_URL"),
        password=password,
        data_dir=Path(needed(given.data_dir, "HEADWAY_AGENT_DATA")),
        engines=read_engines(Path(engines), profiles) if engines else (),
        bind_address=given.bind_address or environment.get("HEADWAY_BIND_ADDRESS") or LOOPBACK,
        stops_engines=not given.keep_engines,
        stop_grace_s=given.stop_grace_s,
        stuck_s=given.stuck_s,
        profiles=profiles,
    )
