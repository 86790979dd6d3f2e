"""What a local strategy could be on a node: every split of its cores that is worth a trial.

Arithmetic only. What the planner then refuses (a batch that does not divide, more stages than the
model has layers) is left out by `spaces`, with the planner's reason.
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
# Micro-batches a stage: one leaves half of the time to the bubble, eight about a tenth
# ((s - 1) / (m + s - 1)); more make the pieces too small for a core to work on well.
MICRO_BATCHES_PER_STAGE = (1, 2, 4, 8)


def local_requests(
    strategy: LocalStrategy, *, cores: int, batch: int, oversubscribe: bool
) -> list[TrialRequest]:
    """The default first, then every other split of `cores`; some may mean the same trial.

    batch: samples of a step on this node. oversubscribe: more workers than cores are allowed; only
    requests that need it ask for it.
    """
    layouts: list[dict[str, Any]] = [{}, *_LAYOUTS[strategy](cores, batch)]
    requests = [_request(strategy, layout) for layout in layouts]
    return [_oversubscribed(r, cores) if oversubscribe else r for r in requests]


def neighbouring_split_points(
    split_points: Sequence[int], possible: Sequence[int]
) -> list[tuple[int, ...]]:
    """Every way of moving one cut to the place before or behind it, where no other cut is.

    possible: indexes of layers at which a stage may begin, ascending; `split points` are of them.
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
    """(replicas, stages, threads) that use the most cores; 2 x 2 where there are fewer than four.

    Two replicas of two stages are the least that is a hybrid, so that oversubscribes a smaller
    node.
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
    """share: samples of a step that one replica gets."""
    counts = [stages * factor for factor in MICRO_BATCHES_PER_STAGE if stages * factor <= share]
    for micro_batches, schedule, balance in product(
        counts, get_args(PipelineSchedule), get_args(Balance)
    ):
        yield {"micro_batches": micro_batches, "schedule": schedule, "balance": balance}


def _divisors(cores: int) -> list[int]:
    """Divisors of `cores` from two up: the number of workers where each has equally many cores."""
    return [k for k in range(2, cores + 1) if cores % k == 0]


_LAYOUTS: dict[LocalStrategy, Callable[[int, int], Iterator[dict[str, Any]]]] = {
    "sequential": _sequential,
    "intraop": _intraop,
    "threads": _threads,
    "processes": _processes,
    "pipeline": _pipeline,
    "hybrid": _hybrid,
}
