"""Run by mpirun: the worker itself, with photos from memory instead of a data set.

usage: training.py TRANSPORT FOLDER [TRIAL_JSON]   (what the trial says beside, and `nodes`)
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))
from ranks import make_context, make_trial
from tests.support.fabricated_samples import FakeFeed, opening
from tests.support.trials import changed

from paceline.measure.records.layout import TrialFiles
from paceline.train.rank import train as worker


def make_feed(order: Any, *, rank: int, world_size: int, share_of_node: Any, **_: Any) -> FakeFeed:
    share_of_node.barrier(10.0)
    return FakeFeed(order, rank=rank, world_size=world_size)


def main() -> None:
    transport, folder = sys.argv[1], Path(sys.argv[2])
    worker.open_samples = opening((11, 10), make_feed)
    values = json.loads(sys.argv[3]) if sys.argv[3:] else {}
    nodes = values.pop("nodes", 1)
    context = make_context(folder, nodes)
    files = TrialFiles(folder)
    trial = changed(make_trial(transport, context.world_size, nodes=nodes, epochs=2), **values)
    if context.is_first:
        files.trial.write_text(trial.model_dump_json())
    worker.train(trial, context, files)
    assert not torch.distributed.is_initialized()
    left = [t.name for t in threading.enumerate() if t.name.startswith("mpi-")]
    (folder / f"threads.{context.rank}").write_text("\n".join(left))


if __name__ == "__main__":
    main()
