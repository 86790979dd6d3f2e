"""GPUs of a host, read through NVIDIA's management library. Only this module imports pynvml
(nvidia-ml-py)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_MEGAHERTZ = 1e6
_MILLIWATTS = 1000.0
# One of them exists wherever the driver does: on a host or in a container, and under WSL 2.
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_log = logging.getLogger("paceline.sidecar")


class GpuReader:
    """Reads the GPUs that this process may see; none without a driver.

    The library is large, so it is loaded only if a driver exists. A GPU that disappears, or a
    driver that is unloaded, gives missing values, not an error.
    """

    def __init__(self, nvml: Any = None) -> None:
        """nvml: for tests; otherwise pynvml if this host has a driver."""
        self._nvml: Any = nvml or _load_nvml()
        self._gpus: list[tuple[Any, str]] = []  # NVML's handle and the name
        if self._nvml is not None:
            self._open()

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the values of each GPU, by NVML's index (that of nvidia-smi)."""
        return {
            str(index): {"name": name, **self._values(handle)}
            for index, (handle, name) in enumerate(self._gpus)
        }

    def _open(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            _log.info("GPUs are not sampled: NVML does not start: %s", error)
            return
        for index in range(self._ask(nvml.nvmlDeviceGetCount) or 0):
            handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:
                name = self._ask(nvml.nvmlDeviceGetName, handle)
                self._gpus.append((handle, name or "unknown"))

    def _values(self, gpu: Any) -> dict[str, float | None]:
        nvml, ask = self._nvml, self._ask
        rates = ask(nvml.nvmlDeviceGetUtilizationRates, gpu)
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, gpu)

        def scaled(factor: float, function: Callable[..., int], *arguments: Any) -> float | None:
            value = ask(function, gpu, *arguments)
            return None if value is None else value * factor

        return {
            "utilization_ratio": None if rates is None else rates.gpu / 100.0,
            "memory_used_bytes": None if memory is None else int(memory.used),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "power_watts": scaled(1 / _MILLIWATTS, nvml.nvmlDeviceGetPowerUsage),
            "sm_clock_hertz": scaled(_MEGAHERTZ, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            "memory_clock_hertz": scaled(
                _MEGAHERTZ, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM
            ),
            "temperature_celsius": scaled(
                1.0, nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU
            ),
        }

    def _ask(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Return None where the GPU has no such value, or where MIG hides it."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


def _load_nvml() -> Any:
    """Return the module pynvml, which has no types; None if it or the driver is missing."""
    if not any(file.exists() for file in _DRIVER_FILES):
        return None
    try:
        import pynvml  # noqa: PLC0415
    except ImportError:
        _log.info("GPUs are not sampled: the package nvidia-ml-py is not installed")
        return None
    return pynvml
