# ruff: noqa: N801, N802, N815  (the names are the library's)
"""A stand-in for NVML: the calls of `pynvml` that the agent makes, over GPUs whose numbers a test sets.

It behaves as the real library does: errors are exceptions of the module's own tree, strings are text,
a wait for events ends with a time-out, and a GPU that is lost answers no call.
"""

import time
from dataclasses import dataclass, field
from types import SimpleNamespace


class NVMLError(Exception):
    pass


class NVMLError_Timeout(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


@dataclass
class StandInGpu:
    uuid: str
    used: int = 1_000
    total: int = 80_000
    load: int = 50
    temperature: int = 60
    ecc: int | None = 0
    is_lost: bool = False


@dataclass
class NvmlStandIn:
    """`events` are told in order, one for each wait: (GPU, event type, data)."""

    gpus: list[StandInGpu]
    has_driver: bool = True
    events: list[tuple[StandInGpu, int, int]] = field(default_factory=list)
    is_open: bool = False
    wait_s_max: float = 0.001

    NVMLError = NVMLError
    NVMLError_Timeout = NVMLError_Timeout
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_TEMPERATURE_GPU = 0
    nvmlEventTypeXidCriticalError = 8
    nvmlEventTypeDoubleBitEccError = 2

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> StandInGpu:
        return self.gpus[index]

    def _reached(self, gpu: StandInGpu) -> StandInGpu:
        if gpu.is_lost:
            raise NVMLError_GpuIsLost("GPU is lost")
        return gpu

    def nvmlDeviceGetUUID(self, gpu: StandInGpu) -> str:
        return self._reached(gpu).uuid

    def nvmlDeviceGetName(self, gpu: StandInGpu) -> bytes:
        self._reached(gpu)
        return b"Stand-in 80GB"

    def nvmlDeviceGetMemoryInfo(self, gpu: StandInGpu) -> SimpleNamespace:
        self._reached(gpu)
        return SimpleNamespace(used=gpu.used, total=gpu.total, free=gpu.total - gpu.used)

    def nvmlDeviceGetUtilizationRates(self, gpu: StandInGpu) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._reached(gpu).load, memory=0)

    def nvmlDeviceGetTemperature(self, gpu: StandInGpu, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._reached(gpu).temperature

    def nvmlDeviceGetTotalEccErrors(self, gpu: StandInGpu, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)
        ecc = self._reached(gpu).ecc
        if ecc is None:
            raise NVMLError_NotSupported("Not Supported")
        return ecc

    def nvmlEventSetCreate(self) -> list[StandInGpu]:
        return []

    def nvmlDeviceGetSupportedEventTypes(self, gpu: StandInGpu) -> int:
        self._reached(gpu)
        return 31

    def nvmlDeviceRegisterEvents(self, gpu: StandInGpu, types: int, events: list) -> None:
        assert types == 10
        events.append(gpu)

    def nvmlEventSetWait_v2(self, events: list[StandInGpu], wait_ms: int) -> SimpleNamespace:
        del wait_ms
        if not self.events:
            time.sleep(self.wait_s_max)
            raise NVMLError_Timeout("Timeout")
        gpu, kind, data = self.events.pop(0)
        assert gpu in events
        return SimpleNamespace(device=gpu, eventType=kind, eventData=data)
