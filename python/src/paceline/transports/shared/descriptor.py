"""Descriptor of `shared`: ranks of one node exchange data through its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.spec.descriptors import TransportDescriptor
from paceline.spec.transport_rules import strategy_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import TrialRequest


class Shared(TransportDescriptor):
    """The memory of one node."""

    name = "shared"
    summary = "the memory that the ranks of one node share"
    position = 20
    devices = ("cpu", "cuda")  # activations of a pipeline pass through the memory of the CPU
    spans_nodes = False
    opens_process_group = False

    def auto_priority(self, request: TrialRequest) -> int | None:
        return 40

    def faults(self, request: TrialRequest) -> Iterator[str]:
        strategy = strategy_of(request)
        if request.device != "cpu" and strategy is not None and not strategy.uses_node_memory:
            yield '"shared" carries the memory of CPUs, got device = "cuda"'
