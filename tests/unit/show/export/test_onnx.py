"""ONNX models compute what torch computes. Needs the extra `onnx`."""

from __future__ import annotations

import json

import pytest
import torch
from tests.unit.analysis import fabricate
from torch import nn

from paceline.base.errors import DataError, UsageError
from paceline.show.export import onnx as exporter
from paceline.train.training.task import Task
from paceline.train.training.tensors import save_tensors
from paceline.train.workloads.build import build_model, make_task

pytestmark = pytest.mark.needs("onnx")
CLASSES = 3


@pytest.fixture
def trained(run, pair):
    """Return a trial with weights of its model, and the model."""
    model = build_model(make_task("tiny", classes=CLASSES, dropout=False, seed=4)).eval()
    save_tensors(run.files.trial(pair).weights, model.state_dict())
    return pair, model


def assert_computes(path, model, inputs, names):
    """Compare the outputs of an ONNX file with those of the model. names: of input and output."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run([names[1]], {names[0]: inputs.numpy()})
    torch.testing.assert_close(
        torch.from_numpy(found), model(inputs).detach(), rtol=1e-3, atol=1e-5
    )


def test_model_gives_the_logits_of_torch(run, trained, tmp_path):
    trial, model = trained
    (path,) = run.export("onnx", tmp_path / "out", trial)
    assert path == tmp_path / f"out/{trial}.onnx"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    images = torch.randn(5, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    assert_computes(path, model, images, ("images", "logits"))


def test_a_model_that_computes_something_else_is_not_written(run, trained, tmp_path, monkeypatch):
    trial, model = trained
    other = build_model(make_task("tiny", classes=CLASSES, dropout=False, seed=5)).eval()
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        other, (torch.zeros(2, 3, 64, 64),), path, input_names=["images"],
        output_names=["logits"], dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False,
    )  # fmt: skip
    with pytest.raises(DataError, match="outputs differ by up to"):
        exporter._check(trial, path, model, torch.ones(1, 3, 64, 64))


def test_weights_that_were_not_kept_are_asked_for(run, alone, pair, tmp_path):
    run.files.trial(pair).weights.unlink()
    with pytest.raises(DataError) as raised:
        run.export("onnx", tmp_path / "out", pair)
    assert "set `keep_tensors = true`" in str(raised.value)
    assert str(raised.value).endswith(f"Weights were kept of: {alone}.")


def test_weights_of_another_model_are_refused(run, alone, tmp_path):
    # the fabricated weights belong to no model
    with pytest.raises(DataError, match="expected the weights of tiny-alexnet"):
        run.export("onnx", tmp_path / "out", alone)


SCRIPT = {"path": "/t.py", "arguments": [], "directory": "/", "samples_per_step": None}


def test_script_of_the_user_exports_its_model_itself(run, pair, tmp_path):
    files = run.files.trial(pair)
    training = json.loads(files.trial.read_text("utf-8"))["training"]
    fabricate.edit_json(files.trial, training={**training, "script": SCRIPT})
    with pytest.raises(UsageError, match=r"ran a script\. Call torch\.onnx\.export there"):
        run.export("onnx", tmp_path / "out", pair)


GPT = "paceline.train.workloads.gpt:GPT"


@pytest.fixture
def own(run, pair):
    """Make a trial one of a user's task; return a function that keeps a model's weights."""
    files = run.files.trial(pair)

    def make(path, **facts):
        training = json.loads(files.trial.read_text("utf-8"))["training"]
        fabricate.edit_json(files.trial, training={**training, "task": path, "workload": "mine"})
        fabricate.edit_json(files.result, **facts)
        model = build_model(make_task(path, seed=4, **facts)).eval()
        save_tensors(files.weights, model.state_dict())
        return model

    return make


def test_language_model_of_the_user_gives_the_scores_of_torch(run, pair, own, tmp_path):
    model = own(GPT, classes=0, input_shape=[65], input_dtype="int64")
    (path,) = run.export("onnx", tmp_path / "out", pair)
    tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(1))
    assert_computes(path, model, tokens, ("inputs", "outputs"))


class ByValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else self.linear(-x)


class ByValueTask(Task):
    def model(self):
        return ByValue()


def test_model_that_torch_cannot_export_is_refused(run, pair, own, tmp_path):
    own(f"{__name__}:ByValueTask", classes=2, input_shape=[3], input_dtype="float32")
    with pytest.raises(UsageError, match=r"torch.onnx cannot export ByValue: .*depends on values"):
        run.export("onnx", tmp_path / "out", pair)
    assert not list((tmp_path / "out").glob("*.onnx"))
