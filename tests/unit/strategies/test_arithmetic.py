"""Accumulation, compiled models and fp16 train as torch alone does, by each strategy that has
them."""

from __future__ import annotations

import pytest
import torch
from tests.unit.strategies import own_training as own
from tests.unit.strategies.own_training import TRIALS
from tests.unit.strategies.pipeline.node import distance

from paceline.training import passes
from paceline.training.compilation import compile_model

REPLICAS = ["sequential", "threads-2", "processes-2"]


@pytest.mark.parametrize("name", REPLICAS)
def test_accumulation_of_the_spec_is_equivalent(name, monkeypatch):
    parts = []
    divide = passes.parts_of

    def counted(task, batch):
        found = divide(task, batch)
        parts.append(len(found))
        return found

    monkeypatch.setattr(passes, "parts_of", counted)
    trial = own.trial_of(**TRIALS[name], accumulation_steps=4)
    own.assert_equivalent(trial)
    assert max(parts) == 4


@pytest.mark.parametrize("name", ["sequential", "processes-2"])
def test_fp16_differs_from_fp32_by_its_roundings(name):
    fp16, fp32 = (own.trial_of(**TRIALS[name], precision=p) for p in ("fp16", "fp32"))
    found, wanted = own.train(fp16, sizes=[8]), own.train(fp32, sizes=[8])
    gap = distance(found[0][0], wanted[0][0])
    assert 1e-6 < gap < 2.0**-4
    assert distance(found[-1][1], found[0][1]) == 0


def test_compiled_model_has_the_same_outputs(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    trial = own.trial_of(**TRIALS["sequential"], compile=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    inputs = torch.ones(2, 4)
    wanted = model(inputs)
    compile_model(model, trial.training)
    assert model._compiled_call_impl is not None
    torch.testing.assert_close(model(inputs), wanted)
