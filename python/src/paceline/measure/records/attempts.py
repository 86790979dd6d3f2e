"""Attempts at a trial: what one left is kept apart from the next, also if that continues.

Each rank changes only its own files. `begin_attempt` keeps what the attempt before has left apart,
`continue_rows` removes the rows of steps that are repeated. So every step has one row.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.base.errors import DataError
from paceline.measure.records.checkpoints import CheckpointFolder
from paceline.measure.records.files import JsonlWriter, read_json, read_jsonl, replacing, write_json
from paceline.measure.records.layout import RankFiles, RunFiles, TrialFiles
from paceline.measure.records.rows import ContinuationRow, FailureRow
from paceline.plan.trials.trial import Trial


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

    The statuses of the ranks and the failure that their launcher has reported are removed, because
    the next attempt would be taken for failed.
    """
    for _, rank in files.ranks():
        begin_attempt(rank)
        rank.status.unlink(missing_ok=True)
    files.reported.unlink(missing_ok=True)
    if failure is not None:
        with JsonlWriter(files.failures) as rows:
            rows.write(failure)


def keep_log(files: TrialFiles) -> None:
    """Give the launcher's log another name: the next attempt gets a log of its own."""
    if files.launcher_log.exists():
        number = sum(1 for _ in files.root.glob("launcher.*.log"))
        files.launcher_log.rename(files.root / f"launcher.{number}.log")


def begin_attempt(files: RankFiles) -> None:
    """Note in `interrupted.json` how the attempt before was left, if there was one.

    Call it before a rank's first write.
    Its spans and operations move to `attempts/<n>/`: they describe a part of the training only.
    """
    if not files.status.exists():
        return  # nothing, or what `leave_attempt` has noted already
    try:
        status = read_json(files.status)
    except DataError:
        status = {}
    interrupted = {
        "started_unix_s": status.get("process_started_unix_s"),
        "state": status.get("state"),
        "state_unix_s": files.status.stat().st_mtime,
    }
    before = files.root / "attempts"
    before.mkdir(exist_ok=True)
    own = before / str(sum(1 for _ in before.iterdir()))
    own.mkdir()
    for path in (files.spans, files.communication):
        if path.exists():
            path.rename(own / path.name)
    write_json(files.interrupted, interrupted)


def continue_rows(
    files: RankFiles, steps: int, *, process_started_unix_s: float, restored_unix_s: float
) -> None:
    """Remove the rows of all steps but the first `steps`, and record the continuation.

    Does nothing if `begin_attempt` found no earlier attempt.
    """
    if not files.interrupted.exists():
        return
    done, ended_unix_s = _last_step(files.steps)
    _keep(files.steps, lambda row: row["step"] < steps)
    _keep(files.sample_log, lambda row: row["step"] < steps)
    _keep(files.updates, lambda row: row["step"] < steps)
    _keep(files.evaluations, lambda row: row["steps"] <= steps)
    row = ContinuationRow(
        **{f"before_{name}": value for name, value in read_json(files.interrupted).items()},
        before_steps=done,
        before_ended_unix_s=ended_unix_s,
        process_started_unix_s=process_started_unix_s,
        resumed_steps=steps,
        restored_unix_s=restored_unix_s,
    )
    with JsonlWriter(files.continuations) as rows:
        rows.write(row)
    files.interrupted.unlink()


def _last_step(path: Path) -> tuple[int, float | None]:
    """Return the number of steps done, and when the last one ended."""
    last: dict[str, Any] | None = None
    if path.exists():
        for row in read_jsonl(path):
            last = row
    if last is None:
        return 0, None
    return last["step"] + 1, last["started_unix_s"] + last["step_s"]


def _keep(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the wanted rows of a file, without an unfinished last row."""
    if not path.exists():
        return
    rows = [row for row in read_jsonl(path) if wanted(row)]
    with replacing(path) as file:
        file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
