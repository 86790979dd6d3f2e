"""Write a planned trial, with the user's file that holds its task."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.records.files import write_text

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles


def write_trial(trial: Trial, files: TrialFiles) -> None:
    """Write `trial.json`, and beside it a copy of the file of the task, which every rank reads.

    Raises UsageError if that file cannot be read.
    """
    write_text(files.trial, trial.model_dump_json(indent=1) + "\n")
    if trial.training.task_sha256 is None:
        return
    source = Path(trial.training.task.rpartition(":")[0])
    try:
        shutil.copyfile(source, files.root / source.name)
    except OSError as error:
        raise UsageError(
            f"task: expected the file {source}, got: {error.strerror}; put it back, or change "
            "`task` in the spec"
        ) from error
