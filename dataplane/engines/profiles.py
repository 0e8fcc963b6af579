"""Engine profiles: what an operator wants of an engine, in words of no particular runtime.

A profile is a named part of a YAML document. Each kind of engine says which settings it knows and by
which of its options; what a kind does not know is refused, never ignored. Knows nothing of flags.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import msgspec
import yaml
from msgspec import UNSET, Meta, UnsetType

from dataplane.engines.base import EngineError

DOCUMENT_BYTES_MAX: Final = 256 * 1024
PROFILES_MAX: Final = 256
# As similar as this (difflib's ratio), a wrong name is taken for a misspelt one.
SIMILARITY_MIN: Final = 0.6

_Count = Annotated[int, Meta(ge=1, le=2**20)]
_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Bytes = Annotated[int, Meta(ge=1, le=2**62)]
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
_Text = Annotated[str, Meta(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f]*$")]

Scalar = str | int | float | bool


class Parallel(msgspec.Struct, kw_only=True, frozen=True):
    """Over how many GPUs: those of one layer, stages of layers, copies. `experts`: copies share experts."""

    tensor: _Count | UnsetType = UNSET
    pipeline: _Count | UnsetType = UNSET
    data: _Count | UnsetType = UNSET
    experts: bool | UnsetType = UNSET


class Batch(msgspec.Struct, kw_only=True, frozen=True):
    """`seats` sequences at once; `tokens_per_step` of prompts and answers together in one step.

    Prompts over `long_prompt_tokens` are computed in pieces that leave room for short ones;
    beyond `queued_calls_max` the engine refuses.
    """

    seats: _Count | UnsetType = UNSET
    tokens_per_step: _Tokens | UnsetType = UNSET
    chunked_prefill: bool | UnsetType = UNSET
    long_prompt_tokens: _Tokens | UnsetType = UNSET
    queued_calls_max: _Count | UnsetType = UNSET
    order: Literal["fcfs", "priority"] | UnsetType = UNSET


class PrefixCache(msgspec.Struct, kw_only=True, frozen=True):
    enabled: bool | UnsetType = UNSET
    hash: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] | UnsetType = UNSET


class KvCache(msgspec.Struct, kw_only=True, frozen=True):
    """`memory_ratio` of a GPU's memory is used for weights, KV and the rest together."""

    dtype: _Text | UnsetType = UNSET
    block_tokens: _Count | UnsetType = UNSET
    bytes: _Bytes | UnsetType = UNSET
    memory_ratio: Annotated[float, Meta(gt=0, le=1)] | UnsetType = UNSET


class KvOffload(msgspec.Struct, kw_only=True, frozen=True):
    """KV that leaves the GPUs is kept in `host_gib` of the host's memory, all GPUs together."""

    backend: Literal["native", "lmcache"] | UnsetType = UNSET
    host_gib: Annotated[float, Meta(gt=0, le=2**16)] | UnsetType = UNSET


class KvTransfer(msgspec.Struct, kw_only=True, frozen=True):
    """How KV goes to another engine. `folder` is for the connector that goes over a shared one."""

    connector: _Name | UnsetType = UNSET
    on_failure: Literal["recompute", "fail"] | UnsetType = UNSET
    lease_s: Annotated[int, Meta(ge=1, le=3600)] | UnsetType = UNSET
    folder: _Text | UnsetType = UNSET


class Speculative(msgspec.Struct, kw_only=True, frozen=True):
    """`tokens` are drafted before each step, by `model` or by looking the last ones up in the prompt."""

    method: _Name | UnsetType = UNSET
    tokens: Annotated[int, Meta(ge=1, le=64)] | UnsetType = UNSET
    model: _Text | UnsetType = UNSET
    draft_tensor: _Count | UnsetType = UNSET
    lookup_tokens_min: Annotated[int, Meta(ge=1, le=64)] | UnsetType = UNSET
    lookup_tokens_max: Annotated[int, Meta(ge=1, le=64)] | UnsetType = UNSET


class Weights(msgspec.Struct, kw_only=True, frozen=True):
    quantization: _Name | UnsetType = UNSET
    dtype: _Name | UnsetType = UNSET
    load_format: _Name | UnsetType = UNSET


class Adapters(msgspec.Struct, kw_only=True, frozen=True):
    """`slots` adapters answer in one batch and `host_slots` stay loaded; `rank_max` bounds their size.

    `loaded` maps those that are there from the start to where they lie. With `at_run_time` commands
    can load others.
    """

    slots: _Count | UnsetType = UNSET
    rank_max: _Count | UnsetType = UNSET
    host_slots: _Count | UnsetType = UNSET
    at_run_time: bool | UnsetType = UNSET
    loaded: dict[_Name, _Text] | UnsetType = UNSET


class Sleep(msgspec.Struct, kw_only=True, frozen=True):
    """The engine can give its GPU memory back and take it again without a new start."""

    enabled: bool | UnsetType = UNSET


class Answers(msgspec.Struct, kw_only=True, frozen=True):
    """How tool calls and reasoning are found in what the model says."""

    tool_calls: _Name | UnsetType = UNSET
    reasoning: _Name | UnsetType = UNSET


class Profile(msgspec.Struct, kw_only=True, frozen=True):
    """One named profile for one kind of engine. `about` says what it is for."""

    name: _Name
    kind: _Name = "vllm"
    about: str = ""
    context_tokens_max: _Tokens | UnsetType = UNSET
    parallel: Parallel | UnsetType = UNSET
    batch: Batch | UnsetType = UNSET
    prefix_cache: PrefixCache | UnsetType = UNSET
    kv_cache: KvCache | UnsetType = UNSET
    kv_offload: KvOffload | UnsetType = UNSET
    kv_transfer: KvTransfer | UnsetType = UNSET
    speculative: Speculative | UnsetType = UNSET
    weights: Weights | UnsetType = UNSET
    adapters: Adapters | UnsetType = UNSET
    sleep: Sleep | UnsetType = UNSET
    answers: Answers | UnsetType = UNSET
    eager: bool | UnsetType = UNSET

    def settings(self) -> dict[str, Scalar]:
        """What the profile says, by place (`batch.seats`); what it leaves open is not there."""
        found: dict[str, Scalar] = {}
        for name in self.__struct_fields__:
            if name in _ABOUT:
                continue
            value = getattr(self, name)
            if isinstance(value, msgspec.Struct):
                for inner in value.__struct_fields__:
                    _note(found, f"{name}.{inner}", getattr(value, inner))
            else:
                _note(found, name, value)
        return found


@dataclass(frozen=True, slots=True)
class Sourced:
    """A profile and where it was read."""

    profile: Profile
    source: str


Profiles = Mapping[str, Sourced]

_ABOUT: Final = frozenset({"name", "kind", "about"})
_SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "parallel": Parallel, "batch": Batch, "prefix_cache": PrefixCache, "kv_cache": KvCache,
    "kv_offload": KvOffload, "kv_transfer": KvTransfer, "speculative": Speculative,
    "weights": Weights, "adapters": Adapters, "sleep": Sleep, "answers": Answers,
}  # fmt: skip


def _note(found: dict[str, Scalar], place: str, value: object) -> None:
    if isinstance(value, dict):
        found[place] = pairs_text(value)
    elif value is not UNSET:
        found[place] = cast("Scalar", value)


def pairs_text(pairs: Mapping[str, str]) -> str:
    """Names and paths as one option holds them: `name=path`, separated by commas."""
    return ",".join(f"{name}={path}" for name, path in pairs.items())


def read_pairs(text: str) -> dict[str, str]:
    """`pairs_text` the other way round. Raises ValueError on what is no such text."""
    pairs: dict[str, str] = {}
    for each in filter(None, text.split(",")):
        name, separator, path = each.partition("=")
        if not name or not separator or not path:
            raise ValueError(f"`{each}` is not name=path")
        if name in pairs:
            raise ValueError(f"`{name}` is there twice")
        pairs[name] = path
    return pairs


# ---------------------------------------------------------------- reading


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, where YAML would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's own signature
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"`{key}` is there twice; keep one", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def parse_profiles(text: str, source: str) -> dict[str, Sourced]:
    """The profiles of one document. Raises EngineError that names the place and the problem."""
    if len(text.encode("utf-8", "surrogatepass")) > DOCUMENT_BYTES_MAX:
        raise EngineError(f"{source} is over {DOCUMENT_BYTES_MAX} bytes")
    try:
        document = yaml.load(text, _Loader)  # noqa: S506 - derives from the safe loader
    except (yaml.YAMLError, RecursionError) as error:
        raise EngineError(f"{source} is not YAML: {error}") from error
    if not isinstance(document, dict) or set(document) != {"profiles"}:
        raise EngineError(f"{source} must be a mapping with a list under `profiles`")
    entries = document["profiles"]
    if not isinstance(entries, list) or len(entries) > PROFILES_MAX:
        raise EngineError(f"{source}: `profiles` must be a list of at most {PROFILES_MAX}")
    found: dict[str, Sourced] = {}
    for at, entry in enumerate(entries):
        named = entry.get("name") if isinstance(entry, dict) else None
        where = (
            f"{source}: profile `{named}`" if isinstance(named, str) else f"{source}: profile {at}"
        )
        profile = _read_profile(entry, where)
        if profile.name in found:
            raise EngineError(f"{where} is there twice; keep one")
        found[profile.name] = Sourced(profile, source)
    return found


def read_profiles(path: Path) -> dict[str, Sourced]:
    """The profiles of a file. Raises EngineError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"the profile file {path} can not be read: {error}") from error
    return parse_profiles(text, str(path))


def _read_profile(entry: object, where: str) -> Profile:
    if not isinstance(entry, dict):
        raise EngineError(f"{where} is not a mapping")
    _refuse_unknown(entry, Profile.__struct_fields__, where, "")
    for name, section in _SECTIONS.items():
        inner = entry.get(name)
        if isinstance(inner, dict):
            _refuse_unknown(inner, section.__struct_fields__, where, f"{name}.")
    try:
        return msgspec.convert(entry, Profile)
    except msgspec.ValidationError as error:
        words, _, place = str(error).partition(" - at `$.")
        raise EngineError(f"{where}: `{place.rstrip('`')}`: {words}") from error


def _refuse_unknown(
    entry: Mapping[Any, object], known: Iterable[str], where: str, inside: str
) -> None:
    names = tuple(known)
    for name in entry:
        if name not in names:
            raise EngineError(
                f"{where}: there is no setting `{inside}{name}`{suggestion(str(name), names)};"
                f" there are: {', '.join(names)}"
            )


def suggestion(name: str, known: Iterable[str]) -> str:
    """`, did you mean ...?` when one of the known names is near, else nothing."""
    near = get_close_matches(name, list(known), n=1, cutoff=SIMILARITY_MIN)
    return f"; did you mean `{near[0]}`?" if near else ""


def built_in() -> dict[str, Sourced]:
    """The profiles that ship with Headway."""
    folder = Path(__file__).with_name("profiles_built_in")
    found: dict[str, Sourced] = {}
    for path in sorted(folder.glob("*.yaml")):
        found |= parse_profiles(path.read_text(), f"built in ({path.name})")
    return found


def places() -> Iterator[str]:
    """Every setting that a profile can have, by place."""
    for name in Profile.__struct_fields__:
        if name in _SECTIONS:
            yield from (f"{name}.{inner}" for inner in _SECTIONS[name].__struct_fields__)
        elif name not in _ABOUT:
            yield name
