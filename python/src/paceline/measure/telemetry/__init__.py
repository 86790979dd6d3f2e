"""Telemetry: one sidecar process per trial and host that samples host, processes and ranks.

Importing this package imports neither psutil nor prometheus_client.
"""

from paceline.measure.telemetry.client import SidecarHandle, sidecar_is_alive, start_sidecar
from paceline.measure.telemetry.request import SidecarRequest

__all__ = ["SidecarHandle", "SidecarRequest", "sidecar_is_alive", "start_sidecar"]
