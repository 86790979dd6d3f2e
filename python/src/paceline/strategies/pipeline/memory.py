"""Predict the memory of the stages of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.strategies.pipeline.deferred import DeferredLinear, deferred
from paceline.strategies.pipeline.partition import BatchSizes, partition_model, settings_of
from paceline.strategies.pipeline.schedules import Forward, actions, passes_in_flight
from paceline.strategies.pipeline.split_points import stage_bounds
from paceline.training.checkpointing import Segments
from paceline.training.dropout import set_sample_keys
from paceline.training.loss import summed_loss
from paceline.training.precision import autocast
from paceline.training.step_memory import FakeModel, NodeMemory, with_gaps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.strategies.pipeline.schedules import Action
    from paceline.strategies.pipeline.shapes import Activation
    from paceline.strategies.pipeline.split_points import Layers


def node_memory(fake: FakeModel) -> NodeMemory:
    """Return private memory of each rank, and the weights, links and gradients that they share.

    Where stages are balanced by time, which is measured in the run, they are taken to be balanced
    by size.
    """
    trial = fake.trial
    settings, place = settings_of(trial), trial.placement
    if settings.split_points is None:
        settings = settings.model_copy(update={"balance": "size"})
        trial = trial.model_copy(update={"strategy_options": settings})
    layers, sizes = fake.task.blocks(fake.model), BatchSizes.of(trial)
    division = partition_model(fake.task, layers, trial, None)
    replicas = place.replicas_per_node
    slots = settings.micro_batches * sizes.micro_batch
    links = [2 * slots * activation.bytes_per_sample for activation in division.crossing]
    shared = fake.gradients + replicas * sum(links)
    if replicas > 1:  # gradients of the shards that other replicas own
        shared += (replicas - 1) * fake.gradients
    ranks = []
    for stage, (low, high) in enumerate(stage_bounds(division.split_points, len(layers))):
        entering = division.crossing[stage - 1] if stage > 0 else None
        schedule = actions(settings.schedule, stage, place.stages, settings.micro_batches)
        step = _Stage(fake, layers, (low, high), schedule, entering).peak(sizes.micro_batch)
        parameters = [p for _, layer in layers[low:high] for p in layer.parameters()]
        own = {id(p): p.nbytes for p in parameters if p.requires_grad}  # each tied one once
        state = round(fake.state_ratio * sum(own.values()) / replicas)
        read = fake.read_bytes(sizes.replica) if stage == 0 else 0
        # Every rank builds the whole model, and keeps the freed memory.
        ranks.append(with_gaps(max(fake.weights, state + step + read)))
    return NodeMemory(ranks=tuple(ranks) * replicas, shared=shared)


class _Stage:
    """One stage with fake tensors."""

    def __init__(
        self,
        fake: FakeModel,
        layers: Layers,
        bounds: tuple[int, int],
        schedule: Sequence[Action],
        entering: Activation | None,
    ) -> None:
        self._fake, self._schedule, self._entering = fake, schedule, entering
        self._is_last = bounds[1] == len(layers)
        self._module = nn.Sequential(*(deferred(layer) for _, layer in layers[slice(*bounds)]))
        self._forward: Callable[[Tensor], Tensor] = self._module
        if fake.trial.training.activation_checkpointing:
            with fake.mode:
                self._forward = Segments.of(
                    fake.task,
                    layers,
                    list(self._module),
                    bounds[0],
                    passes_in_flight=passes_in_flight(schedule),
                )

    def peak(self, samples: int) -> int:
        """Return the peak of activations, factors and gradients; samples: of a micro-batch."""
        fake = self._fake
        images, targets = fake.batch(samples)
        with fake.mode:
            inputs = images
            if self._entering is not None:
                inputs = torch.empty((samples, *self._entering.shape), dtype=self._entering.dtype)
        passes: dict[int, Tensor] = {}
        with fake.mode, fake.live:
            fake.live.reset_peak()
            before = fake.live.now
            for action in self._schedule:
                if isinstance(action, Forward):
                    passes[action.micro_batch] = self._pass(inputs, targets)
                else:
                    result = passes.pop(action.micro_batch)
                    result.backward(None if result.dim() == 0 else torch.empty_like(result))  # type: ignore[no-untyped-call]
                    del result
            for layer in self._module:
                if isinstance(layer, DeferredLinear):
                    layer.flush()
            return fake.live.peak - before

    def _pass(self, inputs: Tensor, targets: Tensor) -> Tensor:
        # Received activations are in the memory of the link.
        if self._entering is not None:
            inputs = inputs.detach().requires_grad_()
        set_sample_keys(self._module, 0, 0, range(len(inputs)))
        with autocast(self._fake.trial.training):
            output = self._forward(inputs)
            return summed_loss(self._fake.task, output, targets) if self._is_last else output
