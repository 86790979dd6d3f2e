"""Search space of each local strategy: every division of a node's cores that is worth a trial.

It is arithmetic only. Combinations that the planner refuses (a batch that is not divisible, more
stages than layers) are left out by `spaces`, with the planner's reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.spec.extensions import STRATEGIES
from paceline.spec.models import TrialRequest
from paceline.tune.spaces import cores_wanted

if TYPE_CHECKING:
    from collections.abc import Sequence


MOST_STAGES = 8
# Micro-batches per stage. With one, the bubble takes half of the time, with eight about a tenth
# ((s - 1) / (m + s - 1)). With more, micro-batches are too small for efficient operations.
MICRO_BATCHES_PER_STAGE = (1, 2, 4, 8)


def local_requests(
    strategy: str, *, cores: int, batch: int, oversubscribe: bool
) -> list[TrialRequest]:
    """Return the default first, then every other division of `cores`; some may mean the same trial.

    batch: samples of a step on this node. oversubscribe: more workers than cores are allowed; only
    requests that need it set it.
    """
    layouts: list[dict[str, Any]] = [{}, *STRATEGIES.get(strategy).search_space(cores, batch)]
    requests = [_request(strategy, layout) for layout in layouts]
    return [_oversubscribed(r, cores) if oversubscribe else r for r in requests]


def neighbouring_split_points(
    split_points: Sequence[int], possible: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return all variants with one split point moved to the previous or next possible place.

    possible: ascending indexes of layers at which a stage may begin; it contains `split_points`.
    """
    found: list[tuple[int, ...]] = []
    for number, cut in enumerate(split_points):
        place = possible.index(cut)
        beside = (*possible[max(place - 1, 0) : place], *possible[place + 1 : place + 2])
        found += [
            (*split_points[:number], moved, *split_points[number + 1 :])
            for moved in beside
            if moved not in split_points
        ]
    return found


def _request(strategy: str, layout: dict[str, Any]) -> TrialRequest:
    return TrialRequest(launcher="local", local_strategy=strategy, **layout)


def _oversubscribed(request: TrialRequest, cores: int) -> TrialRequest:
    needed = cores_wanted(request, cores) > cores
    return request.model_copy(update={"oversubscribe": True}) if needed else request
