"""The record of a script's state for `paceline verify --resume-with`, in one process."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.measure.records.files import document
from paceline.measure.records.layout import RankFiles
from paceline.measure.records.own_steps import ResumedRank
from paceline.plan.trials.trial import ResumePart
from paceline.train.rank.script.program import EnoughSteps
from paceline.train.rank.script.resume_state import (
    CheckpointWatch,
    ResumeRecorder,
    generators,
    sketch,
)


def recorded(folder, train, **part):
    own = RankFiles(folder / "rank")
    own.root.mkdir(parents=True)
    recorder = ResumeRecorder(ResumePart(**part), own)
    try:
        with recorder.recording():
            train()
    except EnoughSteps:
        pass
    found = document(own.resumed, ResumedRank)
    assert found is not None
    return found


def training(folder, *, save_after=(), steps=4):
    def train():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        average = copy.deepcopy(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        data = TensorDataset(torch.randn(8 * steps, 4))
        for step, (inputs,) in enumerate(DataLoader(data, batch_size=8)):
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            if step + 1 in save_after:
                torch.save(model.state_dict(), folder / f"{step}.pt")
        assert average is not model

    return train


def test_each_step_has_the_state_with_which_it_begins(tmp_path):
    found = recorded(tmp_path, training(tmp_path), full_from=1)
    assert [step.step for step in found.steps] == [0, 1, 2, 3]
    assert not found.steps[0].state.weights, "only sums before the first full step"
    second = found.steps[1]
    assert set(second.state.weights) == {
        "0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias",
    }  # fmt: skip
    assert {"0.weight.exp_avg", "0.weight.step"} <= set(second.state.moments)
    assert second.state.moments["0.weight.step"][0] == 1
    assert "1.running_mean" in second.state.buffers
    assert any(name.startswith("Sequential#") for name in second.state.copies)
    assert second.values["group0.lr"] == 0.1
    assert second.values["group0.betas[1]"] == 0.999
    assert [step.scaler["scaler.scale"] for step in found.steps] == [8.0, 8.0, 16.0, 16.0]
    assert len(set(second.samples)) == 8
    assert not set(second.samples) & set(found.steps[0].samples)
    assert found.saved_after is None


def test_two_equal_trainings_have_equal_records(tmp_path):
    first = recorded(tmp_path / "a", training(tmp_path))
    second = recorded(tmp_path / "b", training(tmp_path))
    assert [step.total for step in first.steps] == [step.total for step in second.steps]
    assert first.steps[3].state.moments == second.steps[3].state.moments
    assert first.steps[3].generators["torch"] == second.steps[3].generators["torch"]


def test_the_training_ends_at_the_first_step_after_a_checkpoint(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    part = {"watched": str(work), "stop_after": 2, "words": ("--resume", "latest")}
    found = recorded(tmp_path, training(work, save_after=(1, 3), steps=6), **part)
    assert (found.saved_after, found.was_stopped) == ([1], True)
    assert len(found.steps) == 2
    assert not found.saved_while_stopping


def test_a_training_that_ends_by_itself(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    found = recorded(tmp_path, training(work, save_after=(2, 4)), watched=str(work))
    assert (found.saved_after, found.was_stopped) == ([4], False)


@pytest.mark.parametrize(
    ("words", "written", "expected"),
    [
        (("--resume", "ckpt.pt"), {"ckpt.pt": 1}, True),
        (("--resume=out/ckpt.pt",), {"out/ckpt.pt": 1}, True),
        (("--resume", "ckpt.pt"), {"log.txt": 1000}, False),
        (("--resume", "out/"), {"out/log.txt": 10}, False),
        (("--resume", "out/"), {"out/part-0": 60, "log.txt": 1}, True),
        (("--init_from=resume",), {"some/model.bin": 60}, True),
        (("--init_from=resume",), {"events.out": 10}, False),
        ((), {"__pycache__/utils.cpython-311.pyc": 200}, False),
    ],
)
def test_which_files_are_the_checkpoint(tmp_path, words, written, expected):
    (tmp_path / "data.bin").write_bytes(bytes(200))
    watch = CheckpointWatch(ResumePart(watched=str(tmp_path), words=words))
    assert not watch.changed(100)
    for name, size in written.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(size))
    assert watch.changed(100) is expected
    assert not watch.changed(100), "it has not changed since"


def test_a_sketch_measures_differences():
    generator = torch.Generator().manual_seed(5)
    for size in (1, 7, 70_000, 5_000_000):
        tensor = torch.randn(size, generator=generator)
        change = 0.01 * torch.randn(size, generator=generator)
        ours, theirs = sketch(tensor + change), sketch(tensor)
        assert ours[0] == size
        apart = sum((a - b) ** 2 for a, b in zip(ours[1:], theirs[1:], strict=True)) ** 0.5
        assert apart == pytest.approx(float(change.norm()), rel=0.9)
        assert sketch(tensor.clone()) == theirs
    assert all(abs(each) <= 1e300 for each in sketch(torch.tensor([float("nan"), float("inf")])))


def test_each_generator_has_a_checksum():
    for name, draw in {
        "python": random.random,
        "torch": lambda: torch.rand(1),
        "numpy": np.random.rand,
    }.items():
        before = generators()
        draw()
        after = generators()
        assert [key for key in before if before[key] != after[key]] == [name]
