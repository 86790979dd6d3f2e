"""GPUs of a host, through NVIDIA's management library. The only home of pynvml (nvidia-ml-py)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.records.rows import GpuSample

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_MEGAHERTZ = 1e6
_MILLIWATTS = 1000.0
# One of them is there wherever the driver is: on a host or in a container; under WSL 2
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_log = logging.getLogger("paceline.sidecar")


class GpuReader:
    """Reads the GPUs that this process may see; none where there is no driver.

    The library is loaded only where a driver is, as it is large. A GPU that falls off its bus, or
    a driver that is unloaded, ends in samples without figures, not in an error.
    """

    def __init__(self, nvml: Any = None) -> None:
        """`nvml` is for tests; else pynvml where this host has a driver."""
        self._nvml: Any = nvml or _load_nvml()
        self._gpus: list[tuple[Any, str]] = []  # NVML's handle and the name
        if self._nvml is not None:
            self._open()

    def read(self) -> list[GpuSample]:
        """By NVML's index, which is that of nvidia-smi."""
        return [self._sample(handle, name) for handle, name in self._gpus]

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None:
            self._ask(self._nvml.nvmlShutdown)
        self._nvml, self._gpus = None, []

    def _open(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            _log.info("GPUs are not sampled: NVML does not start: %s", error)
            self._nvml = None
            return
        for index in range(self._ask(nvml.nvmlDeviceGetCount) or 0):
            handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:
                name = self._ask(nvml.nvmlDeviceGetName, handle)
                self._gpus.append((handle, name or "unknown"))

    def _sample(self, handle: Any, name: str) -> GpuSample:
        nvml, ask = self._nvml, self._ask
        rates = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = ask(nvml.nvmlDeviceGetPowerUsage, handle)
        return GpuSample(
            name=name,
            utilization_percent=None if rates is None else float(rates.gpu),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_watts=None if milliwatts is None else milliwatts / _MILLIWATTS,
            sm_clock_hertz=_hertz(ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)),
            memory_clock_hertz=_hertz(
                ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM)
            ),
            temperature_celsius=_float(
                ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
            ),
        )

    def _ask(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """None where the GPU does not say: a figure that it lacks, or that MIG hides."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


def _load_nvml() -> Any:
    """The module pynvml, which has no types; None where it or a driver is missing."""
    if not any(file.exists() for file in _DRIVER_FILES):
        return None
    try:
        import pynvml  # noqa: PLC0415
    except ImportError:
        _log.info("GPUs are not sampled: the package nvidia-ml-py is not installed")
        return None
    return pynvml


def _hertz(megahertz: int | None) -> float | None:
    return None if megahertz is None else megahertz * _MEGAHERTZ


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)
