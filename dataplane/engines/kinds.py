"""The kinds of engine that an agent can start, by the name that specifications use, and the one place
where a profile becomes options of a kind.
"""

import msgspec

from dataplane.engines.base import EngineError, EngineKind
from dataplane.engines.llama_cpp import LlamaCppKind
from dataplane.engines.profiles import Profile, Profiles, Scalar, suggestion
from dataplane.engines.simulated.adapter import SimulatedKind
from dataplane.engines.vllm import VllmKind
from dataplane.protocol.messages import EngineSpec

_ALL: tuple[EngineKind, ...] = (VllmKind(), LlamaCppKind(), SimulatedKind())

KINDS: dict[str, EngineKind] = {kind.name: kind for kind in _ALL}


def kind_of(spec: EngineSpec) -> EngineKind:
    """The kind that `spec` names. Raises EngineError when there is none."""
    kind = KINDS.get(spec.kind)
    if kind is None:
        raise EngineError(
            f"engine `{spec.engine_id}`: no engine kind `{spec.kind}`;"
            f" there are: {', '.join(KINDS)}"
        )
    return kind


def profile_options(profile: Profile) -> dict[str, Scalar]:
    """The options of its kind that a profile becomes. Raises EngineError when the kind lacks one."""
    kind = KINDS.get(profile.kind)
    if kind is None:
        raise EngineError(
            f"profile `{profile.name}`: no engine kind `{profile.kind}`"
            f"{suggestion(profile.kind, KINDS)}; there are: {', '.join(KINDS)}"
        )
    known = kind.profile_options
    options: dict[str, Scalar] = {}
    for place, value in profile.settings().items():
        if place not in known:
            raise EngineError(
                f"profile `{profile.name}`: engines of kind `{kind.name}` have no setting"
                f" `{place}`; they have: {', '.join(known)}"
            )
        options[known[place]] = value
    return options


def with_profile(spec: EngineSpec, profiles: Profiles) -> EngineSpec:
    """`spec` with the options of the profile that it names; its own stand above them.

    Raises EngineError when there is no such profile or it is for another kind.
    """
    if not spec.profile:
        return spec
    sourced = profiles.get(spec.profile)
    if sourced is None:
        raise EngineError(
            f"engine `{spec.engine_id}`: there is no profile `{spec.profile}`"
            f"{suggestion(spec.profile, profiles)}; there are: {', '.join(profiles) or 'none'}"
        )
    if sourced.profile.kind != spec.kind:
        raise EngineError(
            f"engine `{spec.engine_id}`: the profile `{spec.profile}` is for kind"
            f" `{sourced.profile.kind}` and the engine is of kind `{spec.kind}`"
        )
    return msgspec.structs.replace(
        spec, options={**profile_options(sourced.profile), **spec.options}
    )
