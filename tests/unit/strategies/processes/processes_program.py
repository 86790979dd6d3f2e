"""A rank of test_processes.py: `processes_program.py LOCAL_RANK RANKS FOLDER`.

FOLDER has job.json (the trial, what to do) and data.safetensors; each rank leaves what it found.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tests.unit.node.rank_program import FileShare

from paceline.errors import PacelineError
from paceline.plan.rank_context import RankContext
from paceline.plan.sample_order import share_bounds
from paceline.plan.trial import Trial
from paceline.strategies import TrainBatch, create_strategy
from paceline.training.transforms import put_in_memory_format, torch_memory_format
from paceline.workloads.build import build_model, task_of


class Node:
    """Ranks of one node that find each other through files."""

    def __init__(self, folder, rank, ranks):
        self._place = (folder, rank, ranks)

    def node(self, purpose):
        folder, rank, ranks = self._place
        (folder / purpose).mkdir(exist_ok=True)
        return FileShare(folder / purpose, rank, ranks)

    def world(self, purpose):
        raise AssertionError("there is one node")


def steps_of(sizes, data, context, memory_format):
    """This rank's share of a batch of each size."""
    for step, size in enumerate(sizes):
        ids = (np.arange(size) + 7 * step) % len(data["labels"])
        low, high = share_bounds(size, context.rank, context.world_size)
        yield TrainBatch(
            step=step,
            epoch=step // 4,
            inputs=data["images"][ids[low:high]].to(memory_format=memory_format),
            targets=data["labels"][ids[low:high]],
            sample_ids=ids[low:high],
            global_samples=size,
        )


def train(strategy, batches, left, *, fail_at):
    for batch in batches:
        if batch.step == fail_at:
            raise ZeroDivisionError
        result = strategy.gradient(batch)
        assert result.comm_s > 0
        if batch.step == 0:
            gradients = strategy.gradients()
            left |= {f"gradients/{name}": t.contiguous() for name, t in gradients.items()}
        strategy.step()
    left |= {f"weights/{n}": t.contiguous().clone() for n, t in strategy.state_dict().items()}


def main():
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    trial = Trial.model_validate(job["trial"])
    context = RankContext(
        rank=rank, world_size=ranks, local_rank=rank, ranks_on_node=ranks, node_index=0,
        host="alpha", process_started_unix_s=time.time(),
    )  # fmt: skip
    training = trial.training
    memory_format = torch_memory_format(training.memory_format)
    task = task_of(training, classes=3)
    model = build_model(task)
    put_in_memory_format(model, training.memory_format)
    strategy = create_strategy(trial)
    strategy.prepare(task, model, context, trial, Node(folder, rank, ranks))
    batches = steps_of(job["sizes"], load_file(folder / "data.safetensors"), context, memory_format)
    left = {}
    fails = rank == job["failing_rank"]
    try:
        train(strategy, batches, left, fail_at=job["fail_at"] if fails else None)
    except (ArithmeticError, PacelineError) as error:
        strategy.close(failed=True)
        print(json.dumps([type(error).__name__, str(error)]))
    else:
        strategy.close(failed=False)
        save_file(left, folder / f"rank{rank}.safetensors")
        print(json.dumps(strategy.describe()))


if __name__ == "__main__":
    main()
