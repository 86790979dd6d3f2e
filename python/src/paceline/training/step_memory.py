"""The memory of a training step, by passing fake tensors through the model.

Nothing is computed and no weights exist, so the memory of a step that does not fit is found too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.training.checkpointing import checkpoint_activations
from paceline.training.dropout import set_sample_keys
from paceline.training.heap import heap_bytes
from paceline.training.live_bytes import LiveBytes
from paceline.training.loss import summed_loss
from paceline.training.optimizers import TaskOptimizer, trained_parameters
from paceline.training.precision import autocast
from paceline.training.transforms import put_in_memory_format

if TYPE_CHECKING:
    from collections.abc import Container

    from paceline.plan.trial import Trial
    from paceline.training.task import Task

_BATCHES_READ = 4  # two prefetched, one being read, one in use


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Bytes that the ranks of a node need, beside that of their interpreters and libraries."""

    ranks: tuple[int, ...]  # private memory of each rank
    shared: int = 0  # memory that they share

    @property
    def total(self) -> int:
        return sum(self.ranks) + self.shared


class FakeModel:
    """A model of fake tensors on the CPU."""

    def __init__(self, task: Task, meta: nn.Module, targets: Tensor, trial: Trial) -> None:
        """meta: the model on the meta device; its tensors are replaced. targets: of one sample."""
        # An operation without a shape function must not be run on real tensors instead.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.task, self.trial, self.model = task, trial, meta
        self._targets = targets
        put_in_memory_format(meta, trial.training.memory_format)
        with self.mode:
            _materialise(meta)
        self.initial = [t.nbytes for t in (*meta.parameters(), *meta.buffers())]
        self.weights = sum(self.initial)
        trained = trained_parameters(meta)
        self.gradients = sum(p.nbytes for p in trained.values())
        # Of the optimiser for each byte of a trained parameter.
        self.state_ratio = _state_ratio(task, meta)
        self.state = [round(self.state_ratio * p.nbytes) for p in trained.values()]

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """Return inputs of the model and targets of its loss for so many samples."""
        example = self.task.example_input()
        with self.mode:
            inputs = torch.empty((samples, *example.shape[1:]), dtype=example.dtype)
            if self.trial.training.memory_format == "channels_last" and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            targets = torch.empty((samples, *self._targets.shape[1:]), dtype=self._targets.dtype)
            return inputs, targets

    def read_bytes(self, samples: int) -> int:
        """Return the bytes of batches between the data set and the model."""
        settings, example = self.task.settings, self.task.example_input()
        side = settings.image_size
        shape = settings.input_shape or (side, side, 3)
        stored = (
            torch.Size(shape).numel()
            * torch.empty(0, dtype=getattr(torch, settings.input_dtype)).element_size()
        )
        return samples * (_BATCHES_READ * stored + example[0].nbytes)

    def step(self, samples: int) -> LiveBytes:
        """Return the memory of activations and gradients in a step of a replica with so many
        samples."""
        parts = max(1, min(self.task.accumulation_steps, samples))
        inputs, targets = self.batch(-(-samples // parts))
        self.model.zero_grad()
        live = LiveBytes()
        with self.mode, live:
            for _ in range(min(parts, 2)):  # in the second part, gradients exist already
                self._pass(inputs, targets)
        return live

    def release_gradients(self, names: Container[str] | None = None) -> None:
        """Release gradients as soon as they are complete. names: those to keep.

        They are copied elsewhere then.
        """
        for name, parameter in trained_parameters(self.model).items():
            if names is None or name not in names:
                parameter.register_post_accumulate_grad_hook(_release)  # type: ignore[no-untyped-call]

    def _pass(self, inputs: Tensor, targets: Tensor) -> None:
        set_sample_keys(self.model, 0, 0, range(len(inputs)))
        with autocast(self.trial.training):
            loss = summed_loss(self.task, self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]


def replicas_memory(fake: FakeModel) -> NodeMemory:
    """Predict the memory of ranks that have a whole replica and its optimiser each."""
    trial = fake.trial
    checkpoint_activations(fake.task, fake.model, trial)
    samples = trial.placement.samples_of_a_replica(trial.training.global_batch)
    buckets = 0
    if trial.placement.replicas > 1:  # gradients are views of DDP's buckets, which stay
        buckets = fake.gradients
        fake.release_gradients()
    heap = heap_bytes(list(fake.step(samples).events), fake.state)
    rank = fake.weights + buckets + heap + fake.read_bytes(samples)
    return NodeMemory(ranks=(rank,) * trial.placement.ranks_per_node)


def _release(parameter: nn.Parameter) -> None:
    parameter.grad = None


def _materialise(model: nn.Module) -> None:
    """Replace meta tensors by fake ones on the CPU; tied parameters stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is not None:
                module._parameters[name] = made.setdefault(  # type: ignore[assignment]  # noqa: SLF001
                    id(parameter),
                    nn.Parameter(_on_cpu(parameter), requires_grad=parameter.requires_grad),
                )
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None:
                module._buffers[name] = made.setdefault(id(buffer), _on_cpu(buffer))  # noqa: SLF001


def _on_cpu(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _state_ratio(task: Task, model: nn.Module) -> float:
    """Return the bytes of the optimiser's state for each byte of a parameter."""
    small = [
        (name, nn.Parameter(torch.zeros(_STATE_ELEMENTS))) for name in trained_parameters(model)
    ]
    for _, parameter in small:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = TaskOptimizer(task, small)
    optimizer.step()
    states = [
        value
        for state in optimizer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.numel() == _STATE_ELEMENTS
    ]
    return sum(s.nbytes for s in states) / sum(p.nbytes for _, p in small)


_STATE_ELEMENTS = 16
