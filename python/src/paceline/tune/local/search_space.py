"""Search space of each local strategy: every division of a node's cores that is worth a trial.

It is arithmetic only. Combinations that the planner refuses (a batch that is not divisible, more
stages than layers) are left out by `spaces`, with the planner's reason.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, get_args

from paceline.spec.models import TrialRequest
from paceline.spec.values import Balance, PipelineSchedule
from paceline.tune.spaces import cores_wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.spec.values import LocalStrategy

MOST_STAGES = 8
# Micro-batches per stage. With one, the bubble takes half of the time, with eight about a tenth
# ((s - 1) / (m + s - 1)). With more, micro-batches are too small for efficient operations.
MICRO_BATCHES_PER_STAGE = (1, 2, 4, 8)


def local_requests(
    strategy: LocalStrategy, *, cores: int, batch: int, oversubscribe: bool
) -> list[TrialRequest]:
    """Return the default first, then every other division of `cores`; some may mean the same trial.

    batch: samples of a step on this node. oversubscribe: more workers than cores are allowed; only
    requests that need it set it.
    """
    layouts: list[dict[str, Any]] = [{}, *_LAYOUTS[strategy](cores, batch)]
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


def _request(strategy: LocalStrategy, layout: dict[str, Any]) -> TrialRequest:
    return TrialRequest(launcher="local", local_strategy=strategy, **layout)


def _oversubscribed(request: TrialRequest, cores: int) -> TrialRequest:
    needed = cores_wanted(request, cores) > cores
    return request.model_copy(update={"oversubscribe": True}) if needed else request


def _sequential(_cores: int, _batch: int) -> Iterator[dict[str, Any]]:
    yield {}


def _intraop(cores: int, _batch: int) -> Iterator[dict[str, Any]]:
    yield {"threads_per_rank": cores}


def _threads(cores: int, _batch: int) -> Iterator[dict[str, Any]]:
    for replicas in _divisors(cores):
        yield {"replicas": replicas, "threads_per_rank": cores}


def _processes(cores: int, _batch: int) -> Iterator[dict[str, Any]]:
    for ranks in _divisors(cores):
        yield {"ranks_per_node": ranks, "threads_per_rank": cores // ranks}


def _pipeline(cores: int, batch: int) -> Iterator[dict[str, Any]]:
    for stages in range(2, min(cores, MOST_STAGES) + 1):
        layout = {"stages": stages, "threads_per_rank": cores // stages}
        for settings in _pipeline_settings(stages, batch):
            yield {**layout, **settings}


def _hybrid(cores: int, batch: int) -> Iterator[dict[str, Any]]:
    for replicas, stages, threads in hybrid_layouts(cores):
        layout = {"replicas": replicas, "stages": stages, "threads_per_rank": threads}
        for settings in _pipeline_settings(stages, batch // replicas):
            yield {**layout, **settings}


def hybrid_layouts(cores: int) -> list[tuple[int, int, int]]:
    """Return (replicas, stages, threads) that use the most cores; 2 x 2 if there are fewer than
    four.

    Two replicas of two stages are the smallest hybrid, which oversubscribes a smaller node.
    """
    if cores < 4:
        return [(2, 2, 1)]
    most_stages = min(cores // 2, MOST_STAGES)
    pairs = [
        (replicas, stages)
        for replicas in range(2, cores // 2 + 1)
        for stages in range(2, most_stages + 1)
        if replicas * stages <= cores
    ]
    layouts = [(replicas, stages, cores // (replicas * stages)) for replicas, stages in pairs]
    used = max(replicas * stages * threads for replicas, stages, threads in layouts)
    return [layout for layout in layouts if layout[0] * layout[1] * layout[2] == used]


def _pipeline_settings(stages: int, share: int) -> Iterator[dict[str, Any]]:
    """Yield the settings of a pipeline. share: samples of a step per replica."""
    counts = [stages * factor for factor in MICRO_BATCHES_PER_STAGE if stages * factor <= share]
    for micro_batches, schedule, balance in product(
        counts, get_args(PipelineSchedule), get_args(Balance)
    ):
        yield {"micro_batches": micro_batches, "schedule": schedule, "balance": balance}


def _divisors(cores: int) -> list[int]:
    """Return the divisors of `cores` from two up: numbers of workers with equally many cores
    each."""
    return [k for k in range(2, cores + 1) if cores % k == 0]


_LAYOUTS: dict[LocalStrategy, Callable[[int, int], Iterator[dict[str, Any]]]] = {
    "sequential": _sequential,
    "intraop": _intraop,
    "threads": _threads,
    "processes": _processes,
    "pipeline": _pipeline,
    "hybrid": _hybrid,
}
