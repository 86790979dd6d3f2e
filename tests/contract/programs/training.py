"""Run by mpirun: the worker itself, with photos from memory instead of a data set.

usage: training.py TRANSPORT FOLDER [TRIAL_JSON]   (what the trial says beside)
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))
from ranks import make_context, make_trial
from tests.support.fabricated_samples import opening
from tests.support.trials import changed

from paceline.data.reading import Batch
from paceline.rank import train as worker
from paceline.records.layout import TrialFiles

RNG = np.random.default_rng(5)
IMAGES = RNG.integers(0, 256, (21, 32, 32, 3), dtype=np.uint8)
LABELS = RNG.integers(0, 3, 21)


class Feed(contextlib.AbstractContextManager):
    def __init__(self, order: Any, rank: int, world_size: int, node: Any) -> None:
        self._order, self._rank, self._size = order, rank, world_size
        node.barrier(10.0)

    def __iter__(self):
        for number in range(self._order.steps):
            step = self._order.step(number)
            ids = step.share(self._rank, self._size)
            yield Batch(number, step.epoch, ids, IMAGES[ids], LABELS[ids])

    def close(self) -> None:
        """Do nothing: no thread reads ahead."""

    def __exit__(self, *_: object) -> None:
        return None


def make_feed(order: Any, *, rank: int, world_size: int, share_of_node: Any, **_: Any) -> Feed:
    return Feed(order, rank, world_size, share_of_node)


def main() -> None:
    transport, folder = sys.argv[1], Path(sys.argv[2])
    worker.open_samples = opening((11, 10), make_feed)
    context = make_context(folder)
    files = TrialFiles(folder)
    trial = make_trial(transport, context.world_size, epochs=2)
    if sys.argv[3:]:
        trial = changed(trial, **json.loads(sys.argv[3]))
    worker.train(trial, context, files)
    assert not torch.distributed.is_initialized()
    left = [t.name for t in threading.enumerate() if t.name.startswith("mpi-")]
    (folder / f"threads.{context.rank}").write_text("\n".join(left))


if __name__ == "__main__":
    main()
