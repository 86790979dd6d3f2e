"""Batch normalisation over the global batch, and over the samples of each replica."""

from __future__ import annotations

import pytest
import torch
from tests.unit.train.strategies import own_models
from tests.unit.train.strategies.own_models import resnet_trial
from tests.unit.train.strategies.own_training import (
    RESNET_SIZES,
    TRIALS,
    assert_gradients_close,
    assert_normalised_equivalently,
    train,
    train_by_hand,
    trial_of,
    with_options,
)
from tests.unit.train.strategies.pipeline.node import batch_of, distance, task_for, train_ranks

from paceline.base.errors import RankFailed, UsageError
from paceline.train.strategies.local_sgd import LocalReplica
from paceline.train.training import passes
from paceline.train.workloads.build import build_model

MODELS = own_models.__name__


@pytest.fixture(scope="module")
def resnet_by_hand():
    return train_by_hand(resnet_trial("sequential"), RESNET_SIZES)


@pytest.mark.parametrize("name", TRIALS)
def test_batch_norm_over_the_global_batch_is_equivalent(name, resnet_by_hand):
    gradients, weights = resnet_by_hand
    trial = resnet_trial(name)
    ranks = train_ranks(trial, RESNET_SIZES)
    results = [result for rank in ranks for result in rank.results]
    # the statistics are communication, and of the stages of a pipeline some have no such layer
    measured = [result.pass_comm_s for result in results if result.pass_comm_s is not None]
    assert bool(measured) == (trial.placement.replicas > 1)
    assert all(seconds > 0 for seconds in measured)
    if measured and trial.placement.stages == 1:
        assert len(measured) == len(results)
    found = [(rank.gradients, rank.weights) for rank in ranks]
    assert_normalised_equivalently(found, gradients, weights)


def test_stage_without_samples_takes_part_in_the_statistics():
    trial = trial_of(**TRIALS["hybrid-2x2"], task=f"{MODELS}:Normalised")
    sizes = [8, 1, 5]
    gradients, weights = train_by_hand(trial, sizes)
    ranks = train(with_options(trial, micro_batches=1, balance="size"), sizes)
    assert_normalised_equivalently(ranks, gradients, weights)


@pytest.mark.parametrize("name", ["threads-2", "processes-2", "hybrid-2x2"])
def test_batch_norm_of_each_replica_alone_is_found(name, resnet_by_hand, monkeypatch):
    for module in ("threads", "shared_shards", "pipeline.stage"):
        monkeypatch.setattr(f"paceline.train.strategies.{module}.synchronise", lambda *_: None)
    # equal shares of at least two samples, so that every replica has statistics of its own
    found = train(resnet_trial(name), RESNET_SIZES[:1])
    gradients, _ = train_by_hand(resnet_trial("sequential"), RESNET_SIZES[:1])
    assert distance(found[0][0], gradients) > 0.1


def replicas_by_hand(trial, batch, replicas):
    """Gradients of the mean loss, and running statistics of each replica; own statistics each."""
    models = [build_model(task_for(trial)) for _ in range(replicas)]
    for replica, model in enumerate(models):
        share = passes.share_of(batch, replica, replicas)
        loss = task_for(trial).loss(model(share.inputs), share.targets).sum()
        (loss / batch.global_samples).backward()
    summed: dict[str, torch.Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            summed[name] = summed.get(name, torch.zeros(())) + parameter.grad
    return summed, [model.state_dict() for model in models]


@pytest.mark.parametrize("name", ["threads-2", "processes-2", "hybrid-2x2"])
def test_batch_norm_per_replica_uses_each_replicas_own_samples(name):
    trial = resnet_trial(name, batch_norm="per-replica")
    gradients, states = replicas_by_hand(trial, batch_of(trial, 0, 8), 2)
    ranks = train(trial, [8])
    assert_gradients_close(ranks[0][0], gradients)
    assert trial.inexact_reasons == [
        "each replica normalises with the statistics of its own samples"
    ]
    running = "1.running_mean"
    torch.testing.assert_close(ranks[0][1][running], states[0][running])
    if name == "processes-2":
        torch.testing.assert_close(ranks[1][1][running], states[1][running])


@pytest.mark.parametrize("name", ["threads-3", "processes-3"])
def test_replica_without_samples_changes_no_statistics_of_its_own(name):
    trial = trial_of(**TRIALS[name], task=f"{MODELS}:Normalised", batch_norm="per-replica")
    ranks = train(trial, [9, 2])
    for _, weights in ranks:
        assert all(tensor.isfinite().all() for tensor in weights.values())
    if name == "processes-3":
        assert [int(weights["1.num_batches_tracked"]) for _, weights in ranks] == [2, 2, 1]


def test_rank_of_local_sgd_uses_its_own_samples_and_refuses_a_single_vector():
    trial = resnet_trial("processes-2", batch_norm="per-replica")
    batch = batch_of(trial, 0, 8)
    _, states = replicas_by_hand(trial, batch, 2)
    replica = LocalReplica(task_for(trial), build_model(task_for(trial)), trial)
    replica.gradient(passes.share_of(batch, 1, 2))
    running = "1.running_mean"
    torch.testing.assert_close(replica.state_dict()[running], states[1][running])
    with pytest.raises(UsageError, match="one sample of this step"):
        replica.gradient(batch_of(trial, 1, 1))


def test_single_vector_of_a_replica_is_refused_with_what_to_do():
    with pytest.raises(RankFailed, match=r"one sample of this step.*batch_norm = \"global\""):
        train(resnet_trial("threads-2", batch_norm="per-replica"), [2])


@pytest.mark.parametrize("name", ["pipeline-2", "hybrid-2x2"])
def test_batch_norm_of_each_micro_batch_is_that_of_smaller_replicas(name):
    trial = with_options(resnet_trial(name, batch_norm="per-replica"), micro_batches=2)
    parts = 2 * trial.placement.replicas
    gradients, states = replicas_by_hand(trial, batch_of(trial, 0, 8), parts)
    ranks = train(trial, [8])
    assert_gradients_close(ranks[0][0], gradients)
    # running statistics move towards those of one micro-batch after the other: 0.1 = momentum
    means = [10 * state["1.running_mean"] for state in states[:2]]
    torch.testing.assert_close(ranks[0][1]["1.running_mean"], 0.09 * means[0] + 0.1 * means[1])
    assert trial.inexact_reasons == [
        "each micro-batch normalises with the statistics of its own samples"
    ]


def test_batch_norm_of_micro_batches_is_refused_with_the_layer():
    with pytest.raises(UsageError, match=r"layer 1 .* normalises .* expected 1, got 2"):
        train(trial_of(**TRIALS["pipeline-2"], task=f"{MODELS}:ResNet"))
