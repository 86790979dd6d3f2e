"""Names of a script's parameters, whatever wraps its modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.train.rank.script.modules import (
    CalledModules,
    OwnUpdates,
    named_buffers,
    named_parameters,
    parameter_names,
    plain_names,
    without_wrappers,
)
from paceline.train.rank.script.own_states import States
from paceline.train.rank.script.tensors import Checksums


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


class Parts(nn.Module):
    """A model whose parts are called one by one."""

    def __init__(self, other=None):
        super().__init__()
        self.embed, self.body, self.head = (nn.Linear(4, 4) for _ in range(3))
        self.other = other


def test_parts_that_are_called_one_by_one_have_the_names_of_the_model():
    model = Parts()
    inputs = torch.ones(2, 4)
    whole = called(model.embed, model.body, model.head, inputs=inputs)
    assert list(whole.models()) == ["embed.", "body.", "head."]
    last = called(model.head, model.body, inputs=inputs)
    assert list(last.models()) == ["head.", "body."]
    assert States(last, Checksums()).models() == last.models()
    alone = called(model.body, inputs=inputs)
    assert list(alone.models()) == [""]
    alone.is_stage = True
    assert list(alone.models()) == ["body."]
    wrapped = nn.Sequential(nn.Linear(4, 4))  # as a stage that holds what it calls
    alone = called(wrapped[0], inputs=inputs)
    alone.is_stage = True
    assert list(alone.models()) == [""]
    model.head = None
    assert list(called(model.body, inputs=inputs).models()) == ["body."]


def test_models_beside_each_other_keep_their_classes_as_names():
    model, other = Parts(), nn.Linear(4, 4)
    assert list(called(model.embed, model.body, other).models()) == [
        "Linear.", "Linear2.", "Linear3.",
    ]  # fmt: skip
    average = Parts(other=model.embed)  # holds one of them
    assert list(called(model.embed, other).models()) == ["Linear.", "Linear2."]
    del average


def test_buffers_of_a_module_without_parameters_have_its_class_as_name():
    class Centre(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, rows):
            return rows - self.mean

    centre, model = Centre(), nn.Linear(4, 4)
    states = States(called(model, centre), Checksums())
    states.called(centre, 1)
    [buffer] = states.take_buffers()
    assert (buffer.place.name, buffer.is_of_model) == ("Centre.mean", False)


def test_words_of_wrappers_are_removed():
    assert without_wrappers("_orig_mod.block._fsdp_wrapped_module.0.weight") == "block.0.weight"


@pytest.mark.parametrize("wrapper", [nn.DataParallel, lambda model: model])
def test_a_wrapped_part_of_a_model_has_the_names_of_the_part(wrapper):
    model = nn.Sequential(wrapper(nn.Sequential(nn.BatchNorm1d(4), wrapper(nn.Linear(4, 2)))))
    models = called(model).models()
    assert [name for [name] in parameter_names(models).values()] == [
        "0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias",
    ]  # fmt: skip
    assert next(iter(named_buffers(models))) == "0.0.running_mean"
    assert plain_names(model)("0.module") == ("0" if wrapper is nn.DataParallel else "0.module")


def trained(update, steps=9):
    """Return the steps before its own updates were noticed; all if they were not."""
    modules, model, noticed = CalledModules(), nn.Linear(4, 1), []
    updates = OwnUpdates(modules, lambda: noticed.append(True))
    with modules.noting(), updates.noticing():
        for step in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            if noticed:
                return step
            update(model, updates)
    return steps


def test_a_module_that_mixes_rows_has_no_name_of_a_wrapper():
    states = States(
        called(nn.Sequential(nn.DataParallel(nn.Sequential(nn.BatchNorm1d(4))))), Checksums()
    )
    assert states.mixing() == ["0.0 (BatchNorm1d)"]


def test_updates_without_an_optimiser_are_noticed():
    def own(model, _updates):
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)

    def with_optimizer(model, updates):
        updates.stop()  # in the first step of an optimiser
        own(model, updates)

    assert trained(own) == 3
    assert trained(with_optimizer) == 9
    assert trained(lambda *_: None) == 9  # an accumulation


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
