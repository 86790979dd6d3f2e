"""Names of a script's parameters, whatever wraps its modules."""

from __future__ import annotations

import torch
from torch import nn

from paceline.train.rank.script.modules import (
    CalledModules,
    named_parameters,
    parameter_names,
    without_wrappers,
)


def called(*models, inputs=None):
    modules = CalledModules()
    with modules.noting():
        for model in models:
            model(torch.ones(2, 4) if inputs is None else inputs)
    return modules


def test_parameters_have_the_names_of_the_outermost_module():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    names = parameter_names(called(model).models())
    assert sorted(name for each in names.values() for name in each) == sorted(
        name for name, _ in model.named_parameters()
    )


def test_two_models_of_one_class_are_numbered():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    assert list(called(first, second).models()) == ["Linear.", "Linear2."]


def test_a_loss_without_parameters_is_no_model():
    model, loss = nn.Linear(4, 4), nn.Identity()
    assert list(called(model, loss).models()) == [""]


def test_a_tied_parameter_has_all_its_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    names = parameter_names(called(model).models())
    assert names[id(model[0].weight)] == ["0.weight", "1.weight"]


def test_words_of_wrappers_are_removed():
    assert without_wrappers("_orig_mod.block._fsdp_wrapped_module.0.weight") == "block.0.weight"


def test_parameters_outside_of_called_modules_are_numbered():
    alone, model = nn.Parameter(torch.ones(1)), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(model.parameters()), torch.optim.SGD([alone])]
    names = parameter_names(called(model).models())
    assert list(named_parameters(optimizers, names)) == [
        "weight", "bias", "optimizer1.group0.parameter0",
    ]  # fmt: skip


def test_calls_after_the_end_are_not_noted():
    modules = CalledModules()
    with modules.noting():
        modules.stop()
        nn.Linear(4, 4)(torch.ones(1, 4))
    assert not modules.models()
