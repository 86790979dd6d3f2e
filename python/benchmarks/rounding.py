"""Distance by which rounding moves the first gradient, in one process and in two replicas.

    python rounding.py --out results/raw/rounding.json [--batches 12]

For each batch: the gradient in float64, and in float32 of the whole batch and of two halves that
normalise over both. The distance of two gradients is that of the tensor that differs most, relative
to its norm, as in the check of equivalence. If the whole batch alone, where nothing is divided, is
further from float64 than the tolerance, rounding explains that halves are, too. No times are
measured, so other programs may run.
"""

from __future__ import annotations

import argparse
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common import write_results
from paceline.plan.spec.loading import check_spec
from paceline.plan.trials.planning import plan_trials
from paceline.train.strategies.reduction.shared_sums import SharedSum
from paceline.train.training.batch_norm import statistics_width, synchronise
from paceline.train.workloads.build import build_model, task_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from paceline.train.training.task import Task

CASES: dict[str, dict[str, Any]] = {
    "east, batch 8": {"name": "east", "global_batch": 8},
    "east, batch 16": {"name": "east", "global_batch": 16},
    "deeplab, ResNet": {"name": "deeplab", "options": {"depth": 26, "width": 16}},
    "deeplab, Xception": {
        "name": "deeplab",
        "options": {"backbone": "xception", "width": 16, "middle_blocks": 4},
    },
}


def prepared(case: Mapping[str, Any], batches: int) -> tuple[Task, int]:
    """Return the task of a workload with samples for so many batches, and the batch size."""
    sequential = {"launcher": "local", "local_strategy": "sequential"}
    batch = case.get("global_batch", 8)
    workload = {**case, "samples": batch * batches, "epochs": 1, "warmup_steps": 0}
    document = {"schema": 2, "name": "rounding", "workloads": [workload], "trials": [sequential]}
    (trial, *_) = plan_trials(check_spec(document, "rounding"), {}, cores=2)
    return task_of(trial.training, classes=4), batch


def gradient_of(model: nn.Module, task: Task, inputs: Tensor, targets: Tensor, batch: int) -> None:
    """Add the gradient of these samples' part of the mean loss."""
    loss = task.loss(model(inputs), targets).sum() / batch
    loss.backward()  # type: ignore[no-untyped-call]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def of_whole(model: nn.Module, task: Task, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    own = copy.deepcopy(model)
    gradient_of(own, task, inputs, targets, len(inputs))
    return gradients(own)


def of_halves(model: nn.Module, task: Task, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the sum of two replicas' gradients, each from half of the samples."""
    replicas, barrier = [copy.deepcopy(model) for _ in range(2)], threading.Barrier(2, timeout=60)
    rows = np.zeros((4, statistics_width(model)))

    def wait() -> None:
        barrier.wait()

    def replica(worker: int) -> None:
        synchronise(replicas[worker], SharedSum(rows, range(2), worker, wait), "global")
        part = slice(worker * len(inputs) // 2, (worker + 1) * len(inputs) // 2)
        gradient_of(replicas[worker], task, inputs[part], targets[part], len(inputs))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(replica, range(2)))
    first, second = map(gradients, replicas)
    return {name: first[name] + second[name] for name in first}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest distance of a tensor, relative to its norm."""
    return max(float((found[n] - e).norm() / e.norm()) for n, e in expected.items() if e.norm())


def measured(task: Task, batch: int, index: int) -> dict[str, float]:
    """Return the distances of one batch, with initial weights of its own."""
    torch.manual_seed(index)
    model, data = build_model(task).train(), task.dataset()
    assert data is not None, "the cases have samples of their own"
    samples = [data[i] for i in range(index * batch, (index + 1) * batch)]
    inputs = task.to_input(np.stack([sample for sample, _ in samples]))
    targets = torch.from_numpy(np.stack([target for _, target in samples]))
    targets = targets if targets.is_floating_point() else targets.long()
    exact = of_whole(copy.deepcopy(model).double(), task, inputs.double(), targets)
    whole, halves = (of(model, task, inputs, targets) for of in (of_whole, of_halves))
    return {
        "whole_to_float64": distance(whole, exact),
        "halves_to_float64": distance(halves, exact),
        "halves_to_whole": distance(halves, whole),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, case in CASES.items():
        task, batch = prepared(case, arguments.batches)
        found[name] = [measured(task, batch, index) for index in range(arguments.batches)]
        for key in found[name][0]:
            values = sorted(row[key] for row in found[name])
            print(f"{name:<20} {key:<18}", *(f"{value:.0e}" for value in values))
    write_results(arguments.out, "rounding", {"distances": found})


if __name__ == "__main__":
    main()
