"""PipeDream against its definition, computed with torch alone and without a pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.unit.strategies.pipeline.node import (
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

from paceline.plan.sample_order import share_bounds
from paceline.strategies.pipeline.pipedream_strategy import PipeDreamStrategy
from paceline.strategies.pipeline.schedules import Backward, Forward, stream_actions

SIZES = [8, 8, 5, 8]  # samples of the steps
SETUPS = [(2, 4, False), (3, 4, False), (3, 2, True), (4, 3, True), (2, 1, False)]


NORMALISED = """
import paceline
from torch import nn

class Normalised(paceline.Task):
    def model(self):
        low = [nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*low, nn.Linear(256, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
"""


def trained(stages, micro_batches, vertical_sync, **training):
    """Return weights, staleness by stage and descriptions; and the trial."""
    options = {"schedule": "pipedream", "vertical_sync": vertical_sync}
    trial = pipeline_trial(stages, micro_batches, pipeline=options, **training)

    def body(strategy, local_rank):
        for step, samples in enumerate(SIZES):
            batch = share(trial, local_rank, batch_of(trial, step, samples))
            strategy.gradient(replace(batch, is_last=step == len(SIZES) - 1))
            strategy.step()
        staleness = [row.staleness for row in strategy.updates() if row.event == "applied"]
        return copied(strategy.state_dict()), staleness, strategy.describe()

    return run_ranks(trial, body, PipeDreamStrategy), trial


def by_definition(trial, stages, stage_of, vertical_sync):
    """Return the weights after updates whose gradients use the versions that the paper defines.

    stage_of: stage of each parameter.
    """
    model, micro_batches = model_of(trial), trial.option("micro_batches")
    history = {name: [p.detach().clone()] for name, p in model.named_parameters()}
    momentum = {name: torch.zeros_like(v[0]) for name, v in history.items()}
    number = 0
    for step, samples in enumerate(SIZES):
        batch = batch_of(trial, step, samples)
        for part in range(micro_batches):
            low, high = share_bounds(samples, part, micro_batches)
            used = {}
            for name, versions in history.items():
                delay = stages - 1 if vertical_sync else stages - 1 - stage_of[name]
                used[name] = versions[max(0, number - delay)].clone().requires_grad_()
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


def is_as_defined(ranks, trial, stages, vertical_sync):
    weights, _, description = ranks[0]
    layers = [name for name, _ in layers_of(trial)[1]]
    layer_of = {name: layers.index(name.rpartition(".")[0]) for name in weights}
    splits = description["split_points"]
    stage_of = {name: sum(split <= layer_of[name] for split in splits) for name in weights}
    expected = by_definition(trial, stages, stage_of, vertical_sync)
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
    for stage, (_, staleness, description) in enumerate(ranks):
        delay = stages - 1 if vertical_sync else stages - 1 - stage
        updates = len(SIZES) * micro_batches
        assert staleness == [min(number, delay) for number in range(updates)]
        copies = delay + 1 if delay else 0
        assert description["stashed_versions"] == copies
        assert bool(description["stashed_bytes"]) == bool(copies)


def test_order_is_that_of_1f1b_without_a_drain():
    first = stream_actions(0, 2, 2, 0, is_last=False)
    assert first == [Forward(0), Forward(1), Backward(0)]
    assert stream_actions(0, 2, 2, 1, is_last=True) == [
        Forward(2), Backward(1), Forward(3), Backward(2), Backward(3),
    ]  # fmt: skip
    assert stream_actions(1, 2, 1, 5, is_last=True) == [Forward(5), Backward(5)]
