"""A rank of test_processes.py: `processes_program.py LOCAL_RANK RANKS FOLDER`.

FOLDER has trial.json. Local rank 1 fails in its third step. Each rank prints the error that ended
it, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from tests.support.strategies import prepared, train_batch
from tests.support.trials import rank_context
from tests.unit.collectives.node.rank_program import FileShare

from paceline.base.errors import PacelineError
from paceline.plan.trials.trial import Trial

SAMPLES = 4  # of a rank in a step
STEPS = 20
FAILING_RANK, FAILING_STEP = 1, 2


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


def train(strategy, rank, ranks):
    for step in range(STEPS):
        if (rank, step) == (FAILING_RANK, FAILING_STEP):
            raise ZeroDivisionError
        batch = train_batch(
            SAMPLES, step=step, sample_ids=np.arange(SAMPLES) + SAMPLES * rank,
            global_samples=SAMPLES * ranks,
        )  # fmt: skip
        assert strategy.gradient(batch).comm_s > 0
        strategy.step()


def main():
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    trial = Trial.model_validate_json((folder / "trial.json").read_text())
    strategy = prepared(trial, rank_context(rank, ranks), Node(folder, rank, ranks))
    try:
        train(strategy, rank, ranks)
    except (ArithmeticError, PacelineError) as error:
        strategy.close(failed=True)
        print(json.dumps([type(error).__name__, str(error)]))


if __name__ == "__main__":
    main()
