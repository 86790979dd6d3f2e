"""Telemetry: one sidecar process per trial and host that samples host, processes and ranks.

Importing this package imports neither psutil nor prometheus_client.
"""

from paceline.measure.telemetry.request import (
    SidecarHandle,
    SidecarRequest,
    sidecar_is_alive,
    start_sidecar,
)

__all__ = ["SidecarHandle", "SidecarRequest", "sidecar_is_alive", "start_sidecar"]
