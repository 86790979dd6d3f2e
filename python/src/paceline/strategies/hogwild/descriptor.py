"""Descriptor of `hogwild`: processes of one node update the same weights without locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.spec.descriptors import OptionModel
from paceline.spec.placement import NodeCounts
from paceline.strategies.process_per_replica import ProcessPerReplica

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import Experiment, TrialRequest


class HogwildOptions(OptionModel):
    """Planned options of `hogwild`."""

    @property
    def inexact_reason(self) -> str | None:
        return (
            "processes update shared weights without locks (not deterministic, not equivalent by "
            "design)"
        )

    @property
    def updates_within_step(self) -> bool:
        return True


class Hogwild(ProcessPerReplica):
    """k processes with one copy of the weights."""

    name = "hogwild"
    summary = "processes of one node that update the same weights without locks"
    position = 80
    implementation = "paceline.strategies.hogwild.strategy:HogwildStrategy"
    Options = HogwildOptions
    is_candidate_for_best = False
    uses_node_memory = True
    without_cuda = (
        'local_strategy "hogwild" updates weights in the memory of CPUs; use local_strategy = '
        '"processes"'
    )

    def faults(self, request: TrialRequest, experiment: Experiment) -> Iterator[str]:
        if request.nodes > 1:
            yield (
                f'nodes: "hogwild" shares the memory of one node, got {request.nodes}; use '
                'local_strategy = "parameter-server" with update_mode = "asynchronous"'
            )

    def options(
        self, request: TrialRequest, counts: NodeCounts, replica_batch: int, transport: str
    ) -> HogwildOptions:
        return HogwildOptions()

    def updates_by_part(self, options: Any) -> bool:
        return True
