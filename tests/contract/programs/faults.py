"""Faults in averaging that the checks must find."""

from __future__ import annotations

from typing import Any

import torch

from paceline.train.strategies import sharded
from paceline.train.strategies.parameter_server import strategy as parameter_server
from paceline.train.strategies.parameter_server.messages import ServerShard
from paceline.train.strategies.reduction.buckets import Buckets
from paceline.train.strategies.reduction.node_shards import OptimizerShard


def break_the_averaging() -> None:
    """Wherever this process sums gradients from now on, it does so wrongly."""
    _take_the_mean_of_buckets()
    _halve_what_is_summed()
    _halve_what_servers_get()
    _halve_what_is_scattered()


class _Mean:
    """A sum of gradients that is too small: ranks have divided by the global batch already."""

    def __init__(self, healthy: Any) -> None:
        self._healthy = healthy

    def start(self, bucket: Any) -> Any:
        size = torch.distributed.get_world_size()
        return self._healthy.start(bucket).then(lambda f: f.value().div_(size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._healthy, name)


def _take_the_mean_of_buckets() -> None:
    healthy = Buckets.__init__

    def init(self: Buckets, stopwatch: Any, gradient_sum: Any, **options: Any) -> None:
        healthy(self, stopwatch, _Mean(gradient_sum), **options)

    Buckets.__init__ = init


def _halve_what_is_summed() -> None:
    """What a worker sums for all replicas is half of what it should be."""
    healthy = OptimizerShard.reduce

    def reduce_to_halves(self: OptimizerShard, *arguments: Any) -> None:
        healthy(self, *arguments)
        for gradient in self.gradient_tensors():
            gradient.mul_(0.5)

    OptimizerShard.reduce = reduce_to_halves


def _halve_what_is_scattered() -> None:
    """Halve the sums of gradients of ranks that own shards of the parameters."""
    healthy = sharded.reduce_scatter_single

    def scatter_halves(output: torch.Tensor, *arguments: Any, **options: Any) -> None:
        healthy(output, *arguments, **options)
        output.mul_(0.5)

    sharded.reduce_scatter_single = scatter_halves


def _halve_what_servers_get() -> None:
    """What a server gets, and what workers sum for the records, is half of what it should be."""
    healthy_push, healthy_sum = ServerShard.push, parameter_server.all_reduce_tensors

    def push_half(self: ServerShard, worker: int, request: Any, gradient: Any) -> None:
        healthy_push(self, worker, request, gradient * 0.5)

    def sum_halves(tensors: Any) -> None:
        healthy_sum(tensors)
        for tensor in tensors:
            tensor.mul_(0.5)

    ServerShard.push = push_half
    parameter_server.all_reduce_tensors = sum_halves
