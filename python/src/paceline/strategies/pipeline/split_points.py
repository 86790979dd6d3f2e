"""The best split points of a model.

A split point is the index of the first layer of a stage, in the order of `Task.blocks`.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

Layers = list[tuple[str, "nn.Module"]]


def balanced_split_points(
    layer_costs: Sequence[float],
    stages: int,
    legal: Sequence[int],
    crossing_costs: Sequence[float] | None = None,
) -> list[int]:
    """Choose `stages` - 1 of the `legal` split points so that the slowest stage is fastest.

    layer_costs: cost of each layer, >= 0, in any unit. crossing_costs: cost of a split point at
    each index for the stage on either side; None means no cost. The result is exact, by dynamic
    programming over (number of stages, end). Ties are resolved in favour of cheap early stages,
    then of early split points. `legal` must have at least `stages` - 1 entries.
    """
    layers = len(layer_costs)
    crossing = [0.0] * (layers + 1) if crossing_costs is None else [*crossing_costs, 0.0]
    before = [0.0, *accumulate(layer_costs)]
    places = [*legal, layers]

    def cost(low: int, high: int) -> float:
        received = crossing[low] if low > 0 else 0.0
        sent = crossing[high] if high < layers else 0.0
        return before[high] - before[low] + received + sent

    # best[end]: (cost of the slowest stage, split points) of layers[:end] in the stages so far
    best: dict[int, tuple[float, list[int]]] = {end: (cost(0, end), []) for end in places}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(slowest, cost(low, end)), [*split_points, low])
                for low, (slowest, split_points) in best.items()
                if low < end
            )
            for end in places[stage:]
        }
    return best[layers][1]


def stage_bounds(split_points: Sequence[int], layers: int) -> list[tuple[int, int]]:
    """Return (first layer, one past the last) of each stage."""
    return list(zip([0, *split_points], [*split_points, layers], strict=True))
