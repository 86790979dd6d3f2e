"""Run by mpirun: trains with a strategy on given samples and leaves gradients and weights.

usage: strategies.py TRANSPORT FOLDER CASE...   (plain, dropout, broken)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from ranks import make_context, make_trial

from paceline.plan.schedule import Schedule, share_bounds
from paceline.train.loop import make_optimizer
from paceline.train.models import build_model
from paceline.train.peers import join_peers
from paceline.train.strategies import TrainBatch, buckets, create_strategy

STEPS = 20


def break_the_reducer() -> None:
    """The mean of what ranks already divided by the global batch: gradients too small."""
    healthy = buckets.sum_gradients

    def mean_gradients(state, bucket):
        size = torch.distributed.get_world_size()
        return healthy(state, bucket).then(lambda f: f.value().div_(size))

    buckets.sum_gradients = mean_gradients


def train(context: Any, trial: Any, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    training = trial.training
    schedule = Schedule([20, 21], training.seed, training.global_batch, training.epochs)
    strategy = create_strategy(trial.local_strategy)
    model = build_model(training.model, 3, dropout=training.dropout, seed=training.seed)
    strategy.prepare(model, context, trial)
    optimizer = make_optimizer(strategy, training)
    left: dict[str, torch.Tensor] = {}
    losses = []
    for number in range(STEPS):
        step = schedule.step(number)
        low, high = share_bounds(len(step.sample_ids), context.rank, context.world_size)
        ids = step.sample_ids[low:high]
        result = strategy.gradient(
            TrainBatch(
                step=number,
                epoch=step.epoch,
                images=data["images"][ids],
                labels=data["labels"][ids],
                sample_ids=ids,
                global_samples=len(step.sample_ids),
            )
        )
        assert (result.comm_s is None) == (context.world_size == 1)
        assert result.comm_s is None or result.comm_s >= 0
        assert result.backward_s > 0
        losses.append(result.loss_sum)
        if number in (0, 4):
            for name, parameter in strategy.parameters().items():
                assert parameter.grad is not None
                left[f"gradient{number}/{name}"] = parameter.grad.clone()
        optimizer.step()
    left |= {f"weights/{name}": t.clone() for name, t in strategy.state_dict().items()}
    left["losses"] = torch.tensor(losses)
    return left


def main() -> None:
    torch.set_num_threads(1)
    transport, folder, cases = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    context = make_context(folder)
    # Small buckets, so that there are several.
    trial = make_trial(transport, context.world_size, bucket_mb=0.02)
    data = load_file(folder / "data.safetensors")
    peers = join_peers(context, trial)
    for case in cases:
        if case == "broken":
            break_the_reducer()
        training = trial.training.model_copy(update={"dropout": case == "dropout"})
        left = train(context, trial.model_copy(update={"training": training}), data)
        save_file(left, folder / f"{case}.{context.rank}.safetensors")
    peers.leave(failed=False)


if __name__ == "__main__":
    main()
