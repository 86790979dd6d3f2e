"""What each host did meanwhile: a sampler process of its own, its trace and its metrics.

A run starts and stops a sidecar with what is exported here; that imports neither psutil nor
prometheus_client. `sidecar` itself must not be imported here: it runs as
`python -m paceline.telemetry.sidecar`.
"""

from paceline.telemetry.handle import SidecarHandle, sidecar_is_alive, start_sidecar
from paceline.telemetry.options import SidecarOptions

__all__ = ["SidecarHandle", "SidecarOptions", "sidecar_is_alive", "start_sidecar"]
