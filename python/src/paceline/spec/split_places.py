"""Where each workload's model may be cut, so that a spec is refused before a model is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.spec.workloads import ModelName

# Layers at which a stage may begin, in the order of the model's layers: all but the first and
# those that work in place. A test compares them with the models.
SPLIT_PLACES: dict[ModelName, tuple[int, ...]] = {
    "alexnet": (2, 3, 5, 6, 8, 10, 12, 13, 14, 15, 16, 18, 19, 21),
    "vgg16": (
        2, 4, 5, 7, 9, 10, 12, 14, 16, 17, 19, 21, 23, 24, 26, 28, 30, 31, 32, 33, 35, 36, 38, 39,
    ),
    "tiny-alexnet": (2, 3, 5, 6, 8, 9, 10, 11, 12, 14, 15, 17),
    "tiny-vgg": (2, 4, 5, 7, 9, 10, 12, 14, 15, 16, 17, 19, 20, 22, 23),
}  # fmt: skip


def check_stages(model: ModelName, stages: int, split_points: Sequence[int] | None) -> None:
    """Raise UsageError if the model cannot be cut into so many stages, or not there."""
    places = SPLIT_PLACES[model]
    if stages > len(places) + 1:
        raise UsageError(f"stages: {model} has at most {len(places) + 1}, got {stages}")
    wrong = [cut for cut in split_points or () if cut not in places]
    if wrong:
        raise UsageError(
            f"split_points: a stage of {model} can begin at layer {', '.join(map(str, places))}, "
            f"got {', '.join(map(str, wrong))}"
        )
