"""Predict the memory of the stages of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.strategies.pipeline.deferred import DeferredLinear, deferred
from paceline.strategies.pipeline.partition import BatchSizes, partition_model, settings_of
from paceline.strategies.pipeline.pipedream import StreamPlace
from paceline.strategies.pipeline.schedules import (
    Forward,
    actions,
    drain_actions,
    passes_in_flight,
    stream_actions,
)
from paceline.strategies.pipeline.split_points import stage_bounds
from paceline.training.checkpointing import Segments
from paceline.training.dropout import set_sample_keys
from paceline.training.heap import heap_bytes
from paceline.training.live_bytes import LiveBytes
from paceline.training.loss import summed_loss
from paceline.training.precision import autocast
from paceline.training.segments import stored_bytes
from paceline.training.step_memory import FakeModel, NodeMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.strategies.pipeline.schedules import Action
    from paceline.strategies.pipeline.settings import PipelineOptions
    from paceline.strategies.pipeline.shapes import Activation
    from paceline.strategies.pipeline.split_points import Layers
    from paceline.training.heap import HeapEvent


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
        schedule = _schedule(settings, stage, place.stages)
        step = _Stage(fake, layers, (low, high), schedule, entering).step(sizes.micro_batch)
        parameters = [p for _, layer in layers[low:high] for p in layer.parameters()]
        own = {id(p): p.nbytes for p in parameters if p.requires_grad}  # each tied one once
        state = [round(fake.state_ratio * size / replicas) for size in own.values()]
        state += _stashed_versions(settings, stage, place.stages) * [sum(own.values())]
        read = fake.read_bytes(sizes.replica) if stage == 0 else 0
        # Every rank builds the whole model, and keeps the freed memory.
        ranks.append(heap_bytes(step, state, freed=fake.initial) + read)
    return NodeMemory(ranks=tuple(ranks) * replicas, shared=shared)


def _schedule(settings: PipelineOptions, stage: int, stages: int) -> list[Action]:
    """Return the passes of a step; of one without a flush those of two steps."""
    if settings.flushes:
        return actions(settings.schedule, stage, stages, settings.micro_batches)
    ahead, count = stages - 1 - stage, settings.micro_batches
    steps = [action for step in range(2) for action in stream_actions(ahead, count, step)]
    return [*steps, *drain_actions(ahead, 2 * count)]


def _stashed_versions(settings: PipelineOptions, stage: int, stages: int) -> int:
    """Return the number of copies of the stage's weights."""
    if settings.flushes:
        return 0
    place = StreamPlace(
        stage=stage,
        stages=stages,
        micro_batches=settings.micro_batches,
        vertical_sync=settings.vertical_sync,
    )
    return place.stashed_versions


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
        self._flushes = settings_of(fake.trial).flushes
        own = [layer for _, layer in layers[slice(*bounds)]]
        self._module = nn.Sequential(*(map(deferred, own) if self._flushes else own))
        self._forward: Callable[[Tensor], Tensor] = self._module
        if fake.trial.training.activation_checkpointing:
            with fake.mode:
                self._forward = Segments.of(
                    stored_bytes(fake.task, layers)[slice(*bounds)],
                    list(self._module),
                    passes_in_flight=passes_in_flight(schedule),
                )

    def step(self, samples: int) -> list[HeapEvent]:
        """Return the memory of activations, factors and gradients; samples: of a micro-batch."""
        fake = self._fake
        images, targets = fake.batch(samples)
        with fake.mode:
            inputs = images
            if self._entering is not None:
                inputs = torch.empty((samples, *self._entering.shape), dtype=self._entering.dtype)
        passes: dict[int, Tensor] = {}
        self._module.zero_grad()  # an earlier stage has gradients of parameters that both use
        with fake.mode, LiveBytes() as live:
            for action in self._schedule:
                if isinstance(action, Forward):
                    passes[action.micro_batch] = self._pass(inputs, targets)
                else:
                    result = passes.pop(action.micro_batch)
                    if not self._flushes:
                        self._module.zero_grad()
                    result.backward(None if result.dim() == 0 else torch.empty_like(result))  # type: ignore[no-untyped-call]
                    del result
                    live.end_pass()
            for layer in self._module:
                if isinstance(layer, DeferredLinear):
                    layer.flush()
        return list(live.events)

    def _pass(self, inputs: Tensor, targets: Tensor) -> Tensor:
        # Received activations are in the memory of the link, from which a stream copies them.
        if self._entering is not None:
            inputs = (inputs if self._flushes else inputs.clone()).detach().requires_grad_()
        set_sample_keys(self._module, 0, 0, range(len(inputs)))
        with autocast(self._fake.trial.training):
            output = self._forward(inputs)
            return summed_loss(self._fake.task, output, targets) if self._is_last else output
