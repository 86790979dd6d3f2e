"""Keep the files of an unfinished or failed attempt at a trial apart from the next attempt."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from paceline.records.checkpoints import CheckpointFolder
from paceline.records.continuation import begin_attempt
from paceline.records.files import JsonlWriter

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.records.layout import RunFiles, TrialFiles
    from paceline.records.rows import FailureRow


def set_aside(run: RunFiles, trial: Trial) -> None:
    """Move the trial's directory, if there is one, to `attempts/<trial id>.<n>`.

    Its tensors are deleted: they are big, and nothing compares an attempt that did not finish. A
    trial with a complete checkpoint stays where it is, and continues.
    """
    files, trial_id = run.trial(trial.id), trial.id
    if not files.root.exists():
        return
    if trial.checkpoint is not None and CheckpointFolder(files.checkpoints).complete():
        leave_attempt(files)
        keep_log(files)
        files.outcome.unlink(missing_ok=True)
        return
    shutil.rmtree(files.weights.parent, ignore_errors=True)
    attempts = run.root / "attempts"
    attempts.mkdir(exist_ok=True)
    number = sum(1 for _ in attempts.glob(f"{trial_id}.*")) + 1
    files.root.rename(attempts / f"{trial_id}.{number}")


def leave_attempt(files: TrialFiles, failure: FailureRow | None = None) -> None:
    """Prepare the files of a trial for another attempt, while none of its ranks runs.

    failure: to be recorded.

    The statuses of the ranks are removed, because the next attempt would be taken for failed.
    """
    for _, rank in files.ranks():
        begin_attempt(rank)
        rank.status.unlink(missing_ok=True)
    if failure is not None:
        with JsonlWriter(files.failures) as rows:
            rows.write(failure)


def keep_log(files: TrialFiles) -> None:
    """Give the launcher's log another name: the next attempt gets a log of its own."""
    if files.launcher_log.exists():
        number = sum(1 for _ in files.root.glob("launcher.*.log"))
        files.launcher_log.rename(files.root / f"launcher.{number}.log")
