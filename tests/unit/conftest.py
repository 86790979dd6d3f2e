from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.job_specs import NO_SIDECAR, job_words
from tests.support.trials import tiny_trial

from paceline.plan.trials.trial import RankContext
from paceline.runner.job.job import Job, parse_job
from paceline.runner.preflight.load import Load
from paceline.runner.trials import preview


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch):
    """Previews of runs see an idle machine at once."""
    idle = Load(others_percent=0.0, stolen_percent=0.0, named={})
    monkeypatch.setattr(preview, "Looking", lambda: SimpleNamespace(end=lambda: idle))


@pytest.fixture
def make_trial():
    """Makes a tiny trial of one rank; keywords override its training or its placement."""

    def make(ranks=1, oversubscribe=True, **training):
        return tiny_trial(
            {"ranks_per_node": ranks, "oversubscribe": oversubscribe},
            training,
            transport="none" if ranks == 1 else "gloo",
        )

    return make


@pytest.fixture
def solo():
    return make_context()


@pytest.fixture
def context_of():
    return make_context


def make_context(rank=0, world_size=1, host="alpha", store=None):
    return RankContext(
        rank=rank, world_size=world_size, local_rank=rank, ranks_on_node=world_size, node_index=0,
        host=host, process_started_unix_s=1000.0, store=store,
    )  # fmt: skip


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    def make(*, launcher: str = "mpi", ranks: int = 2, repeat: int = 0, **keys: Any) -> Job:
        given = {"data": tmp_path, "telemetry": NO_SIDECAR, **keys}
        words = job_words(tmp_path, launcher, ranks_per_node=ranks, **given)
        words += ["--out", str(tmp_path / "run"), "--repeat", str(repeat)]
        return parse_job(launcher, "train.py", words)

    return make


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    return make_job()


@pytest.fixture
def job_context() -> Callable[[int], RankContext]:
    def make(rank: int) -> RankContext:
        return replace(make_context(rank, 2, "here"), process_started_unix_s=time.time())

    return make
