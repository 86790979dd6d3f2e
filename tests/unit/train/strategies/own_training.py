"""Trainings of a task by each strategy, and by torch alone."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.support.trials import placement
from tests.unit.train.strategies.pipeline.node import (
    batch_of,
    distance,
    pipeline_trial,
    train_alone,
    train_ranks,
)

TASK = Path(__file__).parents[4] / "examples" / "own-task" / "my_task.py"
SIZES = [8, 8, 3, 1]
# The batch normalisation of a single vector is not defined. Of three replicas one has no sample.
RESNET_SIZES = [8, 7, 2]
# Float32 sums in another order; Adam divides by the gradients' own size, which enlarges relative
# differences of small ones.
TOLERANCE = 2e-4


def trial_of(strategy, ranks=1, replicas=1, stages=1, task=f"{TASK}:MyTask", **training):
    """A trial of a strategy on one node; 2 micro-batches where it has stages."""
    values = {"dropout": True, "task": task, "epochs": 1, **training}
    base = pipeline_trial(2, 2, **values)
    rows = base.model_dump() | {
        "local_strategy": strategy,
        "transport": "shared" if ranks > 1 else "none",
        "strategy_options": base.strategy_options.model_dump() if stages > 1 else {},
        "placement": placement(
            ranks,
            replicas if strategy == "threads" else 1,
            replicas_per_node=replicas,
            stages=stages,
            oversubscribe=True,
        ).model_dump(),
    }
    return type(base).model_validate(rows)


TRIALS = {
    "sequential": {"strategy": "sequential"},
    "threads-2": {"strategy": "threads", "replicas": 2},
    "threads-3": {"strategy": "threads", "replicas": 3},
    "processes-2": {"strategy": "processes", "ranks": 2, "replicas": 2},
    "processes-3": {"strategy": "processes", "ranks": 3, "replicas": 3},
    "pipeline-2": {"strategy": "pipeline", "ranks": 2, "stages": 2},
    "hybrid-2x2": {"strategy": "hybrid", "ranks": 4, "replicas": 2, "stages": 2},
}


def train(trial, sizes=SIZES, make_batch=batch_of, after_step=lambda *_: None):
    """The gradients of the last step, and the weights, on every rank; see `train_ranks`."""
    ranks = train_ranks(trial, sizes, make_batch, after_step)
    return [(rank.gradients, rank.weights) for rank in ranks]


def train_by_hand(trial, sizes=SIZES, make_batch=batch_of):
    """The same with torch alone: the gradients of the last step, and the weights."""
    batches = [make_batch(trial, step, samples) for step, samples in enumerate(sizes)]
    gradients, weights, _ = train_alone(trial, batches)
    return gradients[-1], weights


def assert_equivalent(trial, sizes=SIZES, make_batch=batch_of, tolerance=TOLERANCE):
    """The weights of all ranks are those of torch alone, as is the gradient of the last step.

    tolerance: of the gradient. Return what was found on each rank.
    """
    gradients, weights = train_by_hand(trial, sizes, make_batch)
    ranks = train(trial, sizes, make_batch)
    for _, found in ranks:
        assert found.keys() == weights.keys()
        assert distance({name: found[name] for name in weights}, weights) < TOLERANCE
    assert ranks[0][0].keys() == gradients.keys()
    assert distance({name: ranks[0][0][name] for name in gradients}, gradients) < tolerance
    return ranks


def assert_normalised_equivalently(ranks, gradients, weights):
    """The same for a network with batch normalisation, whose gradients may be nearly zero."""
    for _, found in ranks:
        assert list(found) == list(weights)
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, rtol=TOLERANCE, atol=1e-6)
    assert_gradients_close(ranks[0][0], gradients)


def assert_gradients_close(found, gradients):
    largest = float(max(gradient.abs().max() for gradient in gradients.values()))
    for name, tensor in gradients.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5 * largest)


def with_options(trial, **update):
    """Change options of the trial's strategy; those that it does not have are left out."""
    known = {k: v for k, v in update.items() if hasattr(trial.strategy_options, k)}
    options = trial.strategy_options.model_copy(update=known)
    return trial.model_copy(update={"strategy_options": options})
