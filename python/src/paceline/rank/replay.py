"""Replay a few steps after a training, so that its middle and its end can be compared.

The baseline keeps its state in the middle and near the end of a long training. After the timed
part, each trial of the same training restores these states in turn, trains `REPLAYED_STEPS` steps,
and saves the first gradient and the weights. So all of them compute updates from equal weights,
however far rounding has moved their own weights apart.

The first baseline also repeats steps with inputs that differ by roundings. The change of its
weights is the scale for the differences of others.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.data.reading import Feed
from paceline.errors import DataError, PacelineWarning, RankFailed
from paceline.plan.rank_context import RankContext
from paceline.plan.trial import Trial
from paceline.rank.checkpoints import training_sha256
from paceline.rank.loop import Loop
from paceline.rank.peers import Peers
from paceline.records.checkpoints import Checkpoint, CheckpointFolder
from paceline.records.comparison_points import (
    EARLY,
    EARLY_STEPS,
    FINAL,
    GRADIENT,
    LONG_STEPS,
    REPLAYED_STEPS,
    ROUNDOFF,
    kept_after,
    replay_point,
    replayed_after,
)
from paceline.records.layout import TrialFiles
from paceline.records.rows import Replayed
from paceline.spec.models import Overrides
from paceline.training.optimizers import trained_parameters
from paceline.training.state import RATES, WEIGHTS
from paceline.training.state_files import Position, StateFiles, write_state
from paceline.training.strategy import (
    GradientResult,
    LocalStrategy,
    StepCommunication,
    Stepper,
    TrainBatch,
)
from paceline.training.tensors import save_tensors, update_l2
from paceline.transports.recorder import not_recording
from paceline.workloads.build import build_model, on_meta_device

if TYPE_CHECKING:
    from paceline.rank.samples import Samples

# Values that may differ between a trial and its baseline, although they train the same.
_MAY_DIFFER = set(Overrides.model_fields)
# Relative change of the inputs, in units of roundoff. Roundings within the model add up to about as
# much, so that units switch in most batches in which another order of sums may switch one.
_CHANGE_U = 16
_NOISE = 2.0**-13  # share of the whole norm below which the gradient of a tensor is noise
_WATCHED_TENSORS, _WATCHED_ELEMENTS = 4, 32  # whose change is seen after each step
_DIVERGED = 1.0  # change of a training that diverges by roundings; its weights prove nothing
_TIME_SHARE = 0.4  # of limits.trial_s, after which the baseline repeats only the first step

OpenFeed = Callable[["Samples", str], AbstractContextManager[Feed]]


@dataclass(slots=True)
class Replays:
    """Keeps what is compared later, and replays steps, on one rank of an exact trial.

    open_feed: opens this rank's batches of other steps, for a purpose with that name.
    """

    trial: Trial
    context: RankContext
    files: TrialFiles
    samples: Samples
    strategy: LocalStrategy
    peers: Peers
    open_feed: OpenFeed
    unchanged_after: list[int] | None = None  # see RankWeights
    # Learning rates of this rank. A restored schedule hides that it was wrong before.
    _rates: dict[int, dict[str, float]] = field(default_factory=dict)
    _kept: set[int] = field(default_factory=set)  # steps after which this baseline keeps its state
    _measures: bool = False
    _watched: list[Tensor] = field(default_factory=list)
    _sampled: Tensor | None = None
    _first_weights: dict[str, Tensor] = field(default_factory=dict)
    _steps: int = field(init=False)
    _sha256: str = field(init=False)
    _folder: CheckpointFolder = field(init=False)

    def __post_init__(self) -> None:
        self._steps = self.samples.order.steps
        self._sha256 = training_sha256(self.trial, self.samples.order, _MAY_DIFFER)
        self._folder = CheckpointFolder(self.files.replay(self._sha256))
        if self._can_replay:
            self._rates = {done: {} for done in replayed_after(self._steps)}
            self._watched = self._sample_of_weights()
        if self._watched:
            self.unchanged_after, self._sampled = [], torch.cat(self._watched)
        if self.trial.is_baseline:
            self._plan_states()

    @property
    def _judges_weights(self) -> bool:
        """Return whether the change of weights by roundings is compared with its limit."""
        return self.trial.training.arithmetic == "fp32"

    @property
    def _can_replay(self) -> bool:
        strategy = type(self.strategy)
        return not strategy.pauses_for_checkpoints and strategy.restore is not LocalStrategy.restore

    def _sample_of_weights(self) -> list[Tensor]:
        """Return views of some elements of the largest tensors of weights that this rank owns."""
        state = self.strategy.rank_state()
        own = [] if state is None or self.trial.device != "cpu" else state.tensors
        weights = [each.values for each in own if each.name.startswith(f"{WEIGHTS}/")]
        largest = sorted(weights, key=len, reverse=True)[:_WATCHED_TENSORS]
        return [values[:: max(1, len(values) // _WATCHED_ELEMENTS)] for values in largest]

    def _plan_states(self) -> None:
        """Decide which states to keep: those that no repeat of this baseline has kept before."""
        there = {checkpoint.steps for checkpoint in self._folder.complete()}
        self._kept = {*replayed_after(self._steps)} - there
        floats = self.samples.task.example_input().is_floating_point()
        # A baseline with other arithmetic may have kept the state; it measured its own roundings.
        # In low precision each repeat measures, one step: nobody knows which will end well.
        wanted = 0 not in there or not self._judges_weights
        self._measures = self.trial.device == "cpu" and floats and wanted
        if self._measures and 0 not in there:
            self._keep_state(0)

    def after_step(self, done: int) -> bool:
        """Keep the weights or the state after `done` steps, if they are compared; collective.

        Return whether this took time, which belongs to no step.
        """
        if self.unchanged_after is not None and self._sampled is not None:
            before, self._sampled = self._sampled, torch.cat(self._watched)
            if torch.equal(before, self._sampled):
                self.unchanged_after.append(done)
        if done == EARLY_STEPS < self._steps:
            self._save_weights(EARLY)
        if done in self._rates:
            state = self.strategy.rank_state()
            values = {} if state is None else state.values
            self._rates[done] = {n: v for n, v in values.items() if n.startswith(RATES)}
        if done in self._kept:
            self._keep_state(done)
        return done in kept_after(self._steps)

    def run(self) -> Replayed:
        """Replay the steps that are compared; collective. It changes the weights."""
        found = Replayed()
        self._wait("trained")  # ranks share weights, which may still be read
        with not_recording():
            early = self.files.weights_at(EARLY)
            if self.trial.is_baseline and early.exists():
                found.moved_l2[EARLY] = update_l2(load_file(early), self._initial())
            if self._measures:
                self._measure_beginning(found)
            for first in replayed_after(self._steps):
                self._replay(first, found)
        return found

    def _replay(self, first: int, found: Replayed) -> None:
        point = replay_point(first)
        state = self._state_after(first)
        if isinstance(state, str):
            found.missing[point] = state
            return
        fault = self._restored(state)
        if fault is not None:
            found.faults[point] = fault
            return
        before = self._copy() if self.trial.is_baseline else {}
        last = first + REPLAYED_STEPS
        self._train(first, last, self.strategy, lambda: self._save_gradient(point))
        self._save_weights(point)
        if not before:
            return
        after = self._copy()
        found.moved_l2[point] = update_l2(after, before)
        if self._measures and self._judges_weights:
            self._restored(state)
            changes: list[float] = []
            gradient = self.files.gradient_at(point)
            self._train_rounded(
                first, last, lambda: changes.append(self._gradient_change(gradient))
            )
            found.rounding[point] = max(*changes, self._change(self._copy(), after, before))

    def _measure_beginning(self, found: Replayed) -> None:
        """Train once more from the first weights, with inputs that differ by roundings."""
        spent_s = time.time() - self.context.process_started_unix_s
        last = self._steps if self._steps <= LONG_STEPS else EARLY_STEPS
        if spent_s > _TIME_SHARE * self.trial.limits.trial_s or not self._judges_weights:
            last = 1
        state = self._state_after(0)
        if isinstance(state, str) or not self.files.gradient.exists():
            return
        self._restored(state)
        points = {EARLY_STEPS: EARLY, self._steps: FINAL}

        def first_gradient() -> None:
            found.rounding[GRADIENT] = self._gradient_change(self.files.gradient)

        def compare(done: int) -> None:
            plain = self.files.weights_at(points.get(done, ""))
            if plain.exists():
                change = self._change(self._copy(), load_file(plain), self._initial())
                found.rounding[points[done]] = change

        if not self._train_rounded(0, last, first_gradient, compare):
            found.rounding.update(dict.fromkeys(points.values(), _DIVERGED))

    def _train_rounded(
        self,
        first: int,
        stop: int,
        on_first_gradient: Callable[[], None],
        on_step: Callable[[int], None] = lambda _done: None,
    ) -> bool:
        """Train with inputs that differ by roundings; return False if that diverges."""
        training = self.trial.training
        change = _CHANGE_U * ROUNDOFF[training.arithmetic]
        rounded = _Rounded(self.strategy, training.seed, change)
        try:
            self._train(first, stop, rounded, on_first_gradient, on_step)
        except RankFailed:
            return False
        return True

    def _train(
        self,
        first: int,
        stop: int,
        strategy: Stepper,
        on_first_gradient: Callable[[], None],
        on_step: Callable[[int], None] = lambda _done: None,
    ) -> None:
        """Train the steps from `first` on, without records; collective."""
        samples = self.samples.between(first, stop)
        # for tasks that draw numbers of their own
        torch.manual_seed(self.trial.training.seed + first)
        loop = Loop(
            order=samples.order,
            task=samples.task,
            strategy=strategy,
            rank=self.context.rank,
            counts_samples=False,
            on_first_gradient=on_first_gradient,
        )
        with self.open_feed(samples, f"replay/{first}") as feed:
            for row, _ in loop.steps(feed):
                on_step(row.step + 1)

    def _state_after(self, first: int) -> Checkpoint | str:
        """Return the baseline's state, or why there is none; the same on all ranks."""
        if not self._can_replay:
            return (
                f"local strategy {self.trial.local_strategy} cannot train from a given step: it "
                "has no restore(), or its ranks are at different steps"
            )
        found = {c.steps: c for c in self._folder.complete()}.get(first)
        known = self.peers.of_first_rank(f"replay/{first}", "" if found is None else "kept")
        if not known:
            return (
                f"the baseline's state after {first} steps does not exist: in this run the "
                "baseline has not trained before this trial"
            )
        return found or Checkpoint(self._folder.root / f"step-{first:09d}", first, 1)

    def _restored(self, state: Checkpoint) -> str | None:
        """Restore a state; collective. Return why a rank differs from the baseline, if one does:
        by its learning rates there, or because it cannot restore the state."""
        saved = StateFiles(state)
        fault = self._other_rate(saved)
        try:
            self.strategy.restore(saved)
        except DataError as error:
            fault = str(error)
        faults = self.peers.of_all_ranks(f"restored/{state.steps}", fault)
        return next(filter(None, faults), None)

    def _other_rate(self, saved: StateFiles) -> str:
        for name, rate in self._rates.get(saved.steps, {}).items():
            expected = saved.value(name)
            if expected is not None and not math.isclose(rate, expected, rel_tol=1e-6):
                return (
                    f"after {saved.steps} steps {name.removeprefix(RATES + '/')} had learning rate "
                    f"{rate:g}, the baseline's {expected:g}"
                )
        return ""

    def _keep_state(self, done: int) -> None:
        """Write the state of a baseline, which is a single rank."""
        state = self.strategy.rank_state()
        assert state is not None, "a sequential training has a state after each step"
        position = Position(steps=done, task_sha256=self._sha256, replicas=1)
        try:
            self._folder.write(done, 0, 1, lambda file: list(write_state(file, state, position)))
        except OSError as error:
            message = (
                f"{self._folder.root}: no state after {done} steps: {error.strerror or error}; the "
                "training goes on, and other trials cannot replay steps from there"
            )
            warnings.warn(message, PacelineWarning, stacklevel=2)

    def _save_weights(self, point: str) -> None:
        """Save the weights; collective."""
        weights = self.strategy.state_dict()
        if self.context.is_first:
            save_tensors(self.files.weights_at(point), weights)
        self._wait(point)

    def _save_gradient(self, point: str) -> None:
        gradients = self.strategy.gradients()
        if self.context.is_first:
            save_tensors(self.files.gradient_at(point), gradients)

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.strategy.state_dict().items()}

    def _initial(self) -> dict[str, Tensor]:
        """Return the first weights; built once, because large models take seconds."""
        if not self._first_weights:
            self._first_weights = build_model(self.samples.task).state_dict()
        return self._first_weights

    def _change(
        self,
        ours: Mapping[str, Tensor],
        plain: Mapping[str, Tensor],
        before: Mapping[str, Tensor] | None = None,
    ) -> float:
        """Return the largest change of a tensor from `plain`, relative to the distance from
        `before`, or from zero."""
        before = before or {name: torch.zeros_like(tensor) for name, tensor in plain.items()}
        differences, distances = update_l2(ours, plain), update_l2(plain, before)
        trained = trained_parameters(on_meta_device(self.samples.task)).keys() & plain.keys()
        whole = math.hypot(*(distances[name] for name in trained))
        if whole == 0:
            return 0.0  # nothing to compare changes with
        return max(differences[n] / (distances[n] + _NOISE * whole) for n in differences)

    def _gradient_change(self, plain: Path) -> float:
        return self._change(self.strategy.gradients(), load_file(plain))

    def _wait(self, purpose: str) -> None:
        self.peers.world(f"replay/{purpose}").barrier(self.trial.limits.collective_s)


class _Rounded(Stepper):
    """A strategy of a single rank, whose inputs differ by a relative change."""

    def __init__(self, strategy: LocalStrategy, seed: int, change: float) -> None:
        self._strategy, self._seed, self._change = strategy, seed, change

    def for_parts(self, samples: int, task: Callable[[slice], None]) -> None:
        self._strategy.for_parts(samples, task)

    def gradient(self, batch: TrainBatch) -> GradientResult:
        generator = torch.Generator().manual_seed(self._seed + batch.step)
        noise = torch.randn(batch.inputs.shape, generator=generator)
        return self._strategy.gradient(
            replace(batch, inputs=batch.inputs * (1 + self._change * noise))
        )

    def step(self) -> StepCommunication | None:
        return self._strategy.step()
