"""Names and shapes as torchvision publishes them, so that its weights load."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.base.errors import UsageError
from paceline.train.training.task import Task, TaskSettings
from paceline.train.training.tensors import sha256_of
from paceline.train.workloads.build import build_model, make_task

ALEXNET = {
    "features.0.weight": (64, 3, 11, 11), "features.0.bias": (64,),
    "features.3.weight": (192, 64, 5, 5), "features.3.bias": (192,),
    "features.6.weight": (384, 192, 3, 3), "features.6.bias": (384,),
    "features.8.weight": (256, 384, 3, 3), "features.8.bias": (256,),
    "features.10.weight": (256, 256, 3, 3), "features.10.bias": (256,),
    "classifier.1.weight": (4096, 9216), "classifier.1.bias": (4096,),
    "classifier.4.weight": (4096, 4096), "classifier.4.bias": (4096,),
    "classifier.6.weight": (1000, 4096), "classifier.6.bias": (1000,),
}  # fmt: skip
VGG16 = {
    "features.0.weight": (64, 3, 3, 3), "features.0.bias": (64,),
    "features.2.weight": (64, 64, 3, 3), "features.2.bias": (64,),
    "features.5.weight": (128, 64, 3, 3), "features.5.bias": (128,),
    "features.7.weight": (128, 128, 3, 3), "features.7.bias": (128,),
    "features.10.weight": (256, 128, 3, 3), "features.10.bias": (256,),
    "features.12.weight": (256, 256, 3, 3), "features.12.bias": (256,),
    "features.14.weight": (256, 256, 3, 3), "features.14.bias": (256,),
    "features.17.weight": (512, 256, 3, 3), "features.17.bias": (512,),
    "features.19.weight": (512, 512, 3, 3), "features.19.bias": (512,),
    "features.21.weight": (512, 512, 3, 3), "features.21.bias": (512,),
    "features.24.weight": (512, 512, 3, 3), "features.24.bias": (512,),
    "features.26.weight": (512, 512, 3, 3), "features.26.bias": (512,),
    "features.28.weight": (512, 512, 3, 3), "features.28.bias": (512,),
    "classifier.0.weight": (4096, 25088), "classifier.0.bias": (4096,),
    "classifier.3.weight": (4096, 4096), "classifier.3.bias": (4096,),
    "classifier.6.weight": (1000, 4096), "classifier.6.bias": (1000,),
}  # fmt: skip


@pytest.mark.parametrize(("name", "published"), [("simple-big", ALEXNET), ("complex-small", VGG16)])
def test_names_and_shapes_are_those_published(name, published):
    model = build_model(make_task(name, classes=1000, dropout=True, seed=1))
    found = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert list(found.items()) == list(published.items())


class OneWeightPerClass(Task):
    def model(self):
        model = nn.Sequential(nn.Linear(4, 2))
        model.register_parameter("scale", nn.Parameter(torch.ones(self.settings.classes)))
        return model


def test_model_for_an_unknown_number_of_classes_is_refused():
    with pytest.raises(UsageError, match=r"but scale has none; self.settings.classes is 0"):
        build_model(OneWeightPerClass(TaskSettings(seed=1)))
    build_model(OneWeightPerClass(TaskSettings(seed=1, classes=2)))


def test_modules_stand_at_torchvisions_indices():
    model = build_model(make_task("simple-big", classes=3, dropout=True, seed=1))
    kinds = [type(m).__name__ for m in model.classifier]
    assert kinds == [
        "SampleDropout", "Linear", "ReLU", "SampleDropout", "Linear", "ReLU", "Linear",
    ]  # fmt: skip
    assert [type(m).__name__ for m in model.features].count("MaxPool2d") == 3


@pytest.mark.parametrize("size", [32, 64])
def test_tiny_net_takes_small_images_and_any_number_of_classes(size):
    model = build_model(make_task("tiny", classes=5, dropout=False, seed=1))
    assert model(torch.zeros(2, 3, size, size)).shape == (2, 5)


def test_weights_follow_from_the_seed_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = sha256_of(build_model(make_task("tiny", classes=3, dropout=True, seed=5)).state_dict())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        again = build_model(make_task("tiny", classes=3, dropout=False, seed=5))
    finally:
        torch.set_num_threads(threads)
    assert sha256_of(again.state_dict()) == first
    other = build_model(make_task("tiny", classes=3, dropout=True, seed=6))
    assert sha256_of(other.state_dict()) != first


def test_vgg_weights_have_torchvisions_distribution():
    state = build_model(make_task("complex-small", classes=3, dropout=True, seed=1)).state_dict()
    # kaiming_normal_, fan out: std = sqrt(2 / (out channels * 3 * 3))
    assert state["features.28.weight"].std().item() == pytest.approx(
        (2 / (512 * 9)) ** 0.5, rel=0.01
    )
    assert state["classifier.0.weight"].std().item() == pytest.approx(0.01, rel=0.01)
    assert not state["classifier.6.bias"].any()


def test_alexnet_weights_have_torchs_default_distribution():
    weight = build_model(make_task("simple-big", classes=3, dropout=True, seed=1)).state_dict()[
        "classifier.4.weight"
    ]
    bound = 1 / 4096**0.5  # uniform in +-1/sqrt(inputs)
    assert bound * 0.99 < weight.max().item() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)


def test_unknown_workload_is_answered_with_the_known_ones():
    with pytest.raises(
        UsageError, match=r'"complex-small", "simple-big", "tiny", .*, got "resnet"'
    ):
        make_task("resnet", classes=3)
