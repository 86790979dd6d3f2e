"""Faults that only the end of a training shows: each is found, and no exact training is accused."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace

import pytest
from tests.support.trials import changed, placement

from paceline.analysis.equivalence.check import check_equivalence
from paceline.measure.records.documents import write_trial
from paceline.measure.records.files import read_json, write_json
from paceline.measure.records.layout import RunFiles
from paceline.train.rank import train as worker
from paceline.train.strategies.ddp import DdpStrategy
from paceline.train.training.optimizers import TaskOptimizer

SHORT, LONG = 20, 100  # steps
TASK = """
import torch
from torch import nn
from paceline import Task

class Mine(Task):
    def model(self):
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
            nn.Linear(3600, 3),
        )

    def schedule(self, optimizer):
        steps = self.settings.steps
        return None if steps < 64 else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
"""


@pytest.fixture
def run(photos, make_trial, solo, tmp_path):
    """Trains a trial in one run directory, where the baseline is `base`."""

    def train(name, steps, strategy="sequential", replicas=1, source=TASK, **training):
        path = tmp_path / "mine.py"
        path.write_text(source)
        trial = make_trial(
            epochs=LONG, max_steps=steps, task=f"{path}:Mine", dropout=False, **training
        )
        place = placement(1, replicas, replicas_per_node=replicas, oversubscribe=True)
        trial = changed(trial, id=name, local_strategy=strategy, placement=place)
        files = RunFiles(tmp_path).trial(name)
        write_trial(trial, files)
        worker.train(trial, replace(solo, process_started_unix_s=time.time()), files)
        return files

    return train


def found(trial, baseline):
    equivalence = check_equivalence(trial, baseline)
    faults = [c.reason for c in equivalence.checks if c.decisive and c.passed is False]
    return equivalence, " ".join(faults)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("steps", [SHORT, LONG])
def test_exact_training_is_equivalent_as_a_whole(run, seed, steps):
    base = run("base", steps, seed=seed)
    for name, strategy, replicas in (("two", "threads", 2), ("three", "threads", 3)):
        equivalence, faults = found(run(name, steps, strategy, replicas, seed=seed), base)
        assert (equivalence.grade, faults) == ("whole", ""), equivalence.checks
    equivalence, faults = found(base, base)
    assert (equivalence.grade, faults) == ("whole", "")


def lose_one_update(plain, optimizer, share):
    if optimizer._steps != 17:
        plain(optimizer, share)


def halve_late_rates(plain, optimizer, share):
    plain(optimizer, share / 2 if optimizer._steps >= LONG // 2 else share)


def stop_schedule(_plain, optimizer):
    optimizer._steps += 1
    if optimizer._steps < LONG // 2:
        optimizer._schedule.step()


def double_late_gradients(plain, strategy, batch):
    result = plain(strategy, batch)
    if batch.step >= LONG // 2:
        for parameter in strategy._model.parameters():
            parameter.grad *= 2
    return result


@pytest.mark.parametrize(
    ("steps", "owner", "name", "fault", "word"),
    [
        (SHORT, TaskOptimizer, "_step_with", lose_one_update, "in step 17: an update was lost"),
        (LONG, TaskOptimizer, "_step_with", lose_one_update, "in step 17: an update was lost"),
        (LONG, TaskOptimizer, "_step_with", halve_late_rates, "the distance that training moved"),
        (LONG, TaskOptimizer, "_end_step", stop_schedule, "98 steps 0.weight had learning rate"),
        (LONG, DdpStrategy, "gradient", double_late_gradients, "times its gradient's norm"),
    ],
)
def test_wrong_step_after_the_first_is_found(run, monkeypatch, steps, owner, name, fault, word):
    base = run("base", steps)
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: fault(plain, *given))
    equivalence, faults = found(run("other", steps, "intraop"), base)
    assert equivalence.equivalent is False
    assert word in faults


def test_without_the_baselines_states_only_the_first_steps_are_shown(run, tmp_path):
    base = run("base", LONG)
    shutil.rmtree(RunFiles(tmp_path).replay)
    equivalence, faults = found(run("two", LONG, "threads", 2), base)
    assert (equivalence.equivalent, equivalence.grade, faults) == (True, "start", "")
    reasons = {c.name: c.reason for c in equivalence.checks}
    assert "state after 50 steps does not exist" in reasons["replay_50"]


def test_replicas_that_drift_are_not_equivalent(run):
    base = run("base", SHORT)
    other = run("two", SHORT, "threads", 2)
    found_weights = read_json(other.rank(0).weights)
    found_weights["replicas"][2]["1.running_mean"] = "other"
    write_json(other.rank(0).weights, found_weights)
    equivalence, faults = found(other, base)
    assert equivalence.equivalent is False
    assert "replica 1 of rank 0 ended with another 1.running_mean than rank 0" in faults
    found_weights["local"] = ["1.running_mean"]
    write_json(other.rank(0).weights, found_weights)
    assert found(other, base)[0].grade == "whole"


BUFFERS = """
import torch
from torch import nn
from paceline import Task

class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.seen = inputs.detach().mean()
        return inputs

class Mine(Task):
    def model(self):
        return nn.Sequential(Mean(), nn.Flatten(), nn.Linear(3072, 3))
"""


def test_buffers_that_no_one_synchronises_are_not_equivalent(run):
    base = run("base", 4, source=BUFFERS)
    equivalence, faults = found(run("two", 4, "threads", 2, source=BUFFERS), base)
    assert equivalence.equivalent is False
    assert "replica 1 of rank 0 ended with another 0.seen than" in faults


UNITS = """
import torch
from torch import nn
from paceline import Task

class Units(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        return self.activation(self.weight * inputs - (1 - 2.0**-22))  # just above zero

class Mine(Task):
    def model(self):
        return Units(nn.{activation}())

    def to_input(self, samples):
        return torch.ones(len(samples), 3)
"""


@pytest.mark.parametrize(("activation", "low", "high"), [("ReLU", 0.05, 10), ("Softplus", 0, 1e-4)])
def test_only_units_at_their_threshold_are_sensitive(run, activation, low, high):
    base = run("base", 2, source=UNITS.replace("{activation}", activation))
    rounding = read_json(base.result)["replayed"]["rounding"]
    assert rounding.keys() == {"gradient", "final"}
    assert low < rounding["gradient"] < high


def test_a_baseline_of_another_precision_measures_its_own_first_gradient(run):
    run("base", 2)
    half = run("half", 2, precision="fp16")
    assert read_json(half.result)["replayed"]["rounding"].keys() == {"gradient"}
