"""Descriptor of `gloo`: torch's own collectives over TCP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.transports.gradients import GradientTransport

if TYPE_CHECKING:
    from paceline.spec.models import TrialRequest


class Gloo(GradientTransport):
    """Gloo over TCP."""

    name = "gloo"
    summary = "torch's Gloo, over TCP"
    position = 30
    implementation = "paceline.transports.gloo.transport:GlooTransport"
    devices = ("cpu", "cuda")
    serves_scripts = True
    sends_messages = True

    def auto_priority(self, request: TrialRequest) -> int | None:
        return 10

    def all_reduce_algorithms(self, nodes: int, options: Any) -> tuple[str, ...]:
        """Return Gloo's default algorithm, a ring in segments (gloo/allreduce.cc)."""
        return ("ring",)
