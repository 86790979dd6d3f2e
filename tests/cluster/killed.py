"""Trials that last until a test ends them, supervised in the test's own process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.job_specs import NO_SIDECAR, job_words
from tests.support.listeners import open_listeners
from tests.support.waiting import pid_after_steps, wait_for

from paceline.base.host.processes import pids_with_token
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import Outcome
from paceline.plan.trials.trial import Trial
from paceline.runner.job.job import parse_job
from paceline.runner.launchers.base import launcher_for
from paceline.runner.launchers.diagnosis import diagnose
from paceline.runner.launchers.supervise import Ended, WaitLimits, launched

LIMIT_S = 120.0


def endless(launcher: str, data: Path, out: Path, **keys: Any) -> tuple[Trial, TrialFiles]:
    """Return a planned trial of two small ranks that train for ever, and its files."""
    small = {
        "data": data, "ranks_per_node": 2, "oversubscribe": True, "global_batch": 8,
        "image_size": 32, "max_steps": 100_000, "epochs": 100_000, "telemetry": NO_SIDECAR,
    }  # fmt: skip
    words = [*job_words(out.parent, launcher, **{**small, **keys}), "--out", str(out)]
    job = parse_job(launcher, "test", words)
    job.files.root.mkdir(parents=True)
    job.files.trial.write_text(job.trial.model_dump_json())
    return job.trial, job.files


def wait_for_step(files: TrialFiles, rank: int) -> int:
    """Wait until a rank trains; return its process id."""
    folder = files.rank(rank).root
    return wait_for(lambda: pid_after_steps(folder), 90, f"a step of rank {rank}")


@dataclass(frozen=True)
class Killed:
    """The end of a trial in which a process was killed."""

    ended: Ended
    outcome: Outcome
    took_s: float  # from the kill until everything was gone
    listeners: list[tuple[str, str]]  # before the kill


def kill_one(trial: Trial, files: TrialFiles, token: str, victim: Callable[[], int]) -> Killed:
    """Supervise a trial, kill what `victim` returns as soon as it does, and diagnose the end.

    token: with which the trial's processes are marked.
    """
    launcher = launcher_for(trial.launcher)
    launcher.preflight(trial)
    seen: dict[str, Any] = {}

    def kill() -> None:
        pid = victim()
        seen["listeners"] = open_listeners(pids_with_token(token))
        seen["killed_s"] = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    with launched(launcher.command(trial, files), files) as started:
        killer.start()
        started.wait(WaitLimits(trial_s=LIMIT_S))
    ended = started.ended
    gone_s = time.monotonic()
    killer.join()
    assert not ended.timed_out
    assert ended.left_behind == ()
    assert pids_with_token(token) == set()
    outcome = diagnose(trial, files, ended, launcher)
    return Killed(ended, outcome, gone_s - seen["killed_s"], seen["listeners"])
