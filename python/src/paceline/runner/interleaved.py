"""Run two or more trials in turn, so that a drift of the machine acts on all of them alike."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.launchers.base import launcher_for
from paceline.plan.planning import repeated
from paceline.records.layout import RunFiles
from paceline.runner.directory import made_run_dir, only_runner
from paceline.runner.run_trial import run_all

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.plan.trial import Trial
    from paceline.runner.progress import Progress

LEAST_REPEATS = 2  # fewer show no noise between runs


def run_interleaved(
    sides: Mapping[str, Trial], out: Path, *, repeats: int, limit_s: float, progress: Progress
) -> dict[str, RunFiles]:
    """Run every side once per repeat, each into a folder of its own below `out`.

    limit_s: no further repeat starts if it would probably end later, except for the first two.
    Raises UsageError if `out` has contents, EnvironmentLacks before anything runs, and RankFailed
    or TimedOut if a trial fails.
    """
    with made_run_dir(out), only_runner(out):
        if any(path.name != RunFiles(out).lock.name for path in out.iterdir()):
            raise UsageError(f"{out}: expected a new or empty directory; choose another with --out")
        for trial in sides.values():
            launcher_for(trial.launcher).preflight(trial)
        files = {name: RunFiles(out / name) for name in sides}
        started_s = time.monotonic()
        for repeat in range(repeats):
            spent_s = time.monotonic() - started_s
            if repeat >= LEAST_REPEATS and spent_s * (repeat + 1) / repeat > limit_s:
                break
            # the order alternates, so that being first is no advantage of one side
            order = list(sides) if repeat % 2 == 0 else list(sides)[::-1]
            trials = [(files[name], _repeated(sides[name], repeat)) for name in order]
            run_all(
                [(trial, own.trial(trial.id)) for own, trial in trials],
                progress,
                repeat * len(sides) + 1,
                repeats * len(sides),
            )
        return files


def _repeated(trial: Trial, repeat: int) -> Trial:
    """Return a repeat of the trial that measures nothing but speed."""
    speed_only = {"save_tensors": False, "checkpoint": None, "failures": None, "restarts": 0}
    return repeated(trial, repeat).model_copy(update=speed_only)
