"""Train steps of a training again, after its timed part, and measure what roundings change in them.

The first baseline repeats steps with inputs that differ by roundings. The change of its weights is
the scale for the differences of others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.base.errors import RankFailed
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.phases import (
    EARLY,
    EARLY_STEPS,
    FINAL,
    GRADIENT,
    LONG_STEPS,
    NOISE_SHARE,
    ROUNDING_ONLY,
    ROUNDOFF,
)
from paceline.plan.trials.trial import RankContext, Trial
from paceline.train.data.batches import Feed
from paceline.train.rank.loop import Loop
from paceline.train.rank.peers import Peers
from paceline.train.training.optimizers import trained_parameters
from paceline.train.training.strategy import (
    GradientResult,
    LocalStrategy,
    StepCommunication,
    Stepper,
    TrainBatch,
)
from paceline.train.training.tensors import save_tensors, update_l2
from paceline.train.workloads.build import build_model, on_meta_device

if TYPE_CHECKING:
    from paceline.train.rank.samples import Samples

# Relative change of the inputs, in units of roundoff. Roundings within the model add up to about as
# much, so that units switch in most batches in which another order of sums may switch one.
_CHANGE_U = 16
_SMALL = 2.0**-10  # share of the whole gradient below which one may be only rounding
_MOVED = 2.0**-4  # change of a buffer that follows a weight which roundings alone move
_DIVERGED = 1.0  # change of a training that diverges by roundings; its weights prove nothing
_TIME_SHARE = 0.4  # of limits.trial_s, after which the baseline repeats only the first step

OpenFeed = Callable[["Samples", str], AbstractContextManager[Feed]]


@dataclass(frozen=True)
class StepRepeater:
    """Trains steps of one rank's training again, and saves what is compared.

    open_feed: opens this rank's batches of other steps, for a purpose with that name.
    """

    trial: Trial
    context: RankContext
    files: TrialFiles
    samples: Samples
    strategy: LocalStrategy
    peers: Peers
    open_feed: OpenFeed

    def train(
        self,
        first: int,
        stop: int,
        stepper: Stepper,
        on_first_gradient: Callable[[], None],
        on_step: Callable[[int], None] = lambda _done: None,
    ) -> None:
        """Train the steps from `first` to `stop - 1`, without records; collective.

        on_step: called after each step with the number of steps that are done.
        """
        samples = self.samples.between(first, stop)
        # for tasks that draw numbers of their own
        torch.manual_seed(self.trial.training.seed + first)
        loop = Loop(
            order=samples.order,
            task=samples.task,
            strategy=stepper,
            rank=self.context.rank,
            counts_samples=False,
            on_first_gradient=on_first_gradient,
        )
        with self.open_feed(samples, f"replay/{first}") as feed:
            for row, _ in loop.steps(feed):
                on_step(row.step + 1)

    def save_weights(self, point: str) -> None:
        """Save the weights; collective."""
        weights = self.strategy.state_dict()
        if self.context.is_first:
            save_tensors(self.files.weights_at(point), weights)
        self.wait(point)

    def save_gradient(self, point: str) -> None:
        """Save the gradient; collective."""
        gradients = self.strategy.gradients()
        if self.context.is_first:
            save_tensors(self.files.gradient_at(point), gradients)

    def copied_weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights; collective."""
        return {name: tensor.clone() for name, tensor in self.strategy.state_dict().items()}

    @cached_property
    def first_weights(self) -> dict[str, Tensor]:
        """The weights before the first step; built once, because large models take seconds."""
        return build_model(self.samples.task).state_dict()

    def wait(self, purpose: str) -> None:
        """Wait for the other ranks; collective, once for each purpose."""
        self.peers.world(f"replay/{purpose}").barrier(self.trial.limits.collective_s)


def compares_weights(trial: Trial) -> bool:
    """Return whether the change of weights by roundings is compared with its limit."""
    return trial.training.arithmetic == "fp32"


@dataclass(frozen=True, slots=True)
class Changes:
    """L2 norms by tensor: differences of what was repeated, distances that training moved it.

    whole: distance of all trained tensors.
    """

    differences: Mapping[str, float]
    distances: Mapping[str, float]
    whole: float

    def relative(self, name: str) -> float:
        """Return the change of a tensor; one that hardly moves is compared with all of them."""
        return self.differences[name] / (self.distances[name] + NOISE_SHARE * self.whole)

    def largest(self, without: Collection[str] = ()) -> float:
        """Return the largest relative change."""
        if self.whole == 0:
            return 0.0  # nothing to compare changes with
        return max((self.relative(n) for n in self.differences if n not in without), default=0.0)

    def roundings(self) -> set[str]:
        """Return the tensors of which little is left but roundings."""
        return {
            name
            for name, difference in self.differences.items()
            if difference > ROUNDING_ONLY * self.distances[name]
            and self.distances[name] < _SMALL * self.whole
        }


def changes(
    ours: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    before: Mapping[str, Tensor] | None,
    trained: Collection[str],
) -> Changes:
    """Compare tensors with `plain`, and that with `before`, or with zero.

    trained: names of the trained tensors, whose distances count together.
    """
    before = before or {name: torch.zeros_like(tensor) for name, tensor in plain.items()}
    distances = update_l2(plain, before)
    whole = math.hypot(*(distances[name] for name in trained if name in plain))
    return Changes(update_l2(ours, plain), distances, whole)


class RoundingProbe:
    """Repeats steps of a baseline, a single rank, with inputs that differ by roundings.

    Restore the state before the first of these steps, then call a method.

    noise: tensors whose first gradient is nothing but roundings, such as biases before a batch
    normalisation. An optimiser as Adam, which divides by the gradient's size, moves them by any
    amount, and running statistics follow them; so they are not compared.
    """

    def __init__(self, repeater: StepRepeater) -> None:
        self._repeater = repeater
        self.noise: set[str] = set()

    @cached_property
    def _trained(self) -> list[str]:
        """Names of the trained parameters; built late, because a constructor may draw numbers that
        the training would miss."""
        return list(trained_parameters(on_meta_device(self._repeater.samples.task)))

    def beginning(self) -> dict[str, float]:
        """Return the changes of the first gradient, and of the weights at the points of a training
        that begins with its first step."""
        repeater = self._repeater
        found: dict[str, float] = {}
        points = {EARLY_STEPS: EARLY, repeater.samples.order.steps: FINAL}

        def first_gradient() -> None:
            plain = load_file(repeater.files.gradient)
            gradient = changes(repeater.strategy.gradients(), plain, None, self._trained)
            self.noise |= gradient.roundings()
            found[GRADIENT] = gradient.largest(self.noise)

        def compare(done: int) -> None:
            plain = repeater.files.weights_at(points.get(done, ""))
            if plain.exists():
                found[points[done]] = self._change(
                    repeater.copied_weights(), load_file(plain), repeater.first_weights
                )

        if not self._train(0, self._last_step(), first_gradient, compare):
            found.update(dict.fromkeys(points.values(), _DIVERGED))
        return found

    def replayed(
        self,
        first: int,
        stop: int,
        gradient: Path,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
    ) -> float:
        """Return the largest change by the steps from `first` to `stop - 1`.

        gradient: file of their first one. before, after: weights before and after these steps.
        """
        changes: list[float] = []
        self._train(first, stop, lambda: changes.append(self._gradient_change(gradient)))
        changes.append(self._change(self._repeater.copied_weights(), after, before))
        return max(changes)

    def _last_step(self) -> int:
        """Return after how many steps the repeated beginning of the training ends."""
        trial, steps = self._repeater.trial, self._repeater.samples.order.steps
        spent_s = time.time() - self._repeater.context.process_started_unix_s
        if spent_s > _TIME_SHARE * trial.limits.trial_s or not compares_weights(trial):
            return 1
        return steps if steps <= LONG_STEPS else EARLY_STEPS

    def _train(
        self,
        first: int,
        stop: int,
        on_first_gradient: Callable[[], None],
        on_step: Callable[[int], None] = lambda _done: None,
    ) -> bool:
        """Train with inputs that differ by roundings; return False if that diverges."""
        training = self._repeater.trial.training
        change = _CHANGE_U * ROUNDOFF[training.arithmetic]
        perturbed = _PerturbedStepper(self._repeater.strategy, training.seed, change)
        try:
            self._repeater.train(first, stop, perturbed, on_first_gradient, on_step)
        except RankFailed:
            return False
        return True

    def _change(
        self,
        ours: Mapping[str, Tensor],
        plain: Mapping[str, Tensor],
        before: Mapping[str, Tensor] | None = None,
    ) -> float:
        found = changes(ours, plain, before, self._trained)
        if self.noise:
            buffers = found.differences.keys() - set(self._trained)
            self.noise |= {each for each in buffers if found.relative(each) > _MOVED}
        return found.largest(self.noise)

    def _gradient_change(self, plain: Path) -> float:
        return self._change(self._repeater.strategy.gradients(), load_file(plain))


class _PerturbedStepper(Stepper):
    """A strategy of a single rank, whose inputs differ by a relative change, or in their order."""

    def __init__(self, strategy: LocalStrategy, seed: int, change: float) -> None:
        self._strategy, self._seed, self._change = strategy, seed, change

    def for_parts(self, samples: int, task: Callable[[slice], None]) -> None:
        self._strategy.for_parts(samples, task)

    def gradient(self, batch: TrainBatch) -> GradientResult:
        generator = torch.Generator().manual_seed(self._seed + batch.step)
        if not batch.inputs.is_floating_point():  # token ids: sum the samples in another order
            order = torch.randperm(len(batch.inputs), generator=generator)
            return self._strategy.gradient(
                replace(
                    batch,
                    inputs=batch.inputs[order],
                    targets=batch.targets[order],
                    sample_ids=batch.sample_ids[order.numpy()],
                )
            )
        noise = torch.randn(batch.inputs.shape, generator=generator)
        return self._strategy.gradient(
            replace(batch, inputs=batch.inputs * (1 + self._change * noise))
        )

    def step(self) -> StepCommunication | None:
        return self._strategy.step()
