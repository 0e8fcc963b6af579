"""Where a bundle comes from: a folder, or a revision that the server keeps."""

from collections.abc import Mapping
from pathlib import Path

from cli.client import segment
from cli.failure import CommandFailure, ExitCode
from cli.operator import Session
from controlplane.domain.errors import ConfigurationError
from policies.evaluate import Policy, compile_policy
from policies.load import bundle_of, files_of


def read_folder(folder: Path | None) -> tuple[dict[str, str], str]:
    """The files of a folder, or of the bundle that ships, and what errors call it."""
    try:
        return files_of(folder), "" if folder is None else str(folder)
    except ConfigurationError as error:
        raise CommandFailure(ExitCode.USAGE, str(error)) from error


def compiled(files: Mapping[str, str], where: str) -> Policy:
    """The bundle, or a failure that names file, rule, column and remedy."""
    try:
        return compile_policy(bundle_of(files, where))
    except ConfigurationError as error:
        raise CommandFailure(ExitCode.FAILED, str(error)) from error


def read_any(session: Session, name: str) -> tuple[dict[str, str], str]:
    """The files of a folder, or of a revision: a digest, `active`, `previous` or `candidate`."""
    path = Path(name)
    if path.is_dir():
        return read_folder(path)
    if "/" in name or name in {".", ".."}:
        raise CommandFailure(ExitCode.USAGE, f"{name} is not a folder", "name one that exists")
    found = session.api.get(f"policies/revisions/{segment(name)}")
    return found["files"], f"revision {found['digest'][:12]}"
