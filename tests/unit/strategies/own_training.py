"""Trainings of a task by each strategy, and by torch alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

from tests.support import oracle
from tests.unit.strategies.pipeline.node import (
    CLASSES,
    Board,
    BoardPeers,
    batch_of,
    context_of,
    copied,
    pipeline_trial,
)

from paceline.plan.trial import Placement
from paceline.strategies import create_strategy
from paceline.training import passes
from paceline.training.checkpointing import checkpoint_activations
from paceline.workloads.build import build_model, task_of

TASK = Path(__file__).parents[3] / "examples" / "own-task" / "my_task.py"
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
        "placement": Placement(
            nodes=1,
            ranks_per_node=ranks,
            threads_per_rank=replicas if strategy == "threads" else 1,
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


def task_for(trial):
    return task_of(trial.training, classes=CLASSES, steps=len(SIZES))


def train(trial, sizes=SIZES, make_batch=batch_of, after_step=lambda *_: None, results=None):
    """Weights after a step of each size, on every rank; ranks are threads of this process.

    after_step: called with strategy, context, peers and step. results: list to which the results
    of all ranks are added."""
    ranks, board = trial.placement.ranks_per_node, Board()
    models = [build_model(task_for(trial)) for _ in range(ranks)]  # torch's generator is shared
    for model in models:
        checkpoint_activations(task_for(trial), model, trial)

    def rank(local_rank):
        strategy = create_strategy(trial)
        try:
            context, peers = context_of(local_rank, ranks), BoardPeers(board, local_rank, ranks)
            strategy.prepare(task_for(trial), models[local_rank], context, trial, peers)
            for step, samples in enumerate(sizes):
                batch = make_batch(trial, step, samples)
                replica = local_rank // trial.placement.stages
                replicas = ranks // trial.placement.stages
                result = strategy.gradient(passes.share_of(batch, replica, replicas))
                if results is not None:
                    results.append(result)
                gradients = copied(strategy.gradients())
                strategy.step()
                after_step(strategy, context, peers, step)
            weights = copied(strategy.state_dict())
        except BaseException:
            strategy.close(failed=True)
            raise
        strategy.close(failed=False)
        return gradients, weights

    # models that torch.fx has to trace cannot be traced beside the passes of other ranks
    blocks = {id(m): task_for(trial).blocks(m) for m in models if trial.placement.stages > 1}
    traced = patch.object(type(task_for(trial)), "blocks", lambda _, model: blocks[id(model)])
    with traced, ThreadPoolExecutor(ranks) as pool:
        return [future.result() for future in [pool.submit(rank, r) for r in range(ranks)]]


def train_by_hand(trial, sizes=SIZES, make_batch=batch_of):
    """The same with torch alone: clipping, schedule and all; the whole batch in one pass."""
    task = task_for(trial)
    model = build_model(task)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = task.optimizer(trained)
    batches = [make_batch(trial, step, samples) for step, samples in enumerate(sizes)]
    gradients = oracle.train_alone(
        model,
        [oracle.Batch(b.epoch, b.sample_ids.tolist(), b.inputs, b.targets) for b in batches],
        optimizer,
        seed=trial.training.seed,
        loss=lambda outputs, targets: task.loss(outputs, targets).mean(),
        clip_norm=task.clip_norm,
        schedule=task.schedule(optimizer),
    )
    return gradients[-1], copied(model.state_dict())


def with_options(trial, **update):
    """Change options of the trial's strategy; those that it does not have are left out."""
    known = {k: v for k, v in update.items() if hasattr(trial.strategy_options, k)}
    options = trial.strategy_options.model_copy(update=known)
    return trial.model_copy(update={"strategy_options": options})
