"""Weights, gradients and optimiser state divided among all ranks (`sharded`).

Stage 3 of ZeRO (Rajbhandari et al., SC 2020) with torch's `fully_shard`. A unit is a part of the
model whose parameters are gathered together. A step is

    each unit: all ranks gather its parameters, compute their samples, and release the parameters
    in the backward pass each unit again; then its gradients are summed and scattered, so that each
          rank has the sum of the rows that it owns
    each rank: optimiser step of its own rows
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paceline.base.errors import UsageError
from paceline.base.torch_internals import all_gather_single, reduce_scatter_single
from paceline.base.torch_internals.fsdp import AllGather, ReduceScatter
from paceline.collectives.pass_communication import PassCommunication
from paceline.measure.records.communication import StrategyResult
from paceline.plan.trials.rank_context import RankContext
from paceline.plan.trials.trial import Trial
from paceline.train.strategies.reduction.replicate_group import all_reduce_tensors
from paceline.train.strategies.reduction.shared_sums import synchronise_ranks
from paceline.train.strategies.sharded.shards import ShardedTensor, gathered
from paceline.train.strategies.sharded.units import find_units
from paceline.train.training.loss_scale import LOSS_SCALE, LossScale
from paceline.train.training.optimizers import TaskOptimizer, no_gradient, trained_parameters
from paceline.train.training.passes import run_passes
from paceline.train.training.state import (
    WEIGHTS,
    RankState,
    SavedState,
    divisible,
    persistent_buffers,
    restore_buffers,
    restore_optimizer,
    whole,
)
from paceline.train.training.strategy import GradientResult, LocalStrategy, RankGroups, TrainBatch
from paceline.train.training.task import Task


class FullyShardedStrategy(LocalStrategy):
    """One replica per rank, whose parameters lie on all ranks."""

    def __init__(self) -> None:
        self._optimizer: TaskOptimizer | None = None  # None if this rank owns no row
        self._communication = PassCommunication()

    def prepare(
        self,
        task: Task,
        model: nn.Module,
        context: RankContext,
        trial: Trial,
        peers: RankGroups,  # noqa: ARG002  (torch's default group has all ranks)
    ) -> None:
        """Keep this rank's rows of the parameters. Raises UsageError for a model that cannot be
        sharded."""
        self._task, self._model, self._trial = task, model, trial
        self._is_first = context.is_first
        self._scale = LossScale.of(trial.training)
        _check(task, model)
        synchronise_ranks(model, trial, self._communication)
        self._unit_bytes = self._shard(find_units(model, task.example_input()))
        named = {n: cast("DTensor", p) for n, p in trained_parameters(model).items()}
        self._shards = {name: ShardedTensor.of(name, p) for name, p in named.items()}
        self._sharded = named
        self._own = {n: nn.Parameter(s.own) for n, s in self._shards.items() if len(s.own)}
        if self._own:
            self._optimizer = TaskOptimizer(task, self._own.items(), self._scale)

    def _shard(self, units: list[nn.Module]) -> list[int]:
        """Shard the units, and what is outside of them as one more. Return their bytes."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        found = []
        known: set[nn.Parameter] = set()
        for module in (*units, self._model):
            own = set(module.parameters()) - known
            known |= own
            found.append(sum(p.numel() * p.itemsize for p in own))
            fully_shard(module, mesh=mesh)
            assert isinstance(module, FSDPModule), "fully_shard changes the module's class"
            # Losses are divided by the global number of samples, so gradients are sums.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(_AllGather(self._communication))
            module.set_custom_reduce_scatter(_ReduceScatter(self._communication))
            known |= set(module.parameters())  # the shards
        return found

    def gradient(self, batch: TrainBatch) -> GradientResult:
        """Compute the gradient. All its communication belongs to the passes."""
        for parameter in self._own.values():
            parameter.grad = None
        passed = run_passes(
            self._task,
            self._model,
            batch,
            self._trial.training,
            communication=self._communication,
            scale=self._scale.value,
        )
        for name, sharded in self._sharded.items():
            if sharded.grad is None:
                raise no_gradient(name)
            if name in self._own:
                self._own[name].grad = cast("DTensor", sharded.grad).to_local()
        return passed.result(alone=False)

    def step(self) -> None:
        squared_norm = self._squared_norm()
        if self._optimizer is not None:
            self._optimizer.step(squared_norm)
        self._scale.update(squared_norm)

    def _squared_norm(self) -> float | None:
        """Return the squared norm of the whole gradient; None if no update depends on it."""
        if self._task.clip_norm is None and not self._scale.is_used:
            return None
        own = 0.0 if self._optimizer is None else self._optimizer.squared_norm()
        total = torch.tensor([own], dtype=torch.float64)
        all_reduce_tensors([total])
        return float(total)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients, in the memory of a file."""
        own = {n: cast("DTensor", p.grad).to_local() for n, p in self._sharded.items()}
        return gathered(self._shards, self._scale.unscaled(own))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights, in the memory of a file."""
        state = self._model.state_dict()
        shards = {n: ShardedTensor.of(n, t) for n, t in state.items() if isinstance(t, DTensor)}
        weights = gathered(shards)
        return {name: weights.get(name, tensor) for name, tensor in state.items()}

    def buffers_of_replicas(self) -> list[dict[str, Tensor]]:
        return [persistent_buffers(self._model)]

    def rank_state(self) -> RankState:
        """Return the rows of this rank; on rank 0 with what all ranks have."""
        state = RankState()
        for name, shard in self._shards.items():
            if name in self._own:
                own = ShardedTensor(f"{WEIGHTS}/{name}", shard.shape, shard.own)
                state.tensors.append(own.elements(own.own))
        if self._optimizer is not None:
            state.add_optimizer(
                self._optimizer, lambda name, values: self._shards[name].elements(values)
            )
        if self._is_first:
            state.add_buffers(persistent_buffers(self._model))
            state.values.update(self._scale.state)
        return state

    @torch.no_grad()
    def restore(self, saved: SavedState) -> None:
        for name, shard in self._shards.items():
            tensor = whole(saved, f"{WEIGHTS}/{name}", shard.shape)
            shard.own.copy_(shard.rows_of(tensor))
        restore_buffers(persistent_buffers(self._model), saved)
        if self._optimizer is not None:
            restore_optimizer(self._optimizer, saved, self._own_part)
        self._scale.restore(saved.value(LOSS_SCALE))

    def _own_part(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's rows of an optimiser's saved tensor."""
        shard = self._shards[name]
        return shard.rows_of(divisible(name, tensor, shard.shape)).contiguous()

    def describe(self) -> StrategyResult:
        return {"unit_bytes": self._unit_bytes, **self._scale.describe()}


def _check(task: Task, model: nn.Module) -> None:
    """Raise UsageError for what cannot be sharded; make parameters contiguous."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UsageError(
                f'local_strategy "sharded" divides rows of parameters, but {name} is a scalar; '
                "give it the shape (1,), or use another local_strategy"
            )
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    if task.accumulation_steps > 1:
        raise UsageError(
            f'local_strategy "sharded": expected accumulation_steps = 1, got '
            f"{task.accumulation_steps}: ranks would have different numbers of passes, in each of "
            "which all of them gather parameters"
        )


class _Measured:
    """Base of the collectives of `fully_shard`, whose time is measured."""

    def __init__(self, communication: PassCommunication) -> None:
        self._communication = communication

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Measured, AllGather):
    """Gathers parameters, and measures the time."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._communication.measured():
            work: dist.Work | None = all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        return work


class _ReduceScatter(_Measured, ReduceScatter):
    """Sums gradients, and measures the time."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._communication.measured():
            work: dist.Work | None = reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        return work
