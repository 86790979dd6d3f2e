"""Kill ranks of a trial at random times, to measure what a failure costs."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from paceline.host.machine import host_name
from paceline.host.processes import is_alive
from paceline.records.files import JsonlWriter
from paceline.records.rows import InjectedFailureRow
from paceline.records.statuses import read_statuses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles
    from paceline.records.rows import RankStatus
    from paceline.spec.failures import FailureSettings

_POLL_S = 0.1
_END_S = 5.0


def planned_failures(
    settings: FailureSettings, seed: int, repeat: int, ranks: int
) -> list[tuple[float, int]]:
    """Return (seconds of training before it, rank) of each failure of a trial."""
    draw = random.Random(f"{seed} {repeat}")  # noqa: S311  (a plan, not a secret)
    return [
        (draw.expovariate(1 / settings.mean_s), draw.randrange(ranks))
        for _ in range(settings.count)
    ]


@contextmanager
def failing_ranks(trial: Trial, files: TrialFiles) -> Iterator[None]:
    """Kill ranks as the trial's `[failures]` says while the block runs; nothing without it."""
    if trial.failures is None:
        yield
        return
    stopped = threading.Event()
    thread = threading.Thread(
        target=_inject, args=(trial, trial.failures, files, stopped), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(_END_S)


def _inject(
    trial: Trial, settings: FailureSettings, files: TrialFiles, stopped: threading.Event
) -> None:
    ranks = trial.placement.ranks
    killed: set[int] = set()
    plan = planned_failures(settings, trial.training.seed, trial.repeat, ranks)
    for wait_s, rank in plan:
        status = None
        while status is None:
            if stopped.wait(_POLL_S):
                return
            status = _training(files, ranks, rank, killed)
        if stopped.wait(wait_s):
            return
        with JsonlWriter(files.injected) as rows:
            rows.write(InjectedFailureRow(unix_s=time.time(), rank=rank))
        # The rank may have ended by itself meanwhile.
        with suppress(ProcessLookupError):
            if is_alive(status.pid, status.process_started_unix_s):
                os.kill(status.pid, signal.SIGKILL)
        killed |= {s.pid for s in read_statuses(files)}


def _training(files: TrialFiles, ranks: int, rank: int, killed: set[int]) -> RankStatus | None:
    """Return the status of a rank if all ranks train, in processes that have had no failure."""
    statuses = read_statuses(files)
    here = [s for s in statuses if s.state == "running" and s.host == host_name()]
    if len(here) < ranks or any(s.pid in killed for s in here):
        return None
    for status in here:
        steps = files.rank(status.rank).steps
        try:
            if steps.stat().st_mtime <= status.process_started_unix_s:
                return None
        except FileNotFoundError:
            return None
        if files.rank(status.rank).interrupted.exists():
            return None  # it restores a checkpoint
    return next(s for s in here if s.rank == rank)
