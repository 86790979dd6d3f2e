"""Faults in averaging that the checks must find."""

from __future__ import annotations

from typing import Any

import torch

from paceline.strategies.parameter_server import strategy as parameter_server
from paceline.strategies.parameter_server.server import ServerShard
from paceline.strategies.reduction import buckets
from paceline.strategies.reduction.optimizer_shard import OptimizerShard


def break_the_averaging() -> None:
    """Wherever this process sums gradients from now on, it does so wrongly."""
    _take_the_mean_of_buckets()
    _halve_what_is_summed()
    _halve_what_servers_get()


def _take_the_mean_of_buckets() -> None:
    """The mean of what ranks already divided by the global batch: gradients too small."""
    healthy = buckets.sum_gradients

    def mean_gradients(state: Any, bucket: Any) -> Any:
        size = torch.distributed.get_world_size()
        return healthy(state, bucket).then(lambda f: f.value().div_(size))

    # DDP looks at the hook's annotations
    mean_gradients.__annotations__ = healthy.__annotations__
    buckets.sum_gradients = mean_gradients


def _halve_what_is_summed() -> None:
    """What a worker sums for all replicas is half of what it should be."""
    healthy = OptimizerShard.reduce

    def reduce_to_halves(self: OptimizerShard, *arguments: Any) -> None:
        healthy(self, *arguments)
        for gradient in self.gradient_tensors():
            gradient.mul_(0.5)

    OptimizerShard.reduce = reduce_to_halves


def _halve_what_servers_get() -> None:
    """What a server gets, and what workers sum for the records, is half of what it should be."""
    healthy_push, healthy_sum = ServerShard.push, parameter_server.all_reduce_tensors

    def push_half(self: ServerShard, update: Any, gradient: Any) -> None:
        healthy_push(self, update, gradient * 0.5)

    def sum_halves(tensors: Any) -> None:
        healthy_sum(tensors)
        for tensor in tensors:
            tensor.mul_(0.5)

    ServerShard.push = push_half
    parameter_server.all_reduce_tensors = sum_halves
