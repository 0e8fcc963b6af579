"""Where a started engine's weights came from, as far as the kernel tells, and how long a start like it
took before.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dataplane.engines.load_log import LoadLog
from dataplane.protocol.messages import EngineSpec, Medium

NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "9p", "beegfs", "gpfs", "wekafs"}
)
NETWORK_PREFIXES: Final = ("fuse.",)
WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".gguf")
# From this share of the weights on they count as read from the disk.
READ_RATIO_MIN: Final = 0.5
# How much the latest start counts in what is expected of the next.
GAIN: Final = 0.5
KINDS_KEPT_MAX: Final = 256


def weights_folder(spec: EngineSpec) -> Path | None:
    """The folder or file that the engine loads, when it is one of this machine."""
    for name in (spec.options.get("model_path"), spec.model):
        if isinstance(name, str) and name.startswith("/") and Path(name).exists():
            return Path(name)
    return None


def medium_of(spec: EngineSpec, log: LoadLog, pids: Iterable[int]) -> Medium:
    """By what the log says of downloads, by the file system of the weights, and by how much the
    engine's processes had read from storage: pages that were cached cost no reading.
    """
    if log.was_downloaded:
        return Medium.NETWORK
    folder = weights_folder(spec)
    if folder is None:
        return Medium.UNKNOWN
    if _is_on_network(folder):
        return Medium.NETWORK
    size = _weights_bytes(folder)
    read = [bytes_read(pid) for pid in pids]
    if not size or not read or None in read:
        return Medium.UNKNOWN
    is_read = sum(one or 0 for one in read) >= READ_RATIO_MIN * size
    return Medium.DISK if is_read else Medium.PAGE_CACHE


def _weights_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    files = (one for one in path.iterdir() if one.name.endswith(WEIGHT_SUFFIXES))
    return sum(one.stat().st_size for one in files)


def bytes_read(pid: int) -> int | None:
    """What a process had read from storage, page faults included. None when it can not be told."""
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(": ")
        if name == "read_bytes":
            return int(value)
    return None


def _is_on_network(path: Path) -> bool:
    kind = file_system_of(path, Path("/proc/self/mounts").read_text())
    return kind in NETWORK_FILE_SYSTEMS or kind.startswith(NETWORK_PREFIXES)


def file_system_of(path: Path, mounts: str) -> str:
    """The kind of file system that holds `path`, by the text of /proc/self/mounts."""
    found, kind = "", ""
    target = os.path.realpath(path)
    for line in mounts.splitlines():
        fields = line.split(" ")
        point = fields[1].replace("\\040", " ").rstrip("/")
        if (target == point or target.startswith(point + "/")) and len(point) >= len(found):
            found, kind = point, fields[2]
    return kind


def alike(spec: EngineSpec) -> str:
    """Starts with the same value take about as long."""
    return f"{spec.kind} {spec.model} {spec.gpus} {bool(spec.options.get('enforce_eager'))}"


def learn(load_times: dict[str, int], spec: EngineSpec, load_ms: int) -> dict[str, int]:
    """`load_times` with one more start."""
    name = alike(spec)
    before = load_times.pop(name, load_ms)
    kept = dict(list(load_times.items())[-KINDS_KEPT_MAX + 1 :])
    return {**kept, name: int(before + GAIN * (load_ms - before))}
