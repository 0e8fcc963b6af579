"""`headway engines profiles`: which there are, whether files of them are right, what they become."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.failure import CommandFailure, ExitCode
from cli.operator import JsonOption, OutputOption, reported
from cli.output import Output, table

if TYPE_CHECKING:
    from dataplane.engines.base import EngineTraits
    from dataplane.engines.profiles import Profile, Profiles
    from dataplane.protocol.messages import EngineSpec

app = typer.Typer(no_args_is_help=True, help="How engines are started: profiles and their flags.")

FileOption = Annotated[
    Path | None, typer.Option("--file", help="Profiles of a node, beside those that ship.")
]

# A name, an address of the documentation range and ports that stand for those of a node.
_ENGINE = "ENGINE"
_HOST = "192.0.2.1"
_FIRST_PORT = 8000
# What hardly any engine differs in, and need not be told.
_ORDINARY: Mapping[str, object] = {"ranks": 1, "pipeline": 1}


@app.command("list")
def list_profiles(
    *, file: FileOption = None, output: OutputOption = None, as_json: JsonOption = False
) -> None:
    """List the profiles that ship, and those of a file."""
    with reported():
        found = _known(file)
        Output.of(output, as_json=as_json).show(
            [
                {
                    "name": name,
                    "kind": each.profile.kind,
                    "about": each.profile.about,
                    "source": each.source,
                    "settings": each.profile.settings(),
                }
                for name, each in found.items()
            ],
            table(
                ("PROFILE", "KIND", "ABOUT"),
                ((name, each.profile.kind, each.profile.about) for name, each in found.items()),
            ),
        )


@app.command("lint")
def lint(
    *,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Files of profiles.")
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", help="Also check the engines of this cluster document."),
    ] = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check profiles: names, values, what contradicts itself; and engines that name them."""
    from dataplane.engines.base import EngineError
    from dataplane.engines.profiles import built_in, read_profiles

    with reported():
        known = built_in()
        findings: list[str] = []
        for file in files or ():
            try:
                own = read_profiles(file)
            except EngineError as error:
                findings.append(str(error))
                continue
            known |= own
            for each in own.values():
                try:
                    _spec(each.profile, known)
                except EngineError as error:
                    findings.append(f"{file}: profile `{each.profile.name}`: {_words(error)}")
        engines = 0
        if cluster is not None:
            engines, found = _lint_cluster(cluster, known)
            findings += found
        checked = {"profiles": len(known), "engines": engines}
        out = Output.of(output, as_json=as_json)
        if out.is_for_programs:
            out.document({**checked, "findings": findings})
        if findings:
            raise CommandFailure(ExitCode.FAILED, "\n".join(findings))
        if not out.is_for_programs:
            print(f"{len(known)} profiles and {engines} engines, nothing wrong")


@app.command("show")
def show(
    *,
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="Name of a profile.")],
    file: FileOption = None,
    model: Annotated[str, typer.Option("--model", help="Model to start.")] = "MODEL",
    role: Annotated[str, typer.Option("--role", help="both, prefill or decode.")] = "",
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="0: as many as it takes.")] = 0,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a profile becomes: command line, environment, and what the scheduler is told."""
    from dataplane.engines.base import EngineError
    from dataplane.engines.kinds import KINDS
    from dataplane.engines.kv_connectors import transfer_of
    from dataplane.engines.profiles import suggestion

    with reported():
        known = _known(file)
        each = known.get(profile)
        if each is None:
            raise CommandFailure(
                ExitCode.FAILED,
                f"there is no profile `{profile}`{suggestion(profile, known)}",
                "see `headway engines profiles list`",
            )
        try:
            spec = _spec(each.profile, known, model=model, role=role, gpus=gpus)
        except EngineError as error:
            raise CommandFailure(ExitCode.FAILED, _words(error)) from error
        kind = KINDS[spec.kind]
        ports = range(_FIRST_PORT, _FIRST_PORT + kind.ports_needed(spec))
        launch = kind.launch(spec, _HOST, ports)
        transfer = transfer_of(kind, spec, ports)
        declared = _declared(kind.traits(spec), "" if transfer is None else transfer.connector)
        out = Output.of(output, as_json=as_json)
        if out.is_for_programs:
            out.document(
                {
                    "name": each.profile.name,
                    "kind": spec.kind,
                    "source": each.source,
                    "settings": each.profile.settings(),
                    "gpus": spec.gpus,
                    "ports": len(ports),
                    "command": list(launch.argv),
                    "environment": dict(launch.environment),
                    "declared": declared,
                }
            )
            return
        print(f"# {each.profile.name}: {each.profile.about} ({each.source})")
        for name, value in launch.environment.items():
            print(f"{name}={shlex.quote(value)} \\")
        print(" \\\n  ".join(_lines(launch.argv)))
        print(f"\n# {spec.gpus} GPUs, {len(ports)} ports; the scheduler is told")
        for name, value in declared.items():
            if value and _ORDINARY.get(name) != value:
                print(f"#   {name}: {', '.join(value) if isinstance(value, list) else value}")


def _known(file: Path | None) -> "Profiles":
    from dataplane.engines.base import EngineError
    from dataplane.engines.profiles import built_in, read_profiles

    shipped = built_in()
    if file is None:
        return shipped
    try:
        return {**shipped, **read_profiles(file)}
    except EngineError as error:
        raise CommandFailure(ExitCode.FAILED, str(error)) from error


def _spec(
    profile: "Profile", known: "Profiles", *, model: str = "MODEL", role: str = "", gpus: int = 0
) -> "EngineSpec":
    """An engine by this profile, its settings checked. Raises EngineError."""
    from dataplane.engines.kinds import kind_of, with_profile
    from dataplane.protocol.messages import EngineSpec

    settings = profile.settings()
    if not gpus:
        gpus = 1
        for place in ("parallel.tensor", "parallel.pipeline", "parallel.data"):
            gpus *= int(settings.get(place, 1))
    spec = EngineSpec(
        engine_id=_ENGINE,
        kind=profile.kind,
        model=model,
        role=role or "both",
        gpus=gpus,
        profile=profile.name,
    )
    spec = with_profile(spec, known)
    kind_of(spec).check_settings(spec)
    return spec


def _lint_cluster(path: Path, known: "Profiles") -> tuple[int, list[str]]:
    """How many engines a cluster document declares, and what is wrong with them."""
    from cli.documents import read_cluster
    from dataplane.engines.base import EngineError
    from dataplane.engines.kinds import kind_of, with_profile
    from dataplane.protocol.messages import EngineSpec

    engines = [engine for node in read_cluster(path).nodes for engine in node.engines]
    findings: list[str] = []
    for engine in engines:
        try:
            spec = with_profile(EngineSpec(**engine.model_dump()), known)
            kind_of(spec).check_settings(spec)
        except EngineError as error:
            findings.append(f"{path}: {error}")
    return len(engines), findings


def _declared(traits: "EngineTraits", connector: str) -> dict[str, Any]:
    return {
        "gpus_of_a_rank": traits.gpus,
        "ranks": traits.ranks,
        "pipeline": traits.pipeline,
        "expert_gpus": traits.expert_gpus,
        "speculative_tokens": traits.speculative_tokens,
        "kv_host_bytes": traits.kv_host_bytes,
        "kv_connector": connector,
        "adapter_slots": traits.adapter_slots,
        "adapters": list(traits.adapters),
        "lacks": sorted(traits.lacks),
    }


def _words(error: Exception) -> str:
    return str(error).removeprefix(f"engine `{_ENGINE}`: ")


def _lines(argv: Sequence[str]) -> list[str]:
    """The command line with one flag and its values a line, quoted for a shell."""
    lines: list[str] = []
    for word in argv:
        if not lines or word.startswith("-"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines
