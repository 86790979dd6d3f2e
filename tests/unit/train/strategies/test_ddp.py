"""One replica without peers; with peers see tests/contract/test_strategies.py."""

from __future__ import annotations

import pytest
import torch
from tests.support.strategies import prepared, train_batch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.base.errors import UsageError
from paceline.train.training.task import Task


class Unused(Task):
    def model(self):
        model = nn.Sequential(nn.Flatten(1), nn.Linear(3072, 3))
        model.register_parameter("scale", nn.Parameter(torch.ones(1)))
        return model


def test_parameter_without_gradient_is_named_before_peers_wait_for_it(
    make_trial, context_of, group_of_one
):
    trial = make_trial(ranks=2, task=f"{__name__}:Unused")
    with pytest.raises(UsageError, match=r"parameter scale: expected a gradient, got none"):
        prepared(trial, context_of(0, 2)).gradient(train_batch(4))


class MeanLoss(Task):
    def model(self):
        return nn.Sequential(nn.Flatten(1), nn.Linear(3072, 3))

    def loss(self, outputs, targets):
        return cross_entropy(outputs, targets)


def test_loss_that_is_not_of_each_sample_is_refused(make_trial, solo):
    message = (
        r"MeanLoss.loss: expected one loss for each of 4 samples.*got shape \(\); use reduction"
    )
    with pytest.raises(UsageError, match=message):
        prepared(make_trial(task=f"{__name__}:MeanLoss"), solo).gradient(train_batch(4))
