"""A task in a user's file is found, checked and given its options."""

from __future__ import annotations

import hashlib
import re

import pytest
from safetensors.torch import save_file

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.plan.spec.extensions import WORKLOADS
from paceline.train.training.dropout import SampleDropout
from paceline.train.training.tensors import sha256_of
from paceline.train.workloads.build import build_model, load_task_class, make_task
from paceline.train.workloads.facts import derive_facts

TASK = """
import torch
from pathlib import Path
from safetensors.torch import load_file
from torch import nn
import paceline

FILE = Path(__file__).with_name("weights.safetensors")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
    def forward(self, x):
        return self.linear(x)

class Options(paceline.TaskOptions):
    width: int = 8

class Small(paceline.Task):
    Options = Options
    def model(self):
        width = self.options.width
        return nn.Sequential(nn.Linear(3, width), nn.Dropout(0.5), nn.Linear(width, 2))

class NotSequential(paceline.Task):
    def model(self):
        return Net()

class CrossedNet(Net):
    def forward(self, x):
        return torch.cat([self.linear(self.linear(x)[:, [0, 1, 1]]), x], 1)

class Crossed(paceline.Task):
    def model(self):
        return CrossedNet()

    def example_input(self):
        return torch.zeros(1, 3)

class Unused(Small):
    def model(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model[0].register_parameter("scale", nn.Parameter(torch.ones(1)))
        return model

    def example_input(self):
        return torch.zeros(1, 3)

class UnusedButFrozen(Unused):
    def model(self):
        model = super().model()
        model[0].scale.requires_grad_(False)
        return model

class Frozen(Small):
    def model(self):
        model = super().model()
        model[0].weight.requires_grad_(False)
        return model

class ByShape(Small):
    def optimizer(self, parameters):
        wide = [p for n, p in parameters if p.dim() > 1]
        rest = [p for n, p in parameters if p.dim() == 1]
        groups = [{"params": g, "lr": r} for g, r in ((wide, 0.1), (rest, 0.01)) if g]
        return torch.optim.SGD(groups)

class Adam(Small):
    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.1)

class Factored(Small):
    def optimizer(self, parameters):
        return torch.optim.Adafactor(parameters, lr=0.1)

class Tied(Small):
    def model(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        return model

class Twice(Small):
    def model(self):
        linear, norm, relu = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()
        return nn.Sequential(linear, norm, relu, linear, norm, relu)

class TwiceNormalised(Small):
    def model(self):
        norm, relu = nn.BatchNorm1d(4), nn.ReLU()
        return nn.Sequential(nn.Linear(4, 4), norm, relu, nn.Linear(4, 4), norm, relu)

class TwiceActivated(Small):
    def model(self):
        relu, dropout = nn.ReLU(), nn.Dropout(0.5)
        return nn.Sequential(nn.Linear(4, 4), relu, dropout, nn.Linear(4, 4), relu, dropout)

class Clipped(Small):
    clip_norm = 0.5

class Pretrained(Small):
    def model(self):
        model = super().model()
        model.load_state_dict(load_file(FILE))
        return model

number = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "my_task.py"
    path.write_text(TASK)
    return path


def test_file_and_module_are_both_found(file):
    assert load_task_class(f"{file}:Small").__name__ == "Small"
    assert load_task_class(WORKLOADS.get("tiny").implementation).__name__ == "TinyAlexNet"


def test_copy_in_the_trials_folder_is_preferred(file, tmp_path):
    (tmp_path / "my_task.py").write_text(TASK.replace("Small", "Copied"))
    assert load_task_class(f"{file}:Copied", folder=tmp_path).__name__ == "Copied"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.py:Small", r"expected the file nowhere.py, got: No such file"),
        ("{file}:Missing", r"expected a subclass .* name Missing, found none; .* Small"),
        ("{file}:number", r"found int"),
        ("{file}:Net", r"expected a subclass of paceline.Task"),
        ("my_task.py", r'expected "file.py:Class" or "module:Class", got "my_task.py"'),
    ],
)
def test_what_cannot_be_loaded_is_one_plain_message(file, path, message):
    with pytest.raises(UsageError, match=message):
        load_task_class(path.format(file=file))


def test_module_that_cannot_be_imported_is_reported_with_its_reason(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    with pytest.raises(EnvironmentLacks, match="ModuleNotFoundError: No module named 'no_such"):
        load_task_class(f"{tmp_path}/broken.py:Task")


def test_file_that_changed_since_the_plan_is_refused(file):
    planned = hashlib.sha256(file.read_bytes()).hexdigest()
    load_task_class(f"{file}:Small", sha256=planned)
    with pytest.raises(UsageError, match=r"has changed since the trial was planned"):
        load_task_class(f"{file}:Small", sha256="0" * 64)


def test_options_of_the_spec_reach_the_model(file):
    model = build_model(make_task(f"{file}:Small", options={"width": 5}))
    assert model.get_submodule("0").out_features == 5


def test_unknown_option_is_refused_with_its_name(file):
    with pytest.raises(UsageError, match=r"options of Small: wdith: .*Did you mean \"width\"\?"):
        make_task(f"{file}:Small", options={"wdith": 5})


def test_dropout_of_the_model_belongs_to_samples(file):
    assert isinstance(build_model(make_task(f"{file}:Small")).get_submodule("1"), SampleDropout)
    model = build_model(make_task(f"{file}:Small", dropout=False))
    assert model.get_submodule("1").p == 0


def test_pretrained_weights_come_from_a_file(file):
    weights = build_model(make_task(f"{file}:Small", seed=7)).state_dict()
    save_file(weights, file.with_name("weights.safetensors"))
    model = build_model(make_task(f"{file}:Pretrained", seed=8))
    assert sha256_of(model.state_dict()) == sha256_of(weights)
    with pytest.warns(UserWarning, match="no-op"):  # on the meta device
        assert derive_facts(f"{file}:Pretrained").parameters == 50


@pytest.mark.parametrize(
    ("name", "splitting", "sharding"),
    [
        ("Small", None, None),
        ("Adam", None, None),
        ("NotSequential", r"NotSequential: a pipeline cannot split it: its forward fails", None),
        ("Crossed", r"Crossed: a pipeline cannot split it: .* is used again by .*; define", None),
        ("Frozen", None, None),
        ("Unused", None, None),
        ("UnusedButFrozen", None, None),
        ("ByShape", None, r"a part of parameter 0.weight differently"),
        ("Factored", None, r"a part of parameter 0.weight differently"),
        ("Tied", None, None),
        ("Twice", r"Twice.blocks: expected layers under their own names in the model, got 3", None),
        ("TwiceNormalised", r"expected batch normalisation in one block each, got 1 in", None),
        ("TwiceActivated", None, None),
        ("Clipped", None, None),
    ],
)
def test_facts_say_which_strategies_cannot_train_a_task(file, name, splitting, sharding):
    facts = derive_facts(f"{file}:{name}")
    for found, expected in ((facts.splitting_fault, splitting), (facts.sharding_fault, sharding)):
        assert found is None if expected is None else re.search(expected, found)
    assert facts.unused_parameter == ("0.scale" if name == "Unused" else None)
    assert facts.tied_layers == (((0, 2),) if name == "Tied" else ())
    assert facts.clip_norm == (0.5 if name == "Clipped" else None)
