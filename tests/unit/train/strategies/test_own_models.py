"""Models of many kinds are trained by every strategy as by torch alone."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tests.unit.train.strategies import own_models
from tests.unit.train.strategies.own_models import tokens_of
from tests.unit.train.strategies.own_training import (
    RESNET_SIZES,
    TOLERANCE,
    TRIALS,
    assert_equivalent,
    assert_normalised_equivalently,
    train,
    train_by_hand,
    trial_of,
    with_options,
)
from tests.unit.train.strategies.pipeline.node import batch_of, task_for

from paceline.train.workloads.build import build_model

MODELS = own_models.__name__
# A third replica differs only by an empty share, which one model shows for all.
WITH_TWO_REPLICAS = [
    name for name in TRIALS if name not in {"sequential", "threads-3", "processes-3"}
]
STAGED = ["pipeline-2", "hybrid-2x2"]


@pytest.mark.parametrize("name", [n for n in TRIALS if n != "sequential"])
def test_weights_that_stages_share_are_equivalent(name):
    trial = trial_of(**TRIALS[name], task=f"{MODELS}:Tied")
    trial = with_options(trial, split_points=(5,), balance=None)
    assert_equivalent(trial)


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize(
    ("task", "split", "make_batch"), [("Tied", 8, batch_of), ("TiedHead", 3, tokens_of)]
)
def test_weights_that_layers_of_a_stage_share_are_equivalent(name, task, split, make_batch):
    trial = trial_of(**TRIALS[name], task=f"{MODELS}:{task}")
    trial = with_options(trial, split_points=(split,), balance=None)
    assert_equivalent(trial, make_batch=make_batch, tolerance=10 * TOLERANCE)


@pytest.mark.parametrize("name", WITH_TWO_REPLICAS)
# layers used twice; computed weights; attention, layer normalisation and tied weights
@pytest.mark.parametrize("task", ["Repeated", "ComputedWeights", "Transformer"])
def test_layers_of_several_kinds_are_equivalent(name, task):
    assert_equivalent(trial_of(**TRIALS[name], task=f"{MODELS}:{task}"))


@pytest.mark.parametrize(
    ("task", "name", "balance"),
    [
        ("GPT", "threads-2", "size"),
        ("GPT", "processes-2", "size"),
        *product(("GPT", "PlainGPTTask"), STAGED, ("size", "time")),
    ],
)
def test_small_gpt_on_tokens_is_equivalent_with_or_without_blocks(task, name, balance):
    trial = trial_of(**TRIALS[name], task=f"{MODELS}:{task}")
    trial = with_options(trial, balance=balance)
    assert_equivalent(trial, make_batch=tokens_of, tolerance=10 * TOLERANCE)


@pytest.mark.parametrize("name", STAGED)
def test_blocks_in_another_order_than_the_parameters_are_equivalent(name):
    trial = trial_of(**TRIALS[name], task=f"{MODELS}:Blocks")
    assert_equivalent(trial)


def trials_by_split():
    """Return each trial, those with stages once for each place of the split."""
    for name, values in TRIALS.items():
        for split in (2, 4, 5) if "stages" in values else (None,):
            yield pytest.param(name, split, id=name if split is None else f"{name}-at-{split}")


@pytest.mark.parametrize(("name", "split"), list(trials_by_split()))
def test_parameters_that_are_not_trained_keep_their_values(name, split):
    trial = trial_of(**TRIALS[name], task=f"{MODELS}:FineTuned")
    if split is not None:
        trial = with_options(trial, split_points=(split,), balance=None)
    initial = build_model(task_for(trial)).state_dict()
    for gradients, found in assert_equivalent(trial):
        assert torch.equal(found["2.weight"], initial["2.weight"])
        assert not torch.equal(found["4.bias"], initial["4.bias"])
        assert gradients.keys() <= {"4.bias", "6.weight", "6.bias"}


@pytest.mark.parametrize("split", [1, 3, 6, 8])
@pytest.mark.parametrize("name", STAGED)
def test_residual_network_without_blocks_is_split_equivalently(name, split):
    trial = trial_of(**TRIALS[name], task=f"{MODELS}:PlainResNetTask")
    trial = with_options(trial, split_points=(split,), balance=None, micro_batches=1)
    gradients, weights = train_by_hand(trial, RESNET_SIZES)
    ranks = train(trial, RESNET_SIZES)
    assert_normalised_equivalently(ranks, gradients, weights)
