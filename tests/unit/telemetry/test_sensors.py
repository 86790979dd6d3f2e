"""Temperatures and clocks as psutil tells them, or does not."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from paceline.telemetry.sensors import read_frequency_hertz, read_temperatures


def sensor(label: str, current: float) -> SimpleNamespace:
    return SimpleNamespace(label=label, current=current, high=None, critical=None)


def test_sensors_are_named_by_chip_and_label(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "nvme": [sensor("Composite", 41.5), sensor("Composite", 43.0)],
        "acpi": [sensor("", 30)],
    }
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found)
    assert read_temperatures() == {"nvme/Composite": 41.5, "nvme/Composite 2": 43.0, "acpi": 30}


def test_cores_are_left_out_beside_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "coretemp": [sensor("Package id 0", 60.0), sensor("Core 0", 61.0), sensor("Core 1", 59.0)],
        "cores_only": [sensor("Core 0", 50.0)],
    }
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found)
    assert read_temperatures() == {"coretemp/Package id 0": 60.0, "cores_only/Core 0": 50.0}


def test_system_without_sensors_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psutil, "sensors_temperatures")
    assert read_temperatures() == {}


def test_frequency_is_in_hertz(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", lambda: SimpleNamespace(current=2500.5))
    assert read_frequency_hertz() == 2_500_500_000.0


@pytest.mark.parametrize("told", [None, SimpleNamespace(current=0.0)])
def test_frequency_that_is_not_told_is_missing(
    monkeypatch: pytest.MonkeyPatch, told: SimpleNamespace | None
) -> None:
    monkeypatch.setattr(psutil, "cpu_freq", lambda: told)
    assert read_frequency_hertz() is None


def test_driver_that_cannot_answer_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(psutil, "cpu_freq", fail)
    assert read_frequency_hertz() is None
