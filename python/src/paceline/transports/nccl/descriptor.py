"""Descriptor of `nccl`: collectives between GPUs, one process each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.spec.descriptors import TransportDescriptor
from paceline.transports.gradients import (
    GradientKeys,
    GradientOptions,
    gradient_key_faults,
    gradient_options,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import TrialRequest


class Nccl(TransportDescriptor):
    """NVIDIA's collectives."""

    name = "nccl"
    summary = "NVIDIA's NCCL, between GPUs"
    position = 50
    implementation = "paceline.transports.nccl.transport:NcclTransport"
    Keys = GradientKeys
    Options = GradientOptions
    devices = ("cuda",)
    joins_flat_only = True
    sends_gradients = True

    def auto_priority(self, request: TrialRequest) -> int | None:
        return 45

    def key_faults(self, request: TrialRequest) -> Iterator[str]:
        yield from gradient_key_faults(request)

    def options(self, request: TrialRequest) -> GradientOptions:
        return gradient_options(request)
