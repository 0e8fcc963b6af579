"""Reads from an engine's log how far its start is: vLLM's own words, which the simulated engine uses
too. An engine that says nothing of the kind is starting until it serves.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dataplane.protocol.messages import Phase

READ_BYTES_MAX: Final = 256 * 1024

# The lines of vLLM 0.32 that begin a phase. The bars of checkpoint shards and of captured graphs are
# the only ones that tell a share.
_BEGINS: Final = (
    (re.compile(rb"Downloading shards|Fetching \d+ files|[Dd]ownloading .*safetensors"), Phase.DOWNLOADING),
    (re.compile(rb"Starting to load model|Loading .*checkpoint shards"), Phase.LOADING),
    (
        re.compile(
            rb"Loading weights took|Model loading took|Warming up model|torch\.compile"
            rb"|Capturing CUDA graph|Using .* KV cache layout|init engine \("
        ),
        Phase.WARMING,
    ),
)  # fmt: skip
_ORDER: Final = (Phase.STARTING, Phase.DOWNLOADING, Phase.LOADING, Phase.WARMING)
_SHARE: Final = re.compile(rb"(\d{1,3})%(?: Completed)? ?\|")
_SAW_DOWNLOAD: Final = re.compile(rb"Time spent downloading weights")
_PERCENT: Final = 100.0


@dataclass(slots=True)
class LoadLog:
    """Follows one log from its beginning. `was_downloaded`: weights came over the network."""

    path: Path
    phase: Phase = Phase.STARTING
    done_ratio: float | None = None
    was_downloaded: bool = False
    _offset: int = 0
    _rest: bytes = b""

    def read(self) -> None:
        """Take what was written since. Never raises: a log that can not be read tells nothing."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(READ_BYTES_MAX)
        except OSError:
            return
        self._offset += len(data)
        *lines, self._rest = re.split(rb"[\r\n]+", self._rest + data)
        for line in lines:
            self._take(line)
        self._rest = self._rest[-READ_BYTES_MAX:]

    def _take(self, line: bytes) -> None:
        if _SAW_DOWNLOAD.search(line):
            self.was_downloaded = True
        phase = next((phase for pattern, phase in _BEGINS if pattern.search(line)), None)
        if phase is None:
            return
        if phase is Phase.DOWNLOADING:
            self.was_downloaded = True
        # Ranks and processes write into one log; the furthest of them stands for all.
        if _ORDER.index(phase) < _ORDER.index(self.phase):
            return
        if phase is not self.phase:
            self.phase, self.done_ratio = phase, None
        if share := _SHARE.search(line):
            self.done_ratio = min(1.0, int(share[1]) / _PERCENT)
