"""What the driver says of a node's GPUs, by NVML: memory, load, temperature, and errors that make a
GPU unfit to serve. A node without a driver has none, and nothing here happens.
"""

import contextlib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import msgspec

from dataplane.agent import log
from dataplane.protocol.messages import EngineSpec, GpuTelemetry

LIBRARY: Final = "pynvml"
# Xid errors for which NVIDIA's catalogue ("Analyzing Xid Errors with the Xid Catalog", docs.nvidia.com)
# wants the GPU reset, the machine restarted or the part replaced. Those whose remedy is to restart the
# application are left to the engine's own supervision.
FATAL_XIDS: Final[dict[int, str]] = {
    46: "the GPU has stopped processing",
    48: "a double bit ECC error",
    62: "the GPU's microcontroller has halted",
    64: "a bad row of memory could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    95: "an uncontained memory error",
    110: "a security fault",
    119: "the GPU's system processor does not answer",
    120: "an error of the GPU's system processor",
    136: "a link could not be trained",
    140: "an ECC error that was not recovered",
    143: "the GPU could not be initialised",
}
# A wait for events ends this often, so that it can be left.
WAIT_MS: Final = 500
GPUS_MAX: Final = 64
_PERCENT: Final = 100.0


@dataclass(slots=True)
class _Gpu:
    handle: Any
    facts: GpuTelemetry
    ecc_accepted: int


class GpuFacts:
    """The GPUs of this machine. `library` has NVML's calls under the names of `pynvml`.

    Reading takes milliseconds for each GPU and waiting up to WAIT_MS: both belong into a thread.
    """

    def __init__(self, library: ModuleType | Any) -> None:
        self._nvml = library
        self._gpus: list[_Gpu] = []
        self._events: Any = None

    @classmethod
    def find(cls) -> "GpuFacts":
        """Facts of this machine's GPUs; of none when there is no driver."""
        facts = cls(importlib.import_module(LIBRARY))
        facts.open()
        return facts

    def open(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            for index in range(min(GPUS_MAX, nvml.nvmlDeviceGetCount())):
                self._add(index)
            self._listen()
        except nvml.NVMLError as error:
            log.info("no GPU is watched", detail=str(error))
        if self._gpus:
            log.info("GPUs are watched", gpus=len(self._gpus))

    def close(self) -> None:
        if self._gpus:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._gpus = []

    @property
    def count(self) -> int:
        return len(self._gpus)

    def now(self) -> list[GpuTelemetry]:
        """The facts as they were read last."""
        return [gpu.facts for gpu in self._gpus]

    def read(self) -> None:
        """Read the numbers of every GPU. One that can not be read is at fault."""
        nvml = self._nvml
        for gpu in self._gpus:
            try:
                memory = nvml.nvmlDeviceGetMemoryInfo(gpu.handle)
            except nvml.NVMLError as error:
                self._fault(gpu, f"the driver does not reach it: {error}")
                continue
            ecc = self._uncorrected(gpu.handle)
            gpu.facts = msgspec.structs.replace(
                gpu.facts,
                memory_used_bytes=int(memory.used),
                memory_total_bytes=int(memory.total),
                utilisation_ratio=self._utilisation(gpu.handle),
                temperature_c=self._temperature(gpu.handle),
                ecc_uncorrected=ecc,
            )
            if ecc > gpu.ecc_accepted:
                self._fault(gpu, f"{ecc - gpu.ecc_accepted} uncorrectable ECC errors")

    def wait(self) -> bool:
        """Take the next error that the driver tells within WAIT_MS; whether there was one."""
        nvml = self._nvml
        if self._events is None:
            return False
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, WAIT_MS)
        except nvml.NVMLError_Timeout:
            return False
        except nvml.NVMLError as error:
            log.warning("GPU errors are not told any more", detail=str(error))
            self._events = None
            return False
        gpu = self._of(event.device)
        if gpu is None:
            return False
        if event.eventType & nvml.nvmlEventTypeXidCriticalError:
            xid = int(event.eventData)
            gpu.facts = msgspec.structs.replace(gpu.facts, xid=xid)
            log.warning("GPU error", gpu=gpu.facts.index, xid=xid)
            if xid in FATAL_XIDS:
                self._fault(gpu, f"Xid {xid}, {FATAL_XIDS[xid]}")
        if event.eventType & nvml.nvmlEventTypeDoubleBitEccError:
            self._fault(gpu, "an uncorrectable ECC error")
        return True

    def faults(self) -> list[GpuTelemetry]:
        """GPUs that can not be trusted, until an operator says otherwise."""
        return [gpu.facts for gpu in self._gpus if gpu.facts.fault]

    def forgive(self, spec: EngineSpec) -> None:
        """An operator trusts the GPUs of this engine again. Errors to come count anew."""
        for gpu in self._gpus:
            if uses(spec, gpu.facts):
                gpu.ecc_accepted = gpu.facts.ecc_uncorrected
                gpu.facts = msgspec.structs.replace(gpu.facts, fault="")

    # ------------------------------------------------------------ inside

    def _add(self, index: int) -> None:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        ecc = self._uncorrected(handle)
        facts = GpuTelemetry(
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
            ecc_uncorrected=ecc,
        )
        # Errors before this agent began may have been dealt with; only those to come count.
        self._gpus.append(_Gpu(handle, facts, ecc))

    def _listen(self) -> None:
        nvml = self._nvml
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        events = nvml.nvmlEventSetCreate()
        for gpu in self._gpus:
            try:
                able = nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle)
                nvml.nvmlDeviceRegisterEvents(gpu.handle, wanted & able, events)
            except nvml.NVMLError as error:
                log.info("GPU tells no errors", gpu=gpu.facts.index, detail=str(error))
                continue
            self._events = events

    def _fault(self, gpu: _Gpu, why: str) -> None:
        if not gpu.facts.fault:
            log.warning("GPU at fault", gpu=gpu.facts.index, detail=why)
            gpu.facts = msgspec.structs.replace(gpu.facts, fault=why)

    def _of(self, device: Any) -> _Gpu | None:
        nvml = self._nvml
        try:
            uuid = _text(nvml.nvmlDeviceGetUUID(device))
        except nvml.NVMLError:
            # A GPU that has fallen off the bus can not say which one it is.
            lost = [gpu for gpu in self._gpus if not self._is_reachable(gpu)]
            return lost[0] if lost else None
        return next((gpu for gpu in self._gpus if gpu.facts.uuid == uuid), None)

    def _is_reachable(self, gpu: _Gpu) -> bool:
        try:
            self._nvml.nvmlDeviceGetMemoryInfo(gpu.handle)
        except self._nvml.NVMLError:
            return False
        return True

    def _uncorrected(self, handle: Any) -> int:
        nvml = self._nvml
        try:
            return int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        except nvml.NVMLError:
            return 0

    def _utilisation(self, handle: Any) -> float:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / _PERCENT)
        except self._nvml.NVMLError:
            return 0.0

    def _temperature(self, handle: Any) -> int:
        nvml = self._nvml
        try:
            return int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        except nvml.NVMLError:
            return 0


def uses(spec: EngineSpec, gpu: GpuTelemetry) -> bool:
    """Whether the engine runs on this GPU; one that does not say so may run on any."""
    named = str(spec.options.get("visible_devices") or "")
    if not named:
        return True
    return any(one.strip() in (str(gpu.index), gpu.uuid) for one in named.split(","))


def cordon_of(spec: EngineSpec, faults: Iterable[GpuTelemetry]) -> str:
    """Why an engine must not take work because of the GPUs that it runs on; empty when it may."""
    return "; ".join(f"GPU {gpu.index}: {gpu.fault}" for gpu in faults if uses(spec, gpu))


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
