"""Reads cluster documents: a file, or the one that ships with Headway."""

from importlib.resources import files
from pathlib import Path

from cli.failure import CommandFailure, ExitCode
from controlplane.domain.errors import ConfigurationError
from controlplane.store.cluster import DOCUMENT_BYTES_MAX, ClusterDocument, parse_cluster


def read_cluster(path: Path | None) -> ClusterDocument:
    """The document in `path`, the demo's when it is None.

    Raises CommandFailure that says where it is wrong.
    """
    try:
        if path is None:
            name = "demo.yaml"
            text = (files("cli.clusters") / name).read_text("utf-8")
        else:
            name = str(path)
            if path.stat().st_size > DOCUMENT_BYTES_MAX:
                raise CommandFailure(
                    ExitCode.USAGE, f"{path} is larger than {DOCUMENT_BYTES_MAX} bytes"
                )
            text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailure(ExitCode.USAGE, f"{path} can not be read: {error}") from error
    try:
        return parse_cluster(text)
    except ConfigurationError as error:
        raise CommandFailure(ExitCode.USAGE, f"{name}: {error}") from error
