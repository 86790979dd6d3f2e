"""For how long tasks waited for a resource: Linux pressure stall information.

Source: kernel documentation, accounting/psi.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paceline.records.rows import Pressure
from paceline.telemetry.kernel_files import KernelFile

if TYPE_CHECKING:
    from pathlib import Path

RESOURCES = ("cpu", "memory", "io")
_TOTAL = re.compile(rb"^(some|full) .*total=(\d+)", re.MULTILINE)
_MICROSECONDS = 1e6


class PressureReader:
    """Reads /proc/pressure; what the kernel was not built, or not started, to count is left out."""

    def __init__(self, proc: Path) -> None:
        self._files = {name: KernelFile(proc / "pressure" / name) for name in RESOURCES}

    def read(self) -> dict[str, Pressure]:
        """By resource."""
        found = {name: parse_pressure(name, file.read()) for name, file in self._files.items()}
        return {name: pressure for name, pressure in found.items() if pressure is not None}


def parse_pressure(resource: str, content: bytes) -> Pressure | None:
    """From the text of one file; None where it says nothing."""
    seconds = {kind: int(total) / _MICROSECONDS for kind, total in _TOTAL.findall(content)}
    if b"some" not in seconds:
        return None
    # "CPU full is undefined at the system level": a zero for old programs' sake
    full_s = None if resource == "cpu" else seconds.get(b"full")
    return Pressure(some_s=seconds[b"some"], full_s=full_s)
