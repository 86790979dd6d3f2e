"""Run by mpirun: trains with strategies on given samples and leaves gradients and weights.

usage: strategies.py TRANSPORT FOLDER SETUPS_JSON CASE...   (cases: see CASES)

A case of SAVED also saves the state after some steps, and continues from it with a new strategy. A
case of GIVEN continues from the state in FOLDER/CASE.given, which one process has written by hand.

setups: what a trial says beside, by name. FOLDER/NAME/CASE.RANK.safetensors is what a case left,
FOLDER/broken/NAME/... what the case "broken" did, which comes last: what it breaks stays so.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from faults import break_the_averaging
from ranks import make_context, make_trial

from paceline.collectives.message_schedules import share_bounds
from paceline.measure.records.communication import StrategyResult
from paceline.measure.records.documents import CheckpointFolder
from paceline.plan.trials.sample_order import SampleOrder
from paceline.train.rank.peers import join_peers
from paceline.train.strategies import TrainBatch, create_strategy
from paceline.train.training.checkpointing import checkpoint_activations
from paceline.train.training.state_files import Position, StateFiles, write_state
from paceline.train.training.task import put_in_memory_format, torch_memory_format
from paceline.train.workloads.build import build_model, task_of

TINY_VGG = f"{Path(__file__).resolve().parents[2] / 'support' / 'models.py'}:TinyVGG"

# A peer gives up after 20 s and ends all ranks; before that, a rank that hangs says where.
_HANGS_S = 15.0
_DISK_S = 60.0  # to make a file durable on a disk that has gigabytes of others to write
STEPS, SAVED_AFTER = 7, 5
SAVED, GIVEN = ("bf16", "channels_last"), ("channels_last",)
CASES: dict[str, dict[str, Any]] = {
    "alexnet": {"dropout": False},
    "alexnet-dropout": {"dropout": True},
    "bf16": {"dropout": False, "precision": "bf16"},
    "channels_last": {"task": TINY_VGG, "dropout": False, "memory_format": "channels_last"},
    "checkpointed": {"task": TINY_VGG, "dropout": True, "activation_checkpointing": True},
    "broken": {"dropout": False},
}


def save(strategy: Any, folder: Path, context: Any, trial: Any, peers: Any) -> None:
    if strategy.pauses_for_checkpoints:
        strategy.settle()
    state = strategy.rank_state()
    if strategy.pauses_for_checkpoints:
        peers.world("copied").barrier(20.0)  # no rank changes what another one still copies
    position = Position(
        steps=SAVED_AFTER, task_sha256="", replicas=1 if trial.round_steps == 1 else 2
    )
    CheckpointFolder(folder).write(
        SAVED_AFTER,
        context.rank,
        context.world_size,
        lambda file: list(write_state(file, state, position)),
    )
    # In the next step they wait for each other no longer than a collective may take.
    peers.world("written").barrier(_DISK_S)


def opened(folder: Path) -> StateFiles:
    return StateFiles(CheckpointFolder(folder).complete()[0])


def train(
    context: Any,
    trial: Any,
    peers: Any,
    data: dict[str, torch.Tensor],
    *,
    saved_in: Path | None = None,
    restored_from: Path | None = None,
    before_end: Callable[[], None] = lambda: None,
) -> tuple[dict[str, torch.Tensor], StrategyResult]:
    """Return gradients, weights and losses, and the strategy's description.

    before_end: called while the strategy still has its memory.
    """
    faulthandler.dump_traceback_later(_HANGS_S)
    training = trial.training
    order = SampleOrder([20, 21], training.seed, training.global_batch, training.epochs)
    strategy = create_strategy(trial)
    task = task_of(training, classes=3)
    model = build_model(task)
    put_in_memory_format(model, training.memory_format)
    checkpoint_activations(task, model, trial)
    strategy.prepare(task, model, context, trial, peers)
    replica, stage = divmod(context.local_rank, trial.placement.stages)
    shares_on_node = context.ranks_on_node // trial.placement.stages
    share = context.node_index * shares_on_node + replica
    left: dict[str, torch.Tensor] = {}
    losses = []
    if restored_from is not None:
        strategy.restore(opened(restored_from))
    for number in range(0 if restored_from is None else SAVED_AFTER, STEPS):
        step = order.step(number)
        bounds = share_bounds(len(step.sample_ids), share, shares_on_node * trial.placement.nodes)
        ids = step.sample_ids[slice(*bounds)]
        images = data["images"][ids].to(memory_format=torch_memory_format(training.memory_format))
        result = strategy.gradient(
            TrainBatch(
                step=number,
                epoch=step.epoch,
                inputs=images if stage == 0 else images[:, :, :0, :0],
                targets=data["labels"][ids],
                sample_ids=ids,
                global_samples=len(step.sample_ids),
                is_last=number == STEPS - 1,
            )
        )
        alone = trial.placement.replicas == 1
        assert (result.comm_s is None) == alone
        assert result.comm_s is None or result.comm_s >= 0
        assert (result.bubble_s is None) == (trial.placement.stages == 1)
        losses.append(result.loss_sum)
        if number in (0, 4):
            gradients = strategy.gradients()
            if context.is_first:
                for name, gradient in gradients.items():
                    left[f"gradient{number}/{name}"] = gradient.contiguous().clone()
        strategy.step()
        if number + 1 == SAVED_AFTER and saved_in is not None:
            save(strategy, saved_in, context, trial, peers)
    weights = strategy.state_dict()
    left |= {f"weights/{name}": t.contiguous().clone() for name, t in weights.items()}
    left["losses"] = torch.tensor(losses)
    said = strategy.describe()
    before_end()
    strategy.close(failed=False)
    faulthandler.cancel_dump_traceback_later()
    return left, said


class Case:
    """The same neighbours, under names of this case alone."""

    def __init__(self, peers: Any, name: str) -> None:
        self._peers, self._name = peers, name

    def node(self, purpose: str) -> Any:
        return self._peers.node(f"{self._name}/{purpose}")

    def world(self, purpose: str) -> Any:
        return self._peers.world(f"{self._name}/{purpose}")


def run_setup(
    transport: str, folder: Path, values: dict[str, Any], cases: list[str], data: Any, given: Path
) -> None:
    """Trains the cases in a meeting of the ranks of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    context = make_context(folder, values.get("nodes", 1))
    # Small buckets, so that there are several.
    trial = make_trial(transport, context.world_size, bucket_mb=0.02, **values)
    peers = join_peers(context, trial)
    for case in cases:
        training = trial.training.model_copy(update=CASES[case])
        own = trial.model_copy(update={"training": training})
        saved_in = folder / f"{case}.saved" if case in SAVED else None
        left, _ = train(context, own, Case(peers, case), data, saved_in=saved_in)
        save_file(left, folder / f"{case}.{context.rank}.safetensors")
        sources = {"saved": saved_in, "given": given / f"{case}.given" if case in GIVEN else None}
        for kind, source in sources.items():
            if source is not None:
                peers.world(f"{case} {kind}").barrier(20.0)  # all have saved
                left, _ = train(
                    context, own, Case(peers, f"{case} {kind}"), data, restored_from=source
                )
                save_file(left, folder / f"{case}.from_{kind}.{context.rank}.safetensors")
    peers.leave(failed=False)


def main() -> None:
    torch.set_num_threads(1)
    transport, folder, setups, cases = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
    data = load_file(folder / "data.safetensors")
    rounds = [(folder, [case for case in cases if case != "broken"])]
    if "broken" in cases:
        rounds.append((folder / "broken", ["broken"]))
    for below, chosen in rounds:
        if chosen == ["broken"]:
            break_the_averaging()
        for name, values in json.loads(setups).items():
            run_setup(transport, below / name, values, chosen, data, folder)


if __name__ == "__main__":
    main()
