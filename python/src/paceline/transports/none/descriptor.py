"""Descriptor of `none`: a single rank has no peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.spec.descriptors import TransportDescriptor

if TYPE_CHECKING:
    from paceline.spec.models import TrialRequest


class NoTransport(TransportDescriptor):
    """Nothing to carry."""

    name = "none"
    summary = "one rank, nothing is sent"
    position = 10
    devices = ("cpu", "cuda")
    spans_nodes = False
    joins_ranks = False
    opens_process_group = False

    def auto_priority(self, request: TrialRequest) -> int | None:
        return 50
