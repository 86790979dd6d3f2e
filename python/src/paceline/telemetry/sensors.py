"""Temperatures and clock of a host. The only home of psutil, which knows the many ways in which
machines tell them."""

from __future__ import annotations

import psutil

_MEGAHERTZ = 1e6


def read_temperatures() -> dict[str, float]:
    """Degrees Celsius by sensor, named `chip` or `chip/label`; empty where none can be read.

    Where a chip has a sensor for its package, those of its cores are left out: a large host has
    hundreds.
    """
    # The attribute is missing where psutil cannot know; virtual machines have no sensors.
    read = getattr(psutil, "sensors_temperatures", dict)
    found: dict[str, float] = {}
    for chip, sensors in read().items():
        has_package = any(sensor.label.startswith("Package") for sensor in sensors)
        for sensor in sensors:
            if has_package and sensor.label.startswith("Core"):
                continue
            name = f"{chip}/{sensor.label}" if sensor.label else chip
            found[_unused(name, found)] = sensor.current
    return found


def read_frequency_hertz() -> float | None:
    """The mean clock of the cores at the moment; None where it cannot be read."""
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError, ValueError):  # files of a driver that cannot answer
        return None
    # None (whatever its type stubs say) and 0 both stand for "not known" there
    megahertz: float | None = getattr(frequency, "current", None)
    return megahertz * _MEGAHERTZ if megahertz else None


def _unused(name: str, taken: dict[str, float]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name} {number}" in taken:
        number += 1
    return f"{name} {number}"
