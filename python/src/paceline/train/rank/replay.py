"""Replay a few steps after a training, so that its middle and its end can be compared.

The baseline keeps its state in the middle and near the end of a long training. After the timed
part, each trial of the same training restores these states in turn, trains `REPLAYED_STEPS` steps,
and saves the first gradient and the weights. So all of them compute updates from equal weights,
however far rounding has moved their own weights apart.
"""

from __future__ import annotations

import math
import warnings

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.base.errors import DataError, PacelineWarning
from paceline.collectives.recorder import not_recording
from paceline.measure.records.documents import Checkpoint, CheckpointFolder
from paceline.measure.records.phases import (
    EARLY,
    EARLY_STEPS,
    REPLAYED_STEPS,
    kept_after,
    replay_point,
    replayed_after,
)
from paceline.measure.records.rows import Replayed
from paceline.plan.spec.models import Overrides
from paceline.train.rank.checkpoints import training_sha256
from paceline.train.rank.repeated_steps import RoundingProbe, StepRepeater, compares_weights
from paceline.train.training.state import RATES, WEIGHTS
from paceline.train.training.state_files import Position, StateFiles, write_state
from paceline.train.training.strategy import LocalStrategy
from paceline.train.training.tensors import update_l2

# Values that may differ between a trial and its baseline, although they train the same.
_MAY_DIFFER = set(Overrides.model_fields)
_WATCHED_TENSORS, _WATCHED_ELEMENTS = 4, 32  # whose change is seen after each step


class WeightSample:
    """Some elements of the largest tensors of weights that this rank owns, seen after each step."""

    def __init__(self, strategy: LocalStrategy, device: str) -> None:
        state = strategy.rank_state()
        own = [] if state is None or device != "cpu" else state.tensors
        weights = [each.values for each in own if each.name.startswith(f"{WEIGHTS}/")]
        largest = sorted(weights, key=len, reverse=True)[:_WATCHED_TENSORS]
        self._views = [values[:: max(1, len(values) // _WATCHED_ELEMENTS)] for values in largest]
        self._last = torch.cat(self._views) if self._views else None
        # see RankWeights; None if this rank owns no weights that can be read between steps
        self.unchanged_after: list[int] | None = [] if self._views else None

    def after_step(self, done: int) -> None:
        """Note whether no element has changed since the step before."""
        if self._last is None or self.unchanged_after is None:
            return
        before, self._last = self._last, torch.cat(self._views)
        if torch.equal(before, self._last):
            self.unchanged_after.append(done)


class StateKeeper:
    """Keeps what is compared later while one rank of an exact trial trains.

    A baseline keeps its states in files that all trials of the same training restore.
    """

    def __init__(self, repeater: StepRepeater) -> None:
        self._repeater = repeater
        self._strategy, self._steps = repeater.strategy, repeater.samples.order.steps
        self._sha256 = training_sha256(repeater.trial, repeater.samples.order, _MAY_DIFFER)
        self._folder = CheckpointFolder(repeater.files.replay(self._sha256))
        self._planned: set[int] = set()  # steps after which this baseline keeps its state
        # Learning rates of this rank. A restored schedule hides that it was wrong before.
        self._rates: dict[int, dict[str, float]] = {}
        self._sample: WeightSample | None = None
        if self._can_restore:
            self._rates = {done: {} for done in replayed_after(self._steps)}
            self._sample = WeightSample(self._strategy, repeater.trial.device)

    @property
    def unchanged_after(self) -> list[int] | None:
        """See RankWeights."""
        return None if self._sample is None else self._sample.unchanged_after

    @property
    def _can_restore(self) -> bool:
        strategy = type(self._strategy)
        return not strategy.pauses_for_checkpoints and strategy.restore is not LocalStrategy.restore

    def begin(self) -> bool:
        """Plan the states of a baseline: those that no repeat of it has kept before.

        Return whether it measures roundings; then its first state is kept now.
        """
        trial = self._repeater.trial
        there = {checkpoint.steps for checkpoint in self._folder.complete()}
        self._planned = {*replayed_after(self._steps)} - there
        # A baseline with other arithmetic may have kept the state; it measured its own roundings.
        # In low precision each repeat measures, one step: nobody knows which will end well.
        wanted = 0 not in there or not compares_weights(trial)
        measures = trial.device == "cpu" and wanted
        if measures and 0 not in there:
            self._keep(0)
        return measures

    def after_step(self, done: int) -> bool:
        """Keep the weights or the state after `done` steps, if they are compared; collective.

        Return whether this took time, which belongs to no step.
        """
        if self._sample is not None:
            self._sample.after_step(done)
        if done == EARLY_STEPS < self._steps:
            self._repeater.save_weights(EARLY)
        if done in self._rates:
            state = self._strategy.rank_state()
            values = {} if state is None else state.values
            self._rates[done] = {n: v for n, v in values.items() if n.startswith(RATES)}
        if done in self._planned:
            self._keep(done)
        return done in kept_after(self._steps)

    def state_after(self, done: int) -> Checkpoint | str:
        """Return the baseline's state, or why there is none; the same on all ranks, collective."""
        if not self._can_restore:
            return (
                f"local strategy {self._repeater.trial.local_strategy} cannot train from a given "
                "step: it has no restore(), or its ranks are at different steps"
            )
        found = {c.steps: c for c in self._folder.complete()}.get(done)
        known = self._repeater.peers.of_first_rank(
            f"replay/{done}", "" if found is None else "kept"
        )
        if not known:
            return (
                f"the baseline's state after {done} steps does not exist: in this run the "
                "baseline has not trained before this trial"
            )
        return found or Checkpoint(self._folder.root / f"step-{done:09d}", done, 1)

    def restore(self, state: Checkpoint) -> str | None:
        """Restore a state; collective. Return why a rank differs from the baseline, if one does:
        by its learning rates there, or because it cannot restore the state."""
        saved = StateFiles(state)
        fault = self._other_rate(saved)
        try:
            self._strategy.restore(saved)
        except DataError as error:
            fault = str(error)
        faults = self._repeater.peers.of_all_ranks(f"restored/{state.steps}", fault)
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

    def _keep(self, done: int) -> None:
        """Write the state of a baseline, which is a single rank."""
        state = self._strategy.rank_state()
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


class StepReplay:
    """Replays steps from the baseline's states, on one rank of an exact trial.

    probe: None if this trial measures no roundings.
    """

    def __init__(
        self, repeater: StepRepeater, keeper: StateKeeper, probe: RoundingProbe | None
    ) -> None:
        self._repeater, self._keeper, self._probe = repeater, keeper, probe
        self._files, self._is_baseline = repeater.files, repeater.trial.is_baseline

    def run(self) -> Replayed:
        """Replay the steps that are compared; collective. It changes the weights."""
        found = Replayed()
        self._repeater.wait("trained")  # ranks share weights, which may still be read
        with not_recording():
            early = self._files.weights_at(EARLY)
            if self._is_baseline and early.exists():
                found.moved_l2[EARLY] = update_l2(load_file(early), self._repeater.first_weights)
            if self._probe is not None:
                found.rounding.update(self._rounding_of_beginning(self._probe))
            for first in replayed_after(self._repeater.samples.order.steps):
                self._replay(first, found)
            found.noise += [] if self._probe is None else sorted(self._probe.noise)
        return found

    def _rounding_of_beginning(self, probe: RoundingProbe) -> dict[str, float]:
        """Train once more from the first weights, with inputs that differ by roundings."""
        state = self._keeper.state_after(0)
        if isinstance(state, str) or not self._files.gradient.exists():
            return {}
        self._keeper.restore(state)
        return probe.beginning()

    def _replay(self, first: int, found: Replayed) -> None:
        point, repeater = replay_point(first), self._repeater
        state = self._keeper.state_after(first)
        if isinstance(state, str):
            found.missing[point] = state
            return
        fault = self._keeper.restore(state)
        if fault is not None:
            found.faults[point] = fault
            return
        before: dict[str, Tensor] = repeater.copied_weights() if self._is_baseline else {}
        stop = first + REPLAYED_STEPS
        repeater.train(first, stop, repeater.strategy, lambda: repeater.save_gradient(point))
        repeater.save_weights(point)
        if not before:
            return
        after = repeater.copied_weights()
        found.moved_l2[point] = update_l2(after, before)
        if self._probe is not None and compares_weights(repeater.trial):
            self._keeper.restore(state)
            gradient = self._files.gradient_at(point)
            found.rounding[point] = self._probe.replayed(first, stop, gradient, before, after)


def begin_replay(repeater: StepRepeater) -> tuple[StateKeeper, StepReplay]:
    """Return what keeps the states of a rank that begins to train, and what replays them later."""
    keeper = StateKeeper(repeater)
    measures = repeater.trial.is_baseline and keeper.begin()
    return keeper, StepReplay(repeater, keeper, RoundingProbe(repeater) if measures else None)
