"""Sums over workers: gradients in the memory of a node, and small vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.collectives.node.shared_node import SharedNode
from paceline.collectives.recorder import PassCommunication
from paceline.plan.trials.trial import Trial
from paceline.train.strategies.reduction.factor_exchange import open_group
from paceline.train.strategies.reduction.flat_layout import (
    FlatLayout,
    ParameterShard,
    shared_arrays,
)
from paceline.train.training.batch_norm import batch_norms, synchronise


class SharedGradients:
    """One worker's gradients of the shards that other workers own.

    The worker writes them during its backward pass, and the others read them after a barrier. Both
    sides construct this object over the same memory.
    """

    def __init__(
        self,
        layout: FlatLayout,
        shards_by_worker: Sequence[Sequence[ParameterShard]],
        worker: int,
        memory: Tensor,
    ) -> None:
        """memory: float32, shape (elements_needed(…),)."""
        self._layout = layout
        others = list(_shards_of_others(shards_by_worker, worker))
        parts = torch.split(memory, [shard.elements for shard in others])
        self._places = dict(zip(others, parts, strict=True))
        self._owned = {shard.name for shard in shards_by_worker[worker]}
        self._is_complete = True

    @staticmethod
    def elements_needed(shards_by_worker: Sequence[Sequence[ParameterShard]], worker: int) -> int:
        """Return the number of float32 elements of the memory: all elements that others own."""
        return sum(s.elements for s in _shards_of_others(shards_by_worker, worker))

    @classmethod
    def of_workers(
        cls,
        shared: SharedNode,
        layout: FlatLayout,
        shards_by_worker: Sequence[Sequence[ParameterShard]],
    ) -> list[Self]:
        """Return those of all workers, in memory of the node; collective."""
        workers = range(len(shards_by_worker))
        elements = [cls.elements_needed(shards_by_worker, worker) for worker in workers]
        memories = shared_arrays(shared, "gradients", elements)
        return [cls(layout, shards_by_worker, worker, memories[worker]) for worker in workers]

    def write_in_backward(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Write each gradient as soon as the last backward pass of a step has computed it.

        A gradient of which the worker owns no shard is released, so that its memory is reused.
        """
        for name in {shard.name for shard in self._places} | self._owned:
            hook = partial(self._write_and_release, name)
            parameters[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Write no gradients meanwhile, because a later pass adds to them."""
        self._is_complete = False
        try:
            yield
        finally:
            self._is_complete = True

    def write(self, name: str, gradient: Tensor) -> None:
        """Copy the shards that others own; they must have read those of the previous step."""
        flat = self._layout.in_storage_order(name, gradient)
        for shard, place in self._places.items():
            if shard.name == name:
                place.copy_(flat[shard.start : shard.stop])

    def read(self, shard: ParameterShard) -> Tensor:
        """Return this worker's gradient of a shard that it does not own, shape (stop - start,)."""
        return self._places[shard]

    def _write_and_release(self, name: str, parameter: nn.Parameter) -> None:
        if not self._is_complete:
            return
        assert parameter.grad is not None
        self.write(name, parameter.grad)
        if name not in self._owned:
            parameter.grad = None


def _shards_of_others(
    shards_by_worker: Sequence[Sequence[ParameterShard]], worker: int
) -> Iterator[ParameterShard]:
    for other, shards in enumerate(shards_by_worker):
        if other != worker:
            yield from shards


class SharedSum:
    """The sum of one vector of each worker. All workers get equal bits.

    Workers are threads or processes; all call it the same number of times.
    """

    def __init__(
        self,
        memory: NDArray[np.float64],
        members: Sequence[int],
        own: int,
        wait: Callable[[], None],
        sum_over_nodes: Callable[[Tensor], None] | None = None,
    ) -> None:
        """memory: shape (2 x workers of the node, width), shared. members: the workers whose
        vectors are summed. own: this worker. wait: barrier of the members. sum_over_nodes: sums a
        vector in place; the first member calls it."""
        self._vectors, self._sums = np.split(memory, 2)
        self._members = list(members)
        self._own = own
        self._wait = wait
        self._sum_over_nodes = sum_over_nodes

    def __call__(self, values: Tensor) -> Tensor:
        """Return the sum of `values`, float64, shape (elements,), on their device."""
        elements = len(values)
        first = self._members[0]
        self._vectors[self._own, :elements] = values.cpu().numpy()
        self._wait()
        # Nobody still reads the previous sum: all have come to the barrier after that.
        if self._own == first:
            total = self._vectors[self._members, :elements].sum(axis=0)
            if self._sum_over_nodes is not None:
                self._sum_over_nodes(torch.from_numpy(total))
            self._sums[first, :elements] = total
        self._wait()
        return torch.from_numpy(self._sums[first, :elements].copy()).to(values.device)


def shared_rows(shared: SharedNode, name: str, workers: int, width: int) -> NDArray[np.float64]:
    """Return the memory of a SharedSum, which all processes of the node share; collective."""
    memory = shared.memory(name, 2 * 8 * workers * width)
    return memory.view(np.float64).reshape(2 * workers, width)


def synchronise_ranks(
    model: nn.Module, trial: Trial, communication: PassCommunication | None = None
) -> PassCommunication | None:
    """Let the batch normalisation of one replica per rank use the statistics of all ranks, if the
    trial requests it; collective. See `batch_norm.synchronise`.

    They have a process group of their own: compressed buckets, or a limit of buckets in flight, may
    start sums of gradients at other times on each rank, so statistics could meet gradients.
    """
    statistics = trial.training.batch_norm
    is_global = statistics == "global" and bool(batch_norms(model))
    group = open_group(trial.limits.collective_s) if is_global else None

    def total(values: Tensor) -> Tensor:
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        return summed

    return synchronise(model, total, statistics, communication)
