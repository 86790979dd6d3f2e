"""Run by mpirun: least squares with every method without a barrier, with a slow last rank.

usage: asynchronous.py TRANSPORT FOLDER SETUPS_JSON

setups: by name, the local strategy and its options. FOLDER/NAME.RANK.json is what a setup left.
Each writes a checkpoint after SAVED_AFTER steps. Then a second training continues from it.
"""

from __future__ import annotations

import json
import sys
import time
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from ranks import make_context, make_trial

from paceline.collectives.message_schedules import share_bounds
from paceline.measure.records.documents import CheckpointFolder
from paceline.plan.trials.trial import RankContext
from paceline.train.rank.peers import join_peers
from paceline.train.strategies import TrainBatch, create_strategy
from paceline.train.training.state_files import Position, StateFiles, write_state
from paceline.train.training.task import Task, TaskSettings

FEATURES, SAMPLES, BATCH, STEPS = 8, 48, 12, 80
SAVED_AFTER = 50  # steps
RATE = 0.1
SLOW_S = 0.005  # by which the last rank is slower than the others in a step
UPDATE = attrgetter("event", "worker", "sequence", "shards", "staleness", "lead_steps", "step")


class FirstHalf(nn.Module):
    """Multiply the first half of the features with weights, and keep the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES // 2))

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = inputs.chunk(2, dim=1)
        return torch.cat([(first @ self.weight).unsqueeze(1), second], dim=1)


class SecondHalf(nn.Module):
    """Add the product of the second half to that of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES // 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, 0] + inputs[:, 1:] @ self.weight


class LeastSquares(Task):
    """A linear model in two blocks: convex in all weights together."""

    def model(self) -> nn.Module:
        return nn.Sequential(FirstHalf(), SecondHalf())

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) ** 2 / 2

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=RATE, momentum=self.settings.momentum)

    def example_input(self) -> Tensor:
        return torch.zeros(1, FEATURES)


def problem() -> tuple[Tensor, Tensor]:
    """Return inputs and noisy targets."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    noise = 0.1 * torch.randn(SAMPLES, generator=generator)
    return inputs, inputs @ torch.arange(1.0, FEATURES + 1) + noise


def save(strategy: Any, folder: Path, context: RankContext, trial: Any, peers: Any) -> None:
    """Write a checkpoint as `Checkpoints` does, while no rank trains."""
    strategy.settle()
    state = strategy.rank_state()
    replicas = trial.placement.replicas if strategy.has_replica_state else 1
    position = Position(steps=SAVED_AFTER, task_sha256="", replicas=replicas)
    CheckpointFolder(folder).write(
        SAVED_AFTER,
        context.rank,
        context.world_size,
        lambda file: list(write_state(file, state, position)),
    )
    peers.world("saved").barrier(20)


def train(
    context: RankContext, trial: Any, peers: Any, checkpoint: Path, *, resumes: bool
) -> dict[str, Any]:
    """Return the final weights and the update rows of this rank.

    checkpoint: folder to write it to, or with `resumes` to continue from.
    """
    inputs, targets = problem()
    task = LeastSquares(TaskSettings(momentum=trial.training.momentum))
    strategy = create_strategy(trial)
    strategy.prepare(task, task.model(), context, trial, peers)
    stages = trial.placement.stages
    replica, replicas = context.rank // stages, context.world_size // stages
    is_slow = stages == 1 and context.rank == context.world_size - 1
    rows = []
    if resumes:
        strategy.restore(StateFiles(CheckpointFolder(checkpoint).complete()[0]))
    for step in range(SAVED_AFTER if resumes else 0, STEPS):
        ids = (np.arange(BATCH) + BATCH * step) % SAMPLES
        own = ids[slice(*share_bounds(BATCH, replica, replicas))]
        if is_slow:
            time.sleep(SLOW_S)
        strategy.gradient(
            TrainBatch(
                step=step, epoch=0, inputs=inputs[own], targets=targets[own], sample_ids=own,
                global_samples=BATCH, is_last=step == STEPS - 1,
            )
        )  # fmt: skip
        if step == 0 and stages == 1:
            gradients = strategy.gradients()
        strategy.step()
        if step + 1 == SAVED_AFTER:
            save(strategy, checkpoint, context, trial, peers)
        rows += strategy.updates()
        if step == STEPS // 2:
            evaluated = {n: t.tolist() for n, t in strategy.weights_to_evaluate().items()}
            peers.world("evaluated").barrier(20)
    left = {
        "weights": {name: t.tolist() for name, t in strategy.state_dict().items()},
        "evaluated": {} if resumes else evaluated,
        "gradient": {} if resumes or stages > 1 else {n: t.tolist() for n, t in gradients.items()},
        "described": strategy.describe(),
        "updates": [UPDATE(row) for row in [*rows, *strategy.updates()]],
    }
    strategy.close(failed=False)
    return left


def launch(
    transport: str, folder: Path, values: dict[str, Any], checkpoint: Path, *, resumes: bool
) -> tuple[int, dict[str, Any]]:
    """Return the rank and what it left. folder: where the ranks meet."""
    folder.mkdir(parents=True, exist_ok=True)
    context = make_context(folder)
    trial = make_trial(transport, context.world_size, momentum=0.5, **values)
    peers = join_peers(context, trial)
    left = train(context, trial, peers, checkpoint, resumes=resumes)
    peers.leave(failed=False)
    return context.rank, left


def main() -> None:
    torch.set_num_threads(1)
    transport, folder, setups = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    for name, values in setups.items():
        saved = folder / f"{name}.saved"
        rank, left = launch(transport, folder / name, values, saved, resumes=False)
        own = folder / f"{name}-resumed"
        _, left["resumed"] = launch(transport, own, values, saved, resumes=True)
        (folder / f"{name}.{rank}.json").write_text(json.dumps(left))


if __name__ == "__main__":
    main()
