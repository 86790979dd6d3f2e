"""Steps that are trained again, and the change of a training by roundings."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.support.fabricated_samples import ROWS, FakeFeed, opening

from paceline.base.errors import RankFailed
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.phases import EARLY, FINAL, GRADIENT
from paceline.train.rank.peers import Peers
from paceline.train.rank.repeated_steps import (
    RoundingProbe,
    StepRepeater,
    _PerturbedStepper,
    changes,
)
from paceline.train.training.strategy import GradientResult, LocalStrategy, TrainBatch
from paceline.train.training.tensors import save_tensors

INPUTS_U = 2.0**-24  # unit roundoff of fp32


class MeanInput(LocalStrategy):
    """Adds the mean magnitude of its inputs to every weight."""

    def __init__(self, names, diverges_in=None):
        self.names, self.diverges_in = names, diverges_in
        self.total = torch.zeros(1)
        self.inputs = []

    def prepare(self, task, model, context, trial, peers):
        pass

    def close(self, *, failed):
        pass

    def gradient(self, batch):
        if batch.step == self.diverges_in:
            raise RankFailed("the loss is not finite", 0)
        self.inputs.append(batch.inputs)
        self.last = batch.inputs.abs().mean().reshape(1)
        return GradientResult(
            loss_sum=1.0, forward_s=0.0, backward_s=0.0, comm_s=0.0, comm_ready_unix_s=None
        )

    def gradients(self):
        return dict.fromkeys(self.names, self.last)

    def step(self):
        self.total = self.total + self.last

    def state_dict(self):
        return dict.fromkeys(self.names, self.total)


@pytest.fixture
def repeater_of(make_trial, solo, tmp_path):
    """Makes the repeater of a training whose names of weights are those of the tiny model."""

    def make(steps=2, started_unix_s=None, diverges_in=None, **training):
        trial = make_trial(epochs=100, max_steps=steps, **training)
        files = TrialFiles(tmp_path)
        started_unix_s = time.time() if started_unix_s is None else started_unix_s
        context = replace(solo, process_started_unix_s=started_unix_s)
        with opening(ROWS, FakeFeed)(trial.training, None, None) as samples:
            pass
        names = [name for name, _ in samples.task.model().named_parameters()]
        return StepRepeater(
            trial, context, files, samples, MeanInput(names, diverges_in),
            Peers(context, trial, store=None), lambda samples, _purpose: FakeFeed(samples.order),
        )  # fmt: skip

    return make


def train(repeater, first, stop):
    """Train steps as they are; return the first gradient."""
    gradients = []
    repeater.train(
        first, stop, repeater.strategy, lambda: gradients.append(repeater.strategy.gradients())
    )
    return gradients[0]


def test_steps_are_those_of_the_training(repeater_of):
    repeater, done = repeater_of(steps=9), []
    repeater.train(4, 7, repeater.strategy, lambda: None, done.append)
    assert done == [5, 6, 7]
    again = repeater_of(steps=9)
    again.train(0, 9, again.strategy, lambda: None)
    for ours, theirs in zip(repeater.strategy.inputs, again.strategy.inputs[4:7], strict=True):
        assert torch.equal(ours, theirs)


def test_weights_and_gradient_are_saved_at_their_points(repeater_of):
    repeater = repeater_of()
    train(repeater, 0, 1)
    repeater.save_weights("replay3")
    repeater.save_gradient("replay3")
    assert repeater.files.weights_at("replay3").is_file()
    assert repeater.files.gradient_at("replay3").is_file()
    copied = repeater.copied_weights()
    repeater.strategy.total.add_(1)
    name = next(iter(copied))
    assert not torch.equal(copied[name], repeater.strategy.state_dict()[name])


def test_change_is_relative_to_the_distance_from_before():
    plain = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}
    ours = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1.0])}
    noise = 2.0**-13 * 26**0.5
    assert changes(ours, plain, None, ["a", "b"]).largest() == pytest.approx(0.5 / (5 + noise))
    before = {"a": torch.tensor([3.0, 3.0]), "b": torch.tensor([1.0])}
    assert changes(ours, plain, before, ["a", "b"]).largest() == pytest.approx(0.5, rel=1e-3)


def test_without_any_distance_there_is_no_change():
    plain, ours = {"a": torch.zeros(2)}, {"a": torch.ones(2)}
    assert changes(ours, plain, None, ["a", "of another rank"]).largest() == 0.0


def test_a_small_tensor_that_changes_as_a_whole_is_rounding():
    plain = {
        "large": torch.ones(4),
        "bias": torch.full((4,), 1e-7),
        "small": torch.full((4,), 1e-7),
    }
    ours = {**plain, "bias": -plain["bias"], "large": torch.full((4,), 0.5)}
    found = changes(ours, plain, None, list(plain))
    assert found.roundings() == {"bias"}
    assert found.largest() == found.largest({"bias"}) == pytest.approx(0.5, rel=1e-3)
    assert found.largest({"large", "bias"}) == 0.0


def test_token_ids_are_summed_in_another_order(repeater_of):
    inner = SimpleNamespace(gradient=lambda batch: batch)
    batch = TrainBatch(
        step=3,
        epoch=0,
        inputs=torch.arange(12).reshape(6, 2),
        targets=torch.arange(6),
        sample_ids=np.arange(6),
        global_samples=6,
    )
    moved = _PerturbedStepper(inner, seed=0, change=0.1).gradient(batch)
    order = moved.targets
    assert sorted(order.tolist()) == list(range(6))
    assert order.tolist() != list(range(6))
    assert torch.equal(moved.inputs, batch.inputs[order])
    assert moved.sample_ids.tolist() == order.tolist()


def test_probe_changes_inputs_by_roundings_and_repeats_them_exactly(repeater_of):
    repeater = repeater_of()
    train(repeater, 0, 2)
    plain = list(repeater.strategy.inputs)
    save_tensors(repeater.files.gradient, repeater.strategy.gradients())
    runs = []
    for _ in range(2):
        repeater.strategy.inputs.clear()
        RoundingProbe(repeater).beginning()
        runs.append(list(repeater.strategy.inputs))
    for first, again, exact in zip(*runs, plain, strict=True):
        assert torch.equal(first, again)
        change = ((first - exact).abs() / exact.abs().clamp(min=1e-6)).max()
        assert 2 * INPUTS_U < change < 200 * INPUTS_U


def test_beginning_is_compared_at_each_point_that_has_tensors(repeater_of):
    repeater = repeater_of(steps=20)
    save_tensors(repeater.files.gradient, train(repeater, 0, 16))
    save_tensors(repeater.files.weights_at(EARLY), repeater.strategy.state_dict())
    train(repeater, 16, 20)
    save_tensors(repeater.files.weights_at(FINAL), repeater.strategy.state_dict())
    repeater.strategy.total = torch.zeros(1)
    found = RoundingProbe(repeater).beginning()
    assert list(found) == [GRADIENT, EARLY, FINAL]
    assert all(0 <= change < 1e-3 for change in found.values())


@pytest.mark.parametrize(
    ("spent_s", "training", "steps", "expected"),
    [
        (0, {}, 64, 64),
        (0, {}, 65, 16),  # a replay compares the rest
        (1e6, {}, 64, 1),
        (0, {"precision": "bf16"}, 64, 1),
    ],
)
def test_beginning_has_as_many_steps_as_the_time_allows(
    repeater_of, monkeypatch, spent_s, training, steps, expected
):
    repeater = repeater_of(steps, started_unix_s=0.0, **training)
    monkeypatch.setattr(
        "paceline.train.rank.repeated_steps.time", SimpleNamespace(time=lambda: spent_s)
    )
    save_tensors(repeater.files.gradient, train(repeater, 0, 1))
    repeater.strategy.inputs.clear()
    RoundingProbe(repeater).beginning()
    assert len(repeater.strategy.inputs) == expected


def test_training_that_diverges_by_roundings_has_changed_as_a_whole(repeater_of):
    repeater = repeater_of(steps=20, diverges_in=3)
    save_tensors(repeater.files.gradient, train(repeater, 0, 1))
    found = RoundingProbe(repeater).beginning()
    assert found.pop(GRADIENT) < 1e-3
    assert found == {EARLY: 1.0, FINAL: 1.0}


@pytest.mark.parametrize("diverges_in", [None, 5])
def test_replayed_steps_have_the_largest_change_of_gradient_and_weights(repeater_of, diverges_in):
    repeater = repeater_of(steps=9)
    strategy, path = repeater.strategy, repeater.files.gradient_at("replay5")
    before = repeater.copied_weights()
    save_tensors(path, train(repeater, 5, 7))
    after = repeater.copied_weights()
    strategy.total, strategy.diverges_in = torch.zeros(1), diverges_in
    change = RoundingProbe(repeater).replayed(5, 7, path, before, after)
    assert change < 1e-3 if diverges_in is None else change == pytest.approx(1, rel=1e-3)
