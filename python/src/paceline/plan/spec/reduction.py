"""Reduction of a step: the fact about a strategy from which plan and analyses derive the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReduction:
    """Path from the gradients of all workers to new weights; a worker is a rank or a thread.

    sends: what ranks exchange.
    among: the ranks that join one operation between nodes: all of them, one of each node after its
    node has summed in its memory, or those of one stage each. None: no sums with a model of their
    time.
    in_buckets: the transport sums gradients bucket by bucket while the backward pass computes.
    shards: the workers that divide the update of the parameters: those of a node, or those of all
    nodes. None: each replica updates all parameters.
    updates: "by part" uses the gradient of a part of the batch or of the model, when the rest is
    not known yet or already outdated; "within step" does so while the passes of a step compute, so
    that its loss has no equivalent.
    bytes_per_parameter: the payload of all-reduces that move as much between nodes in a step.
    """

    sends: Literal["gradients", "weights"] = "gradients"
    among: Literal["ranks", "nodes", "stages"] | None = None
    in_buckets: bool = False
    shards: Literal["node", "all nodes"] | None = None
    updates: Literal["after step", "by part", "within step"] = "after step"
    bytes_per_parameter: float = 4.0

    @property
    def averages_weights(self) -> bool:
        """Return whether each rank updates its own weights, which are averaged in rounds."""
        return self.sends == "weights"

    @property
    def is_predictable(self) -> bool:
        """Return whether `paceline predict` knows what nodes send in a step."""
        return self.among is not None and not self.averages_weights

    @property
    def divides_updates(self) -> bool:
        """Return whether several workers update shards of the parameters."""
        return self.shards is not None

    @property
    def divides_updates_among_nodes(self) -> bool:
        """Return whether each node updates a part of the parameters, instead of all of them."""
        return self.shards == "all nodes"

    @property
    def updates_by_part(self) -> bool:
        """Return whether an update does not know the whole gradient of a step."""
        return self.updates != "after step"

    @property
    def updates_within_step(self) -> bool:
        """Return whether weights change within a step, so that its loss has no equivalent."""
        return self.updates == "within step"


# Each replica updates all parameters, with gradients that the transport averages (DDP).
AVERAGED_IN_BUCKETS = StepReduction(among="ranks", in_buckets=True)
# Workers of a node sum and update one shard each; shards are all-reduced between nodes.
NODE_SHARDS = StepReduction(among="nodes", shards="node")
