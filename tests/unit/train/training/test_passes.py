"""Communication of layers within the passes is measured apart from computation."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest
import torch
from tests.support.strategies import train_batch
from tests.unit.train.strategies.own_training import trial_of
from torch import nn

from paceline.collectives.recorder import PassCommunication, is_awaiting
from paceline.train.training.passes import Passes, run_passes
from paceline.train.training.task import Task
from paceline.train.workloads.build import build_model, task_of


def test_time_of_a_sum_is_added_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = map(float, itertools.count())  # each is one second later
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    monkeypatch.setattr("paceline.collectives.recorder.time", clock)
    seen = []

    def total(values: torch.Tensor) -> torch.Tensor:
        seen.append(is_awaiting())
        return 2 * values

    communication = PassCommunication()
    call = communication.timed(total)
    assert call(torch.ones(2)).tolist() == [2.0, 2.0]
    call(torch.ones(2))
    assert communication.total_s == 2.0
    assert seen == [True, True]
    assert not is_awaiting()


def test_a_failed_sum_leaves_no_mark() -> None:
    def total(values: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a peer left")

    with pytest.raises(RuntimeError, match="a peer left"):
        PassCommunication().timed(total)(torch.ones(1))
    assert not is_awaiting()


def test_times_of_a_gradient_add_up_and_count_communication_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 20.0)
    passed = Passes(0.0, started_s=1.0, forwarded_s=5.0, ready_s=15.0, comm_s=(0.5, 2.5))
    assert passed.own_ready_s == 12.0
    found = passed.result(alone=False)
    assert (found.forward_s, found.backward_s, found.pass_comm_s) == (3.5, 7.5, 3.0)
    assert found.comm_s == 5.0
    assert found.forward_s + found.backward_s + found.pass_comm_s + found.comm_s == 20.0 - 1.0
    alone = passed.result(alone=True)
    assert (alone.backward_s, alone.comm_s, alone.comm_ready_unix_s) == (12.5, None, None)


class Summing(nn.Linear):
    """Waits 1 s for other replicas in a forward pass, and 10 s in a backward pass."""

    communication = PassCommunication()

    def forward(self, inputs):
        outputs = super().forward(inputs)
        outputs.register_hook(lambda _: self.wait(10.0))
        self.wait(1.0)
        return outputs

    def wait(self, seconds):
        self.communication.total_s += seconds


class WithSums(Task):
    def model(self):
        return nn.Sequential(nn.Flatten(1), Summing(3072, 3))


@pytest.mark.parametrize(("parts", "forwarded_s", "ready_s"), [(1, 9.0, 16.0), (2, 17.0, 49.0)])
def test_forward_passes_of_all_parts_count_as_if_they_came_first(
    monkeypatch: pytest.MonkeyPatch, parts: int, forwarded_s: float, ready_s: float
) -> None:
    """Readings of the clock: 0 and 1 for the start, then begin, middle and end of each part."""
    squares = (float(number**2) for number in itertools.count())
    clock = SimpleNamespace(perf_counter=lambda: next(squares))
    monkeypatch.setattr("paceline.train.training.devices.time", clock)
    trial = trial_of("sequential", task=f"{__name__}:WithSums", accumulation_steps=parts)
    task, communication = task_of(trial.training, classes=3), PassCommunication()
    monkeypatch.setattr(Summing, "communication", communication)
    model, batch = build_model(task), train_batch(4)
    passed = run_passes(task, model, batch, trial.training, communication=communication)
    # (9 + 36) - (4 + 25) seconds in the forward passes of two parts
    assert (passed.started_s, passed.forwarded_s, passed.ready_s) == (1.0, forwarded_s, ready_s)
    assert passed.comm_s == (parts * 1.0, parts * 10.0)


class LogOfTarget(Task):
    """A loss that is not finite for targets of 0."""

    def model(self):
        return nn.Sequential(nn.Flatten(1), nn.Linear(12, 1))

    def loss(self, outputs, targets):
        return -torch.log(targets.sum() * outputs[:, 0].exp())


def test_an_empty_share_has_gradients_of_zero_whatever_the_loss() -> None:
    trial = trial_of("sequential", task=f"{__name__}:LogOfTarget")
    task = task_of(trial.training, classes=3)
    model = build_model(task)
    images, targets = torch.ones(0, 3, 2, 2), torch.ones(0, 1)
    batch = train_batch(0, inputs=images, targets=targets, global_samples=1)
    assert run_passes(task, model, batch, trial.training).loss_sum == 0.0
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() == 0.0


def test_loss_is_read_after_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is waited for there, and would compute nothing until the host goes on."""
    happened = []
    read = torch.Tensor.__float__

    def watched(self: torch.Tensor) -> float:
        happened.append("loss read")
        return read(self)

    trial = trial_of("sequential")
    task = task_of(trial.training, classes=3)
    model = build_model(task)
    next(model.parameters()).register_hook(lambda _: happened.append("backward pass"))
    batch = train_batch(2)
    monkeypatch.setattr(torch.Tensor, "__float__", watched)
    passed = run_passes(task, model, batch, trial.training)
    assert passed.loss_sum > 0
    assert happened == ["backward pass", "loss read"] * task.accumulation_steps
