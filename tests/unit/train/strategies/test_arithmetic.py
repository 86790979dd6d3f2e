"""Accumulation, compiled models and fp16 train as torch alone does, by each strategy that has
them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.unit.train.strategies import own_training as own
from tests.unit.train.strategies.own_training import TRIALS
from tests.unit.train.strategies.pipeline.node import distance

from paceline.base.errors import EnvironmentLacks
from paceline.train.training import passes
from paceline.train.training.compilation import compile_model, compiler_settings

REPLICAS = ["sequential", "threads-2", "processes-2"]
CACHE, WORKERS = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"


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


def test_compiled_model_has_the_same_outputs_and_calls_replaced_layers(monkeypatch):
    monkeypatch.setenv(WORKERS, "1")
    trial = own.trial_of(**TRIALS["sequential"], compile=True)
    replaced, compiled = torch.nn.ReLU(), []

    def forward(inputs):
        compiled.append(torch.compiler.is_compiling())
        return inputs.relu()

    replaced.forward = forward
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), replaced)
    inputs = torch.ones(2, 4)
    wanted = model(inputs)
    compile_model(model, trial.training)
    assert model._compiled_call_impl is not None
    torch.testing.assert_close(model(inputs), wanted)
    assert compiled == [False, False]


def test_compiled_code_lies_in_a_private_folder_or_in_that_of_the_user(monkeypatch, tmp_path):
    training = own.trial_of(**TRIALS["sequential"], compile=True).training
    monkeypatch.setenv("CXX", "sh")  # any program that exists
    monkeypatch.setenv(WORKERS, "7")
    monkeypatch.setenv(CACHE, "")
    with compiler_settings(training):
        folder = Path(os.environ[CACHE])
        assert folder.stat().st_mode & 0o077 == 0
        assert os.environ[WORKERS] == "1"
    assert CACHE not in os.environ
    assert not folder.exists()
    monkeypatch.setenv(CACHE, str(tmp_path))
    with compiler_settings(training):
        assert os.environ[CACHE] == str(tmp_path)
    assert tmp_path.exists()


def test_only_a_compiled_training_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv(CACHE, raising=False)
    plain, compiled = (own.trial_of("sequential", compile=whether) for whether in (False, True))
    with compiler_settings(plain.training):
        assert CACHE not in os.environ
    with pytest.raises(EnvironmentLacks, match="found no no-such-compiler; install"):
        compiler_settings(compiled.training).__enter__()
