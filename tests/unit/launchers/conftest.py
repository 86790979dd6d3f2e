"""Trials and rank statuses for the launchers' tests."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.host.processes import Process
from paceline.plan.trial import Placement, Training, Trial
from paceline.records.files import write_json
from paceline.records.layout import TrialFiles
from paceline.records.rows import RankStatus

TRAINING = Training(
    workload="tiny", model="tiny-alexnet", dataset="/data/tiny", seed=1,
    image_size=64, global_batch=32, epochs=1, max_steps=4, warmup_steps=1, learning_rate=0.01,
    momentum=0.9, dropout=True, reading="memory", precision="fp32", memory_format="contiguous",
)  # fmt: skip


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
        return Trial(
            id="the-trial",
            experiment="test",
            repeat=0,
            launcher=launcher,
            transport="gloo",
            local_strategy=local_strategy,
            placement=Placement(
                nodes=nodes,
                ranks_per_node=ranks,
                threads_per_rank=threads,
                replicas_per_node=replicas or ranks,
                oversubscribe=oversubscribe,
                allocated_cores=allocated_cores,
            ),
            training=TRAINING.model_copy(update={"dataset": dataset}),
            strategy_options={},
            transport_options={},
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
        status = RankStatus(
            rank=rank,
            host="elsewhere",
            pid=os.getpid(),
            process_started_unix_s=time.time(),
            state=state,
            error=error,
        )
        process = Process.of(changes.get("pid", os.getpid()))
        known = {} if process is None else dataclasses.asdict(process)
        row = dataclasses.replace(status, **{**known, **changes})
        write_json(files.rank(rank).status, dataclasses.asdict(row))

    return write
