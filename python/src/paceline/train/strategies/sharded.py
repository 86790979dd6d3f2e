"""Weights, gradients and optimiser state in shards of all ranks (`sharded`): rows of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from paceline.base.errors import UsageError
from paceline.base.torch_internals import all_gather_single, reduce_scatter_single, tree_leaves
from paceline.base.torch_internals.fsdp import AllGather, ReduceScatter
from paceline.collectives.recorder import PassCommunication
from paceline.measure.records.communication import StrategyResult
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.strategies.reduction.replicate_group import all_reduce_tensors
from paceline.train.strategies.reduction.shared_sums import synchronise_ranks
from paceline.train.training.file_memory import FileMemory
from paceline.train.training.optimizers import (
    LOSS_SCALE,
    LossScale,
    TaskOptimizer,
    no_gradient,
    trained_parameters,
)
from paceline.train.training.passes import run_passes
from paceline.train.training.state import (
    WEIGHTS,
    Elements,
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
from paceline.train.training.tensors import as_fake, evaluating, fake_mode


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """The rows of a tensor that this rank owns. own: contiguous; perhaps without a row."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    own: Tensor

    @classmethod
    def of(cls, name: str, tensor: DTensor) -> ShardedTensor:
        """Return the shard of a tensor of `fully_shard`, in the same memory."""
        return cls(name, tuple(tensor.shape), tensor.to_local().detach())

    def rows_of(self, whole: Tensor) -> Tensor:
        """Return the rows of a whole tensor that this rank owns."""
        return whole[self._first : self._first + len(self.own)]

    def elements(self, values: Tensor) -> Elements:
        """Return the place of values, which have the shape of `own`, in the whole tensor."""
        strides = torch.empty(self.shape, device="meta").stride()
        start = self._first * strides[0]
        return Elements(
            name=self.name,
            shape=self.shape,
            strides=strides,
            start=start,
            values=values.detach().reshape(-1),
        )

    def gather(self, own: Tensor | None = None) -> Tensor:
        """Return the whole tensor; collective. own: values of this rank's rows, if others."""
        own = self.own if own is None else own
        padded = own.new_zeros((self._rows, *self.shape[1:]))
        padded[: len(own)] = own
        whole = own.new_empty((self._rows * dist.get_world_size(), *self.shape[1:]))
        all_gather_single(whole, padded)
        return whole[: self.shape[0]]

    @property
    def _rows(self) -> int:
        """Rows of a rank; the last ranks may have less."""
        return -(-self.shape[0] // dist.get_world_size())

    @property
    def _first(self) -> int:
        return min(self._rows * dist.get_rank(), self.shape[0])


@torch.no_grad()
def gathered(
    shards: Mapping[str, ShardedTensor], values: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return whole tensors by name, of which only one at a time is in memory; collective.

    values: of this rank's rows, if others.
    """
    memory = FileMemory()
    own = {name: shard.own for name, shard in shards.items()} if values is None else values
    return {name: memory.copy_of(shards[name].gather(tensor)) for name, tensor in own.items()}


# Parts of a model whose parameters are gathered together, found by a pass without computing
#
# A module can be a unit if its parameters are needed only while it is called: then they can be
# gathered before the call and released after it. Tied weights, and those that a functional call of
# another module uses, belong to the modules around all of their uses.

# Shares of the whole model. Larger modules are divided, because the memory of a unit is needed
# beside the shards; smaller ones stay in the module around them, because each unit is a message.
_LARGEST, _SMALLEST = 1 / 16, 1 / 1000


def find_units(model: nn.Module, example: Tensor) -> list[nn.Module]:
    """Return modules of a model that can be units, none of which contains another.

    Parameters outside of them belong to the whole model. example: an input of the model.
    Raises UsageError if the model cannot be passed without computing.
    """
    uses = _parameter_uses(model, example)
    whole = _elements(model)

    def units(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            size = _elements(child)
            if size < _SMALLEST * whole:
                continue
            parts = list(units(child)) if size > _LARGEST * whole else []
            if parts:
                yield from parts
            elif uses.only_within(child):
                yield child
            else:
                yield from units(child)

    return list(dict.fromkeys(units(model)))


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass
class _Uses:
    """The modules that are called at each use of a parameter."""

    callers: dict[int, list[frozenset[int]]] = field(default_factory=lambda: defaultdict(list))
    called: list[int] = field(default_factory=list)  # those that are called now

    def only_within(self, module: nn.Module) -> bool:
        """Return whether a call of this module surrounds every use of its parameters."""
        uses = [use for p in module.parameters() for use in self.callers[id(p)]]
        return bool(uses) and all(id(module) in use for use in uses)

    def begin(self, module: nn.Module, _inputs: Any) -> None:
        self.called.append(id(module))

    def end(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        self.called.pop()


class _Watch(TorchFunctionMode):
    """Notes each function that gets a parameter."""

    def __init__(self, uses: _Uses, parameters: Mapping[int, int]) -> None:
        super().__init__()
        self._uses, self._parameters = uses, parameters

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for each in tree_leaves((args, kwargs)):
            if id(each) in self._parameters:
                callers = frozenset(self._uses.called)
                self._uses.callers[self._parameters[id(each)]].append(callers)
        return func(*args, **kwargs)


def _parameter_uses(model: nn.Module, example: Tensor) -> _Uses:
    """Pass the model with fake tensors, and note which modules use which parameters."""
    uses, mode = _Uses(), fake_mode()
    named = dict(model.named_parameters())
    fake = {n: as_fake(mode, t) for n, t in (*named.items(), *model.named_buffers())}
    hooks: list[RemovableHandle] = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(uses.begin))
        hooks.append(module.register_forward_hook(uses.end))
    watch = _Watch(uses, {id(fake[name]): id(parameter) for name, parameter in named.items()})
    try:
        with mode, evaluating(model), watch:
            functional_call(model, fake, (as_fake(mode, example),))
    except Exception as error:  # any model of a user
        raise UsageError(
            'local_strategy "sharded": it needs to pass the model with tensors without memory, '
            f"which failed: {type(error).__name__}: {error}; use another local_strategy"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return uses


# --- weights, gradients and optimiser state divided among all ranks (`sharded`) ------------------
#
# Stage 3 of ZeRO (Rajbhandari et al., SC 2020) with torch's `fully_shard`. A unit is a part of the
# model whose parameters are gathered together. A step is
#
#     each unit: all ranks gather its parameters, compute their samples, and release the parameters
#     in the backward pass each unit again; then its gradients are summed and scattered, so that
#           each rank has the sum of the rows that it owns
#     each rank: optimiser step of its own rows


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
