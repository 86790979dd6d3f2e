"""Samples from memory in place of a data set, for tests of what trains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.support import oracle

from paceline.plan.trials.sample_order import sample_order_of
from paceline.plan.trials.trial import Trial
from paceline.train.data.batches import Batch
from paceline.train.training.task import to_input
from paceline.train.workloads.build import build_model, task_of

ROWS = (11, 10)  # 21 samples: steps of 8, 8 and 5
RNG = np.random.default_rng(5)
IMAGES = RNG.integers(0, 256, (21, 32, 32, 3), dtype=np.uint8)
LABELS = RNG.integers(0, 3, 21)


class FakeFeed(AbstractContextManager):
    """A rank's batches out of IMAGES, `steps` of them."""

    def __init__(self, order, steps=None, rank=0, world_size=1):
        self.closed = False
        self.order = order
        self.steps = order.steps if steps is None else steps
        self._place = (rank, world_size)

    def __iter__(self):
        for number in range(self.order.first_step, self.steps):
            step = self.order.step(number)
            ids = step.share(*self._place)
            yield Batch(number, step.epoch, ids, IMAGES[ids], LABELS[ids])

    def close(self):
        self.closed = True

    def __exit__(self, *_):
        self.close()


def opening(rows: Sequence[int], make_feed: Callable[..., Any], classes: int = 3) -> Any:
    """Return a replacement of `rank.samples.open_samples`.

    rows: samples in each row group. make_feed(order, rank=, world_size=, …) returns the batches.
    """

    @contextmanager
    def open_samples(training, folder, share_of_node):
        order = sample_order_of(training, rows)
        task = task_of(training, classes=classes, steps=order.steps, folder=folder)
        yield _samples(order, task, make_feed)

    return open_samples


def _samples(order: Any, task: Any, make_feed: Callable[..., Any]) -> Any:
    return SimpleNamespace(
        order=order,
        task=task,
        feed=lambda _, **place: make_feed(order, **place),
        held_out_feed=lambda _, rank, world_size: make_feed(
            order.held_out(), rank=rank, world_size=world_size
        ),
        since=lambda step: _samples(order.since(step), task, make_feed),
        between=lambda first, stop: _samples(
            replace(order, first_step=first, max_steps=stop), task, make_feed
        ),
    )


def train_alone(trial: Trial, steps: int, loss: Any = oracle.mean_cross_entropy) -> tuple[Any, Any]:
    """Train on the global batches with torch alone; return each step's gradients, and the weights.

    loss: mean loss of a batch from outputs and targets.
    """
    training = trial.training
    model = build_model(task_of(training, classes=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=training.momentum)
    batches = oracle.global_batches(
        ROWS, training.seed, training.global_batch, steps,
        to_input(IMAGES, "contiguous"), torch.from_numpy(LABELS),
    )  # fmt: skip
    gradients = oracle.train_alone(model, batches, optimizer, seed=training.seed, loss=loss)
    return gradients, model.state_dict()
