"""Pretrained weights are those of the file, or the message names what differs."""

from __future__ import annotations

import os
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline.base.errors import DataError, UsageError
from paceline.plan.spec.extensions import WORKLOADS
from paceline.train.training.task import Task, TaskOptions, TaskSettings
from paceline.train.workloads.build import build_model, make_task, on_meta_device

SMALL = {
    "resnet101": {"depth": 26, "width": 4},
    "deeplab": {"depth": 26, "width": 4},
    "east": {"width": 8},
    "gpt-small": {"width": 8, "blocks": 1},
}
LARGE = ("complex-small", "simple-big")  # VGG16 and AlexNet


class Options(TaskOptions):
    weights: str | None = None


class Small(Task):
    Options = Options

    def model(self):
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def pretrained(self):
        return self.options.weights


class NewHead(Small):
    new_parameters = ("2.*",)


class Tied(Small):
    def model(self):
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model


def task_of(kind, file):
    return kind(TaskSettings(options={"weights": str(file)}))


@pytest.fixture
def weights():
    torch.manual_seed(9)
    state = Small(TaskSettings()).model().state_dict()
    return {
        name: torch.rand_like(t) if t.is_floating_point() else t + 7 for name, t in state.items()
    }


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_weights_and_running_statistics_come_from_the_file(name, weights, tmp_path):
    file = tmp_path / name
    (save_file if name.endswith("safetensors") else torch.save)(weights, file)
    model = build_model(task_of(Small, file))
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[key])
    # planning needs no file
    file.unlink()
    assert on_meta_device(task_of(Small, file)).get_parameter("0.weight").is_meta


def test_new_parameters_keep_the_weights_of_the_model(weights, tmp_path):
    other_head = {
        **weights, "2.weight": torch.ones(9, 4), "2.bias": torch.ones(9), "2.x": torch.ones(1),
    }  # fmt: skip
    save_file(other_head, tmp_path / "w.safetensors")
    model = build_model(task_of(NewHead, tmp_path / "w.safetensors"))
    plain = build_model(Small(TaskSettings()))
    assert torch.equal(model.get_parameter("0.weight"), weights["0.weight"])
    assert torch.equal(model.get_parameter("2.weight"), plain.get_parameter("2.weight"))


@pytest.mark.parametrize("name", [w.name for w in WORKLOADS.all() if w.name not in LARGE])
def test_built_in_workloads_take_weights_from_a_file(name, tmp_path):
    kind = {"classes": 2, "image_size": 64}
    options = SMALL.get(name, {})
    state = build_model(make_task(name, seed=2, options=options, **kind)).state_dict()
    tied = {t.data_ptr(): key for key, t in state.items()}
    save_file({key: state[key] for key in tied.values()}, tmp_path / "w.safetensors")
    with_weights = {**options, "weights": str(tmp_path / "w.safetensors")}
    model = build_model(make_task(name, options=with_weights, **kind))
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key]), key


def test_patterns_allow_weights_of_an_encoder_alone(tmp_path):
    trunk = build_model(make_task("resnet101", classes=9, options=SMALL["resnet101"])).state_dict()
    save_file(trunk, tmp_path / "w.safetensors")
    options: dict[str, object] = {**SMALL["deeplab"], "weights": str(tmp_path / "w.safetensors")}
    with pytest.raises(UsageError, match=r"missing in the file: pyramid.*only in the file: fc\."):
        build_model(make_task("deeplab", image_size=64, options=options))
    options["new_parameters"] = ["pyramid.*", "reduce.*", "decoder.*", "fc.*"]
    model = build_model(make_task("deeplab", image_size=64, options=options))
    for key, tensor in model.state_dict().items():
        assert key not in trunk or torch.equal(tensor, trunk[key])


def test_tied_weights_need_one_of_their_names(tmp_path):
    save_file({"1.weight": torch.ones(5, 3)}, tmp_path / "w.safetensors")
    model = build_model(task_of(Tied, tmp_path / "w.safetensors"))
    assert torch.equal(model.get_parameter("0.weight"), torch.ones(5, 3))


def test_all_differences_are_listed(weights, tmp_path):
    del weights["0.bias"]
    weights |= {"2.weight": torch.ones(9, 4), "head.bias": torch.ones(1)}
    save_file(weights, tmp_path / "w.safetensors")
    message = (
        "Small.pretrained: .* has other weights than the model; missing in the file: 0.bias; "
        r"only in the file: head.bias; of another shape: 2.weight \(9x4 instead of 2x4\)\. .*"
        "new_parameters"
    )
    with pytest.raises(UsageError, match=message):
        build_model(task_of(Small, tmp_path / "w.safetensors"))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(
        UsageError, match=re.escape(f"expected the file {tmp_path}/w.pt, found none")
    ):
        build_model(task_of(Small, tmp_path / "w.pt"))


class Malicious:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


@pytest.mark.parametrize("content", [{"0.weight": Malicious()}, {"epoch": 3}, [torch.ones(1)]])
def test_file_with_more_than_tensors_is_refused_and_not_executed(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(content, "w.pt")
    with pytest.raises(
        DataError, match=r"w.pt: expected a (safetensors file|dictionary of tensors)"
    ):
        build_model(task_of(Small, "w.pt"))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"no tensors", b""])
@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_damaged_file_is_refused(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"expected a safetensors file, or a file of torch\.save"):
        build_model(task_of(Small, tmp_path / name))


def test_error_without_a_message_is_named_by_its_type(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError

    (tmp_path / "w.pt").touch()
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(DataError, match="with tensors only: OSError"):
        build_model(task_of(Small, tmp_path / "w.pt"))


class AllFrozen(Small):
    def model(self):
        return super().model().requires_grad_(requires_grad=False)


def test_model_without_a_parameter_to_train_is_refused():
    with pytest.raises(
        UsageError, match=r"AllFrozen.model: expected at least one parameter to train"
    ):
        build_model(AllFrozen(TaskSettings()))
