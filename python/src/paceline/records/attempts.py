"""Keep the files of an unfinished or failed attempt at a trial apart from the next attempt."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.records.layout import RunFiles


def set_aside(run: RunFiles, trial_id: str) -> None:
    """Move the trial's directory, if there is one, to `attempts/<trial id>.<n>`.

    Its tensors are deleted: they are big, and nothing compares an attempt that did not finish.
    """
    files = run.trial(trial_id)
    if not files.root.exists():
        return
    shutil.rmtree(files.weights.parent, ignore_errors=True)
    attempts = run.root / "attempts"
    attempts.mkdir(exist_ok=True)
    number = sum(1 for _ in attempts.glob(f"{trial_id}.*")) + 1
    files.root.rename(attempts / f"{trial_id}.{number}")
