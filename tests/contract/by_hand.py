"""Trainings by torch alone of the tasks in programs/factor_tasks.py, and what they trained on."""

from __future__ import annotations

import torch
from tests.contract.programs import factor_tasks
from tests.support import oracle

from paceline.train.workloads.build import build_model, make_task

SEED, BATCH, STEPS = 3, 10, 7  # as in programs/ranks.py and programs/strategies.py
ROW_GROUP_ROWS = (20, 21)


def task_named(name):
    return make_task(f"{factor_tasks.__file__}:{name}", classes=3, dropout=True, seed=SEED)


def train_by_hand(data, name):
    """Return the weights of a training by torch alone."""
    model = build_model(task_named(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if name == "Adaptive":
        optimizer = torch.optim.AdamW(model.parameters(), lr=factor_tasks.ADAPTIVE_RATE)
    clip_norm = factor_tasks.CLIP_NORM if name == "Accumulated" else None
    batches = oracle.global_batches(
        ROW_GROUP_ROWS, SEED, BATCH, STEPS, data["images"], data["labels"]
    )
    gradients = oracle.train_alone(model, batches, optimizer, seed=SEED, clip_norm=clip_norm)
    if clip_norm is not None:
        norms = [torch.cat([g.flatten() for g in step.values()]).norm() for step in gradients]
        assert min(norms) > clip_norm
    return model.state_dict()
