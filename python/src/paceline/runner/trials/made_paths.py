"""Move what a script has made in its working folder into the folder of its trial.

The next trial then starts as the first one did: it finds no snapshot, and no folder that it expects
to be new. See `train.rank.script.touched_files`, which records the paths.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from paceline.measure.records.files import document
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import TouchedFilesRow
from paceline.plan.trials.trial import Trial


def move_made_paths(trial: Trial, files: TrialFiles) -> None:
    """Move the files and folders that the ranks have made to `files.made`.

    A folder in which a rank has read before its first step stays: such data are prepared once. So
    does what cannot be moved.
    """
    script = trial.training.script
    if script is None or script.resume is not None:  # a resumed training needs its checkpoint
        return
    rows = [document(rank.touched_files, TouchedFilesRow) for _, rank in files.ranks()]
    touched = [row for row in rows if row is not None]
    read = [Path(path) for row in touched for path in row.read_changed_ns]
    folder = _plain(script.directory)
    # The shortest first: a folder takes what another rank has made in it along.
    for path in sorted({_plain(each) for row in touched for each in row.made}):
        if not path.is_relative_to(folder) or not os.path.lexists(path):
            continue
        if any(each.is_relative_to(path) for each in read):
            continue
        goal = files.made / path.relative_to(folder)
        with suppress(OSError):
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, goal)


def _plain(path: str) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100  (links keep their names)
