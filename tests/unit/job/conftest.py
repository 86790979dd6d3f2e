"""A job by hand for two ranks, without data."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from paceline.job.options import job_of, parser
from paceline.train.context import RankContext

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.job.options import Job


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    def make(*words: str, launcher: str = "mpi", ranks: int = 2) -> Job:
        given = ["--workload", "tiny", "--data", str(tmp_path), "--out", str(tmp_path / "run")]
        options = parser("train.py").parse_args([*given, "--no-sidecar", *words])
        return job_of(options, launcher, nodes=1, ranks_per_node=ranks)

    return make


@pytest.fixture
def context_of() -> Callable[[int], RankContext]:
    def make(rank: int) -> RankContext:
        return RankContext(
            rank=rank,
            world_size=2,
            local_rank=rank,
            ranks_on_node=2,
            node_index=0,
            host="here",
            process_started_unix_s=time.time(),
        )

    return make
