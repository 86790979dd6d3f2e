"""What each host did meanwhile: one sampler a host, its traces and its metrics.

A run has its processes watched with what is exported here; that imports neither psutil nor
prometheus_client. `service` itself must not be imported here: it runs as
`python -m paceline.telemetry.service`.
"""

from paceline.telemetry.handle import SidecarHandle, sidecar_is_alive, start_sidecar
from paceline.telemetry.options import SidecarOptions

__all__ = ["SidecarHandle", "SidecarOptions", "sidecar_is_alive", "start_sidecar"]
