"""PipeDream against its definition, computed with torch alone and without a pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.checkpoints import read_checkpoint, save_part
from tests.unit.train.strategies.pipeline.node import (
    batch_of,
    copied,
    distance,
    layers_of,
    model_of,
    pipeline_trial,
    run_ranks,
    share,
)
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from paceline.collectives.message_schedules import share_bounds
from paceline.train.strategies.pipeline.stage import (
    Backward,
    Forward,
    drain_actions,
    stream_actions,
)

SIZES = [8, 8, 5, 8]  # samples of the steps
SAVED_AFTER = 2  # steps
SETUPS = [(2, 4, False), (3, 4, False), (3, 2, True), (4, 3, True), (2, 1, False)]


NORMALISED = """
import paceline
from torch import nn

class Normalised(paceline.Task):
    def model(self):
        low = [nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*low, nn.Linear(256, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
"""


def trained(stages, micro_batches, vertical_sync, saved_in=None, restored_from=None, **training):
    """Return weights, staleness by stage and descriptions; and the trial.

    saved_in: folder for a checkpoint after SAVED_AFTER steps. restored_from: continue from one.
    """
    options = {"schedule": "pipedream", "vertical_sync": vertical_sync}
    trial = pipeline_trial(stages, micro_batches, pipeline=options, **training)

    def body(strategy, context, _peers):
        first = 0
        if restored_from is not None:
            strategy.restore(read_checkpoint(restored_from))
            first = SAVED_AFTER
        for step, samples in enumerate(SIZES[first:], start=first):
            batch = share(trial, context.local_rank, batch_of(trial, step, samples))
            strategy.gradient(replace(batch, is_last=step == len(SIZES) - 1))
            strategy.step()
            if saved_in is not None and step + 1 == SAVED_AFTER:
                strategy.settle()
                state = strategy.rank_state()
                save_part(saved_in, state, context.local_rank, stages, steps=SAVED_AFTER)
        updates = [row for row in strategy.updates() if row.event == "applied"]
        return copied(strategy.state_dict()), updates, strategy.describe()

    return run_ranks(trial, body), trial


def by_definition(trial, stages, stage_of, vertical_sync, drained_before=()):
    """Return the weights after updates whose gradients use the versions that the paper defines.

    stage_of: stage of each parameter. drained_before: steps before which the pipeline is drained.
    """
    model, micro_batches = model_of(trial), trial.option("micro_batches")
    history = {name: [p.detach().clone()] for name, p in model.named_parameters()}
    momentum = {name: torch.zeros_like(v[0]) for name, v in history.items()}
    number = oldest = 0
    for step, samples in enumerate(SIZES):
        batch = batch_of(trial, step, samples)
        oldest = number if step in drained_before else oldest
        for part in range(micro_batches):
            low, high = share_bounds(samples, part, micro_batches)
            used = {}
            for name, versions in history.items():
                delay = stages - 1 if vertical_sync else stages - 1 - stage_of[name]
                used[name] = versions[max(oldest, number - delay)].clone().requires_grad_()
            loss = cross_entropy(
                functional_call(model, used, batch.inputs[low:high]), batch.targets[low:high]
            )
            loss.backward()
            for name, versions in history.items():
                momentum[name].mul_(trial.training.momentum).add_(used[name].grad)
                rate = trial.training.learning_rate * (high - low) / samples
                versions.append(versions[-1] - rate * momentum[name])
            number += 1
    return {**copied(model.state_dict()), **{name: vs[-1] for name, vs in history.items()}}


def is_as_defined(ranks, trial, stages, vertical_sync, **drains):
    weights, _, description = ranks[0]
    layers = [name for name, _ in layers_of(trial)[1]]
    layer_of = {name: layers.index(name.rpartition(".")[0]) for name in weights}
    splits = description["split_points"]
    stage_of = {name: sum(split <= layer_of[name] for split in splits) for name in weights}
    expected = by_definition(trial, stages, stage_of, vertical_sync, **drains)
    assert distance(weights, expected) < 1e-5
    assert all(torch.equal(weights[n], other[n]) for other, *_ in ranks for n in weights)


@pytest.mark.parametrize(("stages", "micro_batches", "vertical_sync"), SETUPS)
def test_weights_are_those_of_the_definition(stages, micro_batches, vertical_sync):
    ranks, trial = trained(stages, micro_batches, vertical_sync)
    is_as_defined(ranks, trial, stages, vertical_sync)


@pytest.mark.parametrize("vertical_sync", [False, True])
def test_batch_normalisation_of_two_stages_is_over_the_whole_batch(tmp_path, vertical_sync):
    file = tmp_path / "normalised.py"
    file.write_text(NORMALISED)
    ranks, trial = trained(2, 1, vertical_sync, task=f"{file}:Normalised")
    is_as_defined(ranks, trial, 2, vertical_sync)


@pytest.mark.parametrize(("stages", "micro_batches", "vertical_sync"), SETUPS)
def test_staleness_and_copies_are_those_of_the_paper(stages, micro_batches, vertical_sync):
    ranks, _ = trained(stages, micro_batches, vertical_sync)
    for stage, (_, applied, description) in enumerate(ranks):
        delay = stages - 1 if vertical_sync else stages - 1 - stage
        updates = len(SIZES) * micro_batches
        assert [row.staleness for row in applied] == [min(n, delay) for n in range(updates)]
        copies = delay + 1 if delay else 0
        assert description["stashed_versions"] == copies
        assert bool(description["stashed_bytes"]) == bool(copies)


def test_order_is_that_of_1f1b_without_a_drain():
    assert stream_actions(1, 2, 0) == [Forward(0), Forward(1), Backward(0)]
    assert stream_actions(1, 2, 1) == [Forward(2), Backward(1), Forward(3), Backward(2)]
    assert drain_actions(1, 4) == [Backward(3)]
    assert stream_actions(0, 1, 5) == [Forward(5), Backward(5)]
    assert drain_actions(0, 6) == []


def test_order_begins_again_after_a_drain():
    assert stream_actions(2, 2, 3, drained_before=6) == [Forward(6), Forward(7)]
    assert stream_actions(2, 2, 4, drained_before=6) == [
        Forward(8), Backward(6), Forward(9), Backward(7),
    ]  # fmt: skip
    assert drain_actions(2, 8, drained_before=7) == [Backward(7)]


@pytest.mark.parametrize(("stages", "micro_batches", "vertical_sync"), SETUPS)
def test_training_continues_from_a_checkpoint_as_after_a_drain(
    tmp_path, stages, micro_batches, vertical_sync
):
    setup = (stages, micro_batches, vertical_sync)
    whole, trial = trained(*setup, saved_in=tmp_path)
    is_as_defined(whole, trial, stages, vertical_sync, drained_before=(SAVED_AFTER,))
    resumed, _ = trained(*setup, restored_from=tmp_path)
    for (expected, every, _), (weights, applied, _) in zip(whole, resumed, strict=True):
        assert all(torch.equal(expected[name], weights[name]) for name in expected)
        first = SAVED_AFTER * micro_batches
        assert [row.sequence for row in every] == list(range(len(SIZES) * micro_batches))
        assert applied == every[first:]
        assert all(row.step < SAVED_AFTER for row in every[:first])
