"""Pipeline stages as threads of one process, compared with the plain loop; for processes see
tests/contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.models import TINY_VGG
from tests.unit.train.strategies.pipeline.node import (
    batch_of,
    distance,
    pipeline_trial,
    run_ranks,
    share,
    train_alone,
    train_ranks,
)

from paceline.base.errors import PeerLost, UsageError
from paceline.train.strategies.pipeline import strategy as module
from paceline.train.strategies.pipeline.links import StageWeights
from paceline.train.training.devices import CPU

# Differences are of the order of the sums only. In bf16 they depend on the kernels of the CPU: with
# and without AVX-512, gradients differ by 0.01 to 0.05 and weights by 1e-4. A training that loses
# bf16 or dropout at a split point has gradients that differ by 0.3 or 5, and weights by 8e-4.
TOLERANCE = {
    "fp32": {"gradients": 1e-5, "weights": 1e-5, "losses": 1e-5},
    "bf16": {"gradients": 0.1, "weights": 4e-4, "losses": 0.03},
}
SIZES = [8, 7, 8]  # samples of each step


def compare(trial, sizes):
    ranks = train_ranks(trial, sizes)
    batches = [batch_of(trial, step, samples) for step, samples in enumerate(sizes)]
    (*_, gradients), weights, losses = train_alone(trial, batches)
    tolerance = TOLERANCE[trial.training.precision]
    for rank in ranks:
        assert distance(rank.weights, weights) < tolerance["weights"]
        assert distance(rank.gradients, gradients) < tolerance["gradients"]
    found = [sum(r.results[step].loss_sum for r in ranks) for step in range(len(sizes))]
    assert found == pytest.approx(losses, rel=tolerance["losses"])
    return ranks


@pytest.mark.parametrize(
    ("task", "stages", "micro_batches", "schedule"),
    [  # every pair of values occurs
        ("", 2, 1, "gpipe"),
        ("", 3, 2, "gpipe"),
        ("", 2, 4, "1f1b"),
        ("", 3, 1, "1f1b"),
        (TINY_VGG, 3, 1, "1f1b"),
        (TINY_VGG, 2, 2, "1f1b"),
        (TINY_VGG, 3, 4, "gpipe"),
        (TINY_VGG, 2, 1, "gpipe"),
    ],
)
def test_training_is_that_of_the_whole_model(task, stages, micro_batches, schedule):
    trial = pipeline_trial(stages, micro_batches, pipeline={"schedule": schedule}, task=task)
    compare(trial, SIZES)


@pytest.mark.parametrize(
    "training",
    [
        {"dropout": True},
        {"dropout": True, "memory_format": "channels_last", "task": TINY_VGG},
        {"precision": "bf16", "memory_format": "channels_last"},
        {"precision": "bf16", "dropout": True},
    ],
    ids=["dropout", "channels_last", "bf16-channels_last", "bf16"],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_precision_format_and_dropout_are_kept_across_split_points(training, replicas):
    compare(pipeline_trial(2, 2, replicas, **training), SIZES)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_empty_micro_batches_and_shares_take_part(schedule):
    """Steps of 1 sample: of 2 replicas one has none, of 4 micro-batches at most one has any."""
    trial = pipeline_trial(3, 4, 2, pipeline={"schedule": schedule})
    compare(trial, [8, 1, 5])


@pytest.mark.parametrize("cut", [2, 3, 5, 9, 10, 11, 12, 17])
def test_every_kind_of_layer_can_begin_a_stage(cut):
    for dropout in (False, True):
        pipeline = {"split_points": (cut,), "balance": None}
        compare(pipeline_trial(2, 2, pipeline=pipeline, dropout=dropout), [4, 4])


def test_stage_may_have_no_parameters():
    compare(pipeline_trial(3, 2, pipeline={"split_points": (2, 3), "balance": None}), [4, 4])


def test_measured_cuts_are_the_same_on_all_ranks():
    first, *others = compare(pipeline_trial(3, 2, 2, pipeline={"balance": "time"}), [8, 8])
    assert all(rank.description == first.description for rank in others)
    assert len(first.description["split_points"]) == 2


def test_times_are_told_apart_and_bubbles_counted():
    for rank in train_ranks(pipeline_trial(2, 2), [8]):
        (result,) = rank.results
        assert result.bubble_s > 0
        assert result.forward_s > 0
        assert result.backward_s > 0
        assert result.comm_s is None
        assert result.comm_ready_unix_s is None


def test_replicas_have_communication():
    for rank in train_ranks(pipeline_trial(2, 2, 2), [8]):
        assert rank.results[0].comm_s > 0
        assert rank.results[0].comm_ready_unix_s > 1e9


def test_only_the_last_stage_reports_a_loss():
    first, middle, last = train_ranks(pipeline_trial(3, 2), [8])
    assert first.results[0].loss_sum == middle.results[0].loss_sum == 0
    assert last.results[0].loss_sum > 0


def test_description_says_where_it_was_cut_and_what_crosses():
    pipeline = {"split_points": (3, 12), "balance": None, "schedule": "gpipe"}
    trial = pipeline_trial(3, 4, 2, pipeline=pipeline, global_batch=9, precision="bf16")
    for rank in train_ranks(trial, [9]):
        found = rank.description
        assert found["split_points"] == [3, 12]
        assert found["first_layers"] == ["features.3", "classifier.1"]
        # 5 samples of 16 channels of 8x8, and of 128 numbers, in 2 bytes each
        assert found["bytes_forward"] == [5 * 16 * 8 * 8 * 2, 5 * 128 * 2]
        assert found["bytes_backward"] == found["bytes_forward"]


def test_cuts_that_the_model_has_not_are_refused():
    trial = pipeline_trial(2, 2, pipeline={"split_points": (40,), "balance": None})
    with pytest.raises(UsageError, match="a stage of tiny-alexnet can begin at layer 2, 3, "):
        train_ranks(trial, [8])


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UsageError, match="tiny-alexnet has at most 13, got 14"):
        train_ranks(pipeline_trial(14, 2), [8])


def test_failing_stage_is_noticed_by_its_neighbours():
    trial = pipeline_trial(2, 2)
    ended = {}

    def body(strategy, context, _peers):
        batch = share(trial, context.local_rank, batch_of(trial, 0, 8))
        if context.local_rank == 1:
            batch = replace(batch, targets=batch.targets + 99)
        try:
            strategy.gradient(batch)
        except Exception as error:
            ended[context.local_rank] = error
            raise

    with pytest.raises(PeerLost, match="local rank 1 of this node has failed"):
        run_ranks(trial, body)
    assert isinstance(ended[1], IndexError)


def test_stage_keeps_only_its_own_weights():
    def body(strategy, _context, _peers):
        return {name: p.numel() for name, p in strategy._weights._parameters.items()}

    first, last = run_ranks(pipeline_trial(2, 2), body)
    assert not first.keys() & last.keys()
    assert "features.0.weight" in first
    assert "classifier.6.weight" in last


@pytest.mark.parametrize("replicas", [1, 3])
def test_workers_with_copies_of_the_weights_stay_in_step(monkeypatch, replicas):
    """Use copies of the weights in CPU memory, as workers on GPUs do."""

    def apart(layout, parameters, shared, replicas, *, task, device):
        return StageWeights(layout, parameters, shared, replicas, task=task, device=CPU)

    monkeypatch.setattr(module, "StageWeights", apart)
    compare(pipeline_trial(2, 2, replicas), SIZES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("replicas", [1, 2])
def test_stages_on_a_gpu_train_as_on_the_cpu(replicas):
    trial = pipeline_trial(2, 2, replicas, dropout=True)
    ranks = train_ranks(trial.model_copy(update={"device": "cuda"}), SIZES)
    batches = [batch_of(trial, step, samples) for step, samples in enumerate(SIZES)]
    (*_, gradients), weights, _ = train_alone(trial, batches)
    for rank in ranks:
        assert distance(rank.gradients, gradients) < 1e-3
        assert distance(rank.weights, weights) < 1e-3
