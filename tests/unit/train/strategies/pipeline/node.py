"""The ranks of a pipeline as threads of this process, on the real shared memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from tests.support import oracle
from tests.support.strategies import train_batch
from tests.support.trials import rank_context, tiny_trial

from paceline.collectives.message_schedules import share_bounds
from paceline.collectives.store import GroupStore
from paceline.collectives.torch_internals import Store
from paceline.plan.spec.models import Limits
from paceline.train.strategies import create_strategy
from paceline.train.strategies.pipeline.descriptor import PipelineOptions
from paceline.train.training.checkpointing import checkpoint_activations
from paceline.train.training.task import put_in_memory_format, torch_memory_format
from paceline.train.workloads.build import build_model, task_of

CLASSES = 3
LIMIT_S = 20.0


@dataclass
class ThreadPeers:
    """The ranks of a node, which are threads of this process."""

    store: Store
    local_rank: int
    ranks: int

    def node(self, purpose):
        return GroupStore(self.store, self.local_rank, self.ranks, f"node/{purpose}")

    def world(self, purpose):
        return GroupStore(self.store, self.local_rank, self.ranks, f"world/{purpose}")


def pipeline_trial(stages, micro_batches, replicas=1, pipeline=None, **training):
    """pipeline: other pipeline settings; training: other values of the training."""
    return tiny_trial(
        {
            "ranks_per_node": stages * replicas,
            "stages": stages,
            "replicas_per_node": replicas,
            "oversubscribe": True,
        },
        {"dropout": False, **training},
        transport="shared",
        local_strategy="pipeline" if replicas == 1 else "hybrid",
        strategy_options=PipelineOptions(
            micro_batches=micro_batches, **{"balance": "size", **(pipeline or {})}
        ),
        limits=Limits(collective_s=LIMIT_S, trial_s=LIMIT_S),
    )


def batch_of(trial, step, samples):
    """The whole global batch of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    size = trial.training.image_size
    images = torch.randn(samples, 3, size, size, generator=generator)
    return train_batch(
        samples,
        step=step,
        inputs=images.contiguous(memory_format=torch_memory_format(trial.training.memory_format)),
        targets=torch.randint(CLASSES, (samples,), generator=generator),
        sample_ids=100 * step + np.arange(samples),
    )


def share(trial, local_rank, batch):
    """The part of a batch for one rank; only the first stage has inputs."""
    replica, stage = divmod(local_rank, trial.placement.stages)
    replicas = trial.placement.ranks_per_node // trial.placement.stages
    low, high = share_bounds(len(batch.sample_ids), replica, replicas)
    return replace(
        batch,
        inputs=batch.inputs[low:high] if stage == 0 else torch.empty(high - low, 0),
        targets=batch.targets[low:high],
        sample_ids=batch.sample_ids[low:high],
    )


@dataclass
class Trained:
    """What training left on a rank."""

    gradients: dict
    weights: dict
    results: list
    description: dict


def run_ranks(trial, body):
    """body(strategy, context, peers) on each rank, prepared; returns their results, or raises."""
    ranks, store, task = trial.placement.ranks_per_node, dist.HashStore(), task_for(trial)
    models = [model_of(trial) for _ in range(ranks)]  # torch's generator is the process's
    for model in models:
        checkpoint_activations(task, model, trial)

    def rank(local_rank):
        strategy = create_strategy(trial)
        try:
            context, peers = rank_context(local_rank, ranks), ThreadPeers(store, local_rank, ranks)
            strategy.prepare(task_for(trial), models[local_rank], context, trial, peers)
            result = body(strategy, context, peers)
        except BaseException:
            strategy.close(failed=True)
            raise
        strategy.close(failed=False)
        return result

    # models that torch.fx has to trace cannot be traced beside the passes of other ranks
    blocks = {id(m): task.blocks(m) for m in models if trial.placement.stages > 1}
    traced = patch.object(type(task), "blocks", lambda _, model: blocks[id(model)])
    with traced, ThreadPoolExecutor(ranks) as pool:
        return [future.result() for future in [pool.submit(rank, r) for r in range(ranks)]]


def train_ranks(trial, sizes, make_batch=batch_of, after_step=lambda *_: None):
    """Trains on batches of these sizes; a Trained for each rank, which is a thread of this process.

    after_step: called with strategy, context, peers and step."""

    def body(strategy, context, peers):
        gradients, results = {}, []
        for step, samples in enumerate(sizes):
            batch = share(trial, context.local_rank, make_batch(trial, step, samples))
            results.append(strategy.gradient(batch))
            gradients = copied(strategy.gradients())
            strategy.step()
            after_step(strategy, context, peers, step)
        return Trained(gradients, copied(strategy.state_dict()), results, strategy.describe())

    return run_ranks(trial, body)


def train_alone(trial, batches):
    """The same with torch alone: clipping, schedule and all; each batch in one pass.

    Return the gradients of each step, the weights, and the sums of losses.
    """
    task, model, losses = task_for(trial), model_of(trial), []
    optimizer = task.optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])

    def loss(outputs, targets):
        losses.append(task.loss(outputs, targets).sum().item())
        return task.loss(outputs, targets).mean()

    gradients = oracle.train_alone(
        model,
        [oracle.Batch(b.epoch, b.sample_ids.tolist(), b.inputs, b.targets) for b in batches],
        optimizer,
        seed=trial.training.seed,
        loss=loss,
        precision=trial.training.precision,
        clip_norm=task.clip_norm,
        schedule=task.schedule(optimizer),
    )
    return gradients, copied(model.state_dict()), losses


def task_for(trial):
    return task_of(trial.training, classes=CLASSES, steps=4)


def model_of(trial):
    model = build_model(task_for(trial))
    put_in_memory_format(model, trial.training.memory_format)
    return model


def layers_of(trial):
    """The task of a trial and its initial model as a sequence."""
    task = task_for(trial)
    return task, task.blocks(model_of(trial))


def copied(tensors):
    return {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}


def distance(found, expected):
    """Largest over the tensors of |found - expected| / |expected|, as vectors."""
    assert list(found) == list(expected)
    return max(
        float((found[name] - e).double().norm() / max(float(e.double().norm()), 1e-30))
        for name, e in expected.items()
    )


def update_distance(trial, found, wanted):
    """Largest difference of a tensor, relative to how far training moved it."""
    initial = model_of(trial).state_dict()
    return max(
        float((found[n] - wanted[n]).norm() / (wanted[n] - initial[n]).norm()) for n in wanted
    )
