"""Trials and rank statuses for the launchers' tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import rows
from tests.support.trials import tiny_trial

from paceline.measure.records.layout import TrialFiles
from paceline.plan.trials.trial import Trial

TRAINING = {
    "dataset": "/data/tiny", "seed": 1, "image_size": 64, "global_batch": 32, "max_steps": 4,
    "warmup_steps": 1,
}  # fmt: skip


@pytest.fixture
def make_launch_trial() -> Callable[..., Trial]:
    def make(
        launcher: str = "mpi",
        *,
        nodes: int = 1,
        ranks: int = 2,
        threads: int = 1,
        replicas: int | None = None,
        local_strategy: str = "processes",
        oversubscribe: bool = False,
        allocated_cores: int | None = None,
        dataset: str = "/data/tiny",
        launcher_options: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Trial:
        return tiny_trial(
            {
                "nodes": nodes,
                "ranks_per_node": ranks,
                "threads_per_rank": threads,
                "replicas_per_node": replicas or ranks,
                "oversubscribe": oversubscribe,
                "allocated_cores": allocated_cores,
            },
            TRAINING | {"dataset": dataset},
            id="the-trial",
            launcher=launcher,
            transport="gloo",
            local_strategy=local_strategy,
            launcher_options=launcher_options or {},
            **changes,
        )

    return make


@pytest.fixture
def files(tmp_path: Path) -> TrialFiles:
    return TrialFiles(tmp_path / "run" / "trials" / "the-trial")


@pytest.fixture
def write_status(files: TrialFiles) -> Callable[..., None]:
    """Write a rank's status."""

    def write(rank: int, state: str, error: str | None = None, **changes: Any) -> None:
        usual = {"host": "elsewhere", "process_started_unix_s": time.time()}
        rows.write_status(files, rank, state, error, **{**usual, **changes})

    return write
