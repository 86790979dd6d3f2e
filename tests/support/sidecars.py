"""Wait for a sidecar that this process started."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_for

from paceline.base.errors import DataError
from paceline.measure.records.files import read_json
from paceline.measure.telemetry import SidecarHandle


def port_of(handle: SidecarHandle, state: Path, limit_s: float = 60.0) -> int | None:
    """Wait until the sidecar samples; return the port of its metrics, None without metrics.

    state: the file in which it describes itself.
    """

    def description() -> dict[str, Any] | None:
        with suppress(DataError):
            found = read_json(state)
            return found if found["pid"] == handle.pid else None
        return None

    port: int | None = wait_for(description, limit_s, "a sidecar that samples")["port"]
    return port
