"""Descriptor of `gloo`: torch's own collectives over TCP."""

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


class Gloo(TransportDescriptor):
    """Gloo over TCP."""

    name = "gloo"
    summary = "torch's Gloo, over TCP"
    position = 30
    implementation = "paceline.transports.gloo.transport:GlooTransport"
    Keys = GradientKeys
    Options = GradientOptions
    devices = ("cpu", "cuda")
    sends_gradients = True

    def auto_priority(self, request: TrialRequest) -> int | None:
        return 10

    def key_faults(self, request: TrialRequest) -> Iterator[str]:
        yield from gradient_key_faults(request)

    def options(self, request: TrialRequest) -> GradientOptions:
        return gradient_options(request)
