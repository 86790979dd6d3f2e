"""Computing activations again in the backward pass changes no result, whatever the strategy."""

from __future__ import annotations

import pytest
from tests.unit.train.strategies import own_models
from tests.unit.train.strategies import own_training as own
from tests.unit.train.strategies.own_training import RESNET_SIZES, TOLERANCE, TRIALS
from tests.unit.train.strategies.pipeline.node import distance

from paceline.train.strategies.pipeline import strategy
from paceline.train.training import checkpointing
from paceline.train.training.checkpointing import RecomputedPass

MODELS = own_models.__name__


@pytest.fixture(autouse=True)
def recomputed(monkeypatch):
    """Make every block that may begin a segment a segment; return what was computed again."""
    monkeypatch.setattr(
        checkpointing,
        "choose_segments",
        lambda _blocks, legal, _passes: [i for i, may in enumerate(legal) if may or i == 0],
    )
    passes = []
    second = RecomputedPass.second

    def counted(self):
        passes.append(self)
        return second(self)

    monkeypatch.setattr(RecomputedPass, "second", counted)
    return passes


def checkpointed(name, task, **options):
    trial = own.trial_of(**TRIALS[name], task=task, activation_checkpointing=True)
    return own.with_options(trial, **options)


@pytest.mark.parametrize("name", TRIALS)
def test_dropout_and_accumulation_are_equivalent(name, recomputed):
    own.assert_equivalent(checkpointed(name, f"{own.TASK}:MyTask"), tolerance=10 * TOLERANCE)
    assert recomputed


@pytest.mark.parametrize("name", ["sequential", "processes-2", "pipeline-2"])
def test_layers_that_are_used_again_are_equivalent(name, recomputed):
    own.assert_equivalent(checkpointed(name, f"{MODELS}:Repeated"))
    assert recomputed


def test_layers_pass_before_the_partition_of_a_pipeline_moves_them(recomputed, monkeypatch):
    before = []
    partition_model = strategy.partition_model

    def counted(*arguments):
        before.append(len(recomputed))  # a pass shows how much each layer stores
        return partition_model(*arguments)

    monkeypatch.setattr(strategy, "partition_model", counted)
    own.train(checkpointed("pipeline-2", f"{own.TASK}:MyTask"), sizes=[8])
    assert min(before) > 0


@pytest.mark.parametrize("name", TRIALS)
def test_batch_norm_statistics_are_updated_once(name, recomputed):
    trial = checkpointed(name, f"{MODELS}:PlainResNetTask", micro_batches=1)
    gradients, weights = own.train_by_hand(trial, RESNET_SIZES)
    ranks = own.train(trial, RESNET_SIZES)
    own.assert_normalised_equivalently(ranks, gradients, weights)
    assert recomputed


@pytest.mark.parametrize("name", ["sequential", "processes-2", "hybrid-2x2"])
def test_tied_weights_of_tokens_are_equivalent(name, recomputed):
    trial = checkpointed(name, f"{MODELS}:PlainGPTTask", balance="size")
    own.assert_equivalent(trial, make_batch=own_models.tokens_of, tolerance=10 * TOLERANCE)
    assert recomputed


@pytest.mark.parametrize("name", ["threads-2", "processes-3", "pipeline-2"])
def test_bf16_is_that_without_checkpointing(name):
    ours, plain = (
        own.train(own.trial_of(**TRIALS[name], precision="bf16", activation_checkpointing=whether))
        for whether in (True, False)
    )
    for (_, found), (_, other) in zip(ours, plain, strict=True):
        assert distance(found, other) < TOLERANCE


def test_second_update_of_the_statistics_is_found(monkeypatch):
    monkeypatch.setattr("paceline.train.training.checkpointing._put", lambda *_: None)
    trial = checkpointed("sequential", f"{MODELS}:PlainResNetTask")
    _, weights = own.train_by_hand(trial, RESNET_SIZES)
    [(_, found)] = own.train(trial, RESNET_SIZES)
    assert int(found["norm.num_batches_tracked"]) > int(weights["norm.num_batches_tracked"])
