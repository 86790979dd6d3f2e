"""Descriptor of `accumulate`: one process that trains each batch in several pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from paceline.plan.spec.descriptors import KeyModel, OptionModel, StrategyDescriptor
from paceline.plan.spec.placement import NodeCounts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.plan.spec.models import Experiment, TrialRequest
    from paceline.plan.spec.placement import Placement

DEFAULT_PIECES = 2


class AccumulateKeys(KeyModel):
    """Keys of `accumulate` in a [[trials]] entry."""

    pieces: int | None = Field(default=None, ge=2)  # of a batch


class AccumulateOptions(OptionModel):
    """Planned options of `accumulate`."""

    pieces: int = DEFAULT_PIECES

    def name_parts(self, placement: Placement) -> Iterator[str]:
        yield f"p{self.pieces}"

    def labels(self) -> Iterator[str]:
        yield f"{self.pieces} pieces"


class Accumulate(StrategyDescriptor):
    """One replica; the gradients of several pieces of a batch are summed."""

    name = "accumulate"
    summary = "one process, a batch in several pieces"
    implementation = "paceline_accumulate.strategy:AccumulateStrategy"
    Keys = AccumulateKeys
    Options = AccumulateOptions

    def counts(self, request: TrialRequest, cores: int) -> NodeCounts:
        threads = request.threads_per_rank
        return NodeCounts(ranks=1, threads_per_rank=1 if threads == "auto" else threads)

    def faults(self, request: TrialRequest, experiment: Experiment) -> Iterator[str]:
        if request.nodes > 1:
            yield f'nodes: "accumulate" runs on one node, got {request.nodes}; use nodes = 1'

    def options(
        self, request: TrialRequest, counts: NodeCounts, replica_batch: int, transport: str
    ) -> OptionModel:
        pieces = request.keys(AccumulateKeys).pieces or DEFAULT_PIECES
        return AccumulateOptions(pieces=pieces)

    def layout_keys(self, placement: Placement, options: Any) -> dict[str, Any]:
        return {"threads_per_rank": placement.threads_per_rank, "pieces": options.pieces}
