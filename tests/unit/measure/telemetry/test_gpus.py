"""GPUs read through a fake NVML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.measure.telemetry import host_reading
from paceline.measure.telemetry.host_reading import GpuReader


class NVMLError(Exception):
    """As pynvml's."""


# What GPUs of the fake answer, by function.
ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetName": lambda gpu: f"GPU {gpu}",
    "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=30 + gpu, memory=99),
    "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=1000 + gpu, total=4000),
    "nvmlDeviceGetPowerUsage": lambda gpu: 250_500,
    "nvmlDeviceGetClockInfo": lambda gpu, kind: {1: 1500, 2: 2600}[kind],
    "nvmlDeviceGetTemperature": lambda gpu, kind: {0: 55}[kind],
}


class FakeNvml:
    """Two GPUs; `silent` names functions that the second does not support."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, starts: bool = True) -> None:
        self.starts = starts
        self.silent: set[str] = set()
        self.gone = False

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.starts:
            raise NVMLError("Driver/library version mismatch")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def __getattr__(self, function: str):
        def answer(gpu: int, *arguments: int):
            if self.gone or (gpu == 1 and function in self.silent):
                raise NVMLError(function)
            return ANSWERS[function](gpu, *arguments)

        return answer


def test_values_are_in_base_units() -> None:
    gpus = GpuReader(FakeNvml()).read()
    assert gpus["0"] == {
        "name": "GPU 0",
        "utilization_ratio": 0.3,
        "memory_used_bytes": 1000,
        "memory_total_bytes": 4000,
        "power_watts": 250.5,
        "sm_clock_hertz": 1.5e9,
        "memory_clock_hertz": 2.6e9,
        "temperature_celsius": 55.0,
    }
    assert (gpus["1"]["name"], gpus["1"]["utilization_ratio"]) == ("GPU 1", 0.31)


def test_value_that_a_gpu_lacks_is_missing_and_the_others_stay() -> None:
    nvml = FakeNvml()
    nvml.silent = {"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"}
    gpus = GpuReader(nvml).read()
    assert gpus["0"]["utilization_ratio"] == 0.3
    assert gpus["1"]["utilization_ratio"] is None
    assert gpus["1"]["power_watts"] is None
    assert gpus["1"]["memory_used_bytes"] == 1001


def test_gpus_that_disappear_keep_their_names_only() -> None:
    nvml = FakeNvml()
    reader = GpuReader(nvml)
    nvml.gone = True
    values = [
        {name: value for name, value in gpu.items() if value is not None}
        for gpu in reader.read().values()
    ]
    assert values == [{"name": "GPU 0"}, {"name": "GPU 1"}]


def test_driver_that_does_not_start_means_no_gpus() -> None:
    assert GpuReader(FakeNvml(starts=False)).read() == {}


def test_host_without_a_driver_does_not_load_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_reading, "_DRIVER_FILES", ())
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)  # an import would fail
    assert GpuReader().read() == {}


def test_library_that_is_missing_means_no_gpus(monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setattr(host_reading, "_DRIVER_FILES", (tmp_path,))
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with caplog.at_level("INFO", "paceline.sidecar"):
        assert GpuReader().read() == {}
    assert "nvidia-ml-py" in caplog.text


def test_real_library_has_what_is_asked_of_it() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert issubclass(pynvml.NVMLError, Exception)
    for name in ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", *ANSWERS):
        assert callable(getattr(pynvml, name)), name
    assert {pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM} == {1, 2}
    assert pynvml.NVML_TEMPERATURE_GPU == 0
