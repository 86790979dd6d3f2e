"""Descriptor of `nccl`: collectives between GPUs, one process each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.transports.gradients import GradientTransport

if TYPE_CHECKING:
    from paceline.spec.models import TrialRequest


class Nccl(GradientTransport):
    """NVIDIA's collectives."""

    name = "nccl"
    summary = "NVIDIA's NCCL, between GPUs"
    position = 50
    implementation = "paceline.transports.nccl.transport:NcclTransport"
    devices = ("cuda",)
    joins_flat_only = True
    serves_scripts = True

    def auto_priority(self, request: TrialRequest) -> int | None:
        return 45
