"""Verify how a script resumes: stop it at a checkpoint, continue it, and train without a stop.

The stopped and the continued training share a working folder; the uninterrupted one has its own,
so that it finds no checkpoint. Working folders are copies of the current folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.analysis.equivalence.resume import ResumeFinding, judge_resume, position_of
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.own_steps import ResumedRank
from paceline.plan.spec.loading import Spec
from paceline.plan.trials.trial import ResumePart, Trial
from paceline.runner.trials.directory import check_run_dir, made_run_dir, only_runner
from paceline.runner.trials.planning import Planned, Progress, manifest_of, plan
from paceline.runner.trials.preview import preflight
from paceline.runner.trials.verify_script import Trainings, rank_documents, verified_trial

STOPPED, CONTINUED, WHOLE = "stopped", "continued", "uninterrupted"  # trials
_LARGE = 16 * 2**20  # bytes of a file that is linked, not copied
_MANY = 2000  # entries of a folder that is linked, not copied
# Without a checkpoint after so many steps, nothing is shown.
_MOST_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequest:
    """Words and steps with which a script stops and resumes; words are added to its arguments."""

    resume_with: tuple[str, ...]
    stop_with: tuple[str, ...] | None  # None: Paceline ends it at a checkpoint
    stop_after: int  # steps before that
    steps: int  # that are compared after the stop


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedResume:
    """The result for one script. ranks: before and after the stop."""

    script: str
    ranks: tuple[int, int]
    finding: ResumeFinding


def verify_resume(
    spec: Spec,
    continued_spec: Spec,
    run_dir: Path,
    request: ResumeRequest,
    *,
    progress: Progress,
) -> VerifiedResume:
    """Stop the layout of a spec at a checkpoint, continue it, and train without a stop.

    continued_spec: has the layout in which it continues. Raises UsageError, EnvironmentLacks before
    anything runs; RankFailed, TimedOut if a training fails.
    """
    files = RunFiles(run_dir)
    check_run_dir(files, spec, resume=False)
    planned = plan(spec)
    layout, continued = _layout(planned), _layout(plan(continued_spec))
    script = layout.training.script
    assert script is not None
    with made_run_dir(run_dir):
        preflight([layout, continued])
    with only_runner(run_dir), _folders(files.root, Path(script.directory)) as (first, second):
        write_json(files.manifest, manifest_of(planned))
        trainings = Trainings(files, progress, 3)
        part = ResumePart(
            full_from=_MOST_STEPS,
            stop_after=request.stop_after if request.stop_with is None else None,
            watched=str(first),
            words=request.resume_with,
        )
        limit = _MOST_STEPS if request.stop_with is None else None
        begun = _in_folder(layout, STOPPED, first, request.stop_with or (), part, limit)
        stopped = _recorded(trainings.finished(begun))
        finding = _without_checkpoint(stopped)
        if finding is None:
            words, steps = request.resume_with, request.steps
            resumed = _in_folder(continued, CONTINUED, first, words, ResumePart(), steps)
            ours = _recorded(trainings.finished(resumed))
            saved = (stopped[0].saved_after or [0])[0]
            start = min(position_of(stopped, ours) or saved, saved)
            part = ResumePart(full_from=start)
            whole = _in_folder(layout, WHOLE, second, (), part, saved + steps)
            theirs = _recorded(trainings.finished(whole))
            finding = judge_resume(stopped, ours, theirs)
    ranks = (layout.placement.ranks, continued.placement.ranks)
    return VerifiedResume(script=script.path, ranks=ranks, finding=finding)


def _layout(planned: Planned) -> Trial:
    """Return the layout of several ranks; one process if there is none."""
    several = [trial for trial in planned.trials if not trial.is_baseline]
    return (several or planned.trials)[0]


def _without_checkpoint(stopped: Sequence[ResumedRank]) -> ResumeFinding | None:
    """Return why the stopped training cannot be continued; None if it can."""
    first = stopped[0] if stopped else ResumedRank()
    if first.saved_while_stopping:
        reason = (
            "the script wrote its checkpoint once more while Paceline ended it; let an option of "
            "the script stop it (--stop-with)"
        )
    elif first.saved_after is None:
        reason = (
            f"no checkpoint in {len(first.steps)} steps: expected the file that --resume-with "
            "names, or files as large as the weights, below the working folder; let the script "
            "write one earlier, or stop it with --stop-with"
        )
    elif not first.saved_after or first.saved_after[0] == 0:
        reason = "the checkpoint was written before the first step"
    else:
        return None
    return ResumeFinding(passed=None, reasons=(reason,))


def _in_folder(
    trial: Trial,
    name: str,
    folder: Path,
    words: tuple[str, ...],
    part: ResumePart,
    max_steps: int | None,
) -> Trial:
    """Return the trial that runs the script in a working folder."""
    script = trial.training.script
    assert script is not None
    path = Path(script.path)
    if path.is_relative_to(script.directory):  # it may write beside itself
        path = folder / path.relative_to(script.directory)
    training = trial.training.model_copy(update={"max_steps": max_steps})
    return verified_trial(
        trial.model_copy(update={"training": training}),
        name,
        path=str(path),
        directory=str(folder),
        arguments=(*script.arguments, *words),
        resume=part,
    )


def _recorded(files: TrialFiles) -> list[ResumedRank]:
    return rank_documents(files, lambda rank: rank.resumed, ResumedRank)


@contextmanager
def _folders(run_dir: Path, directory: Path) -> Iterator[tuple[Path, Path]]:
    """Make two working folders from the current one; remove them at the end."""
    work = run_dir.resolve() / "work"
    folders = (work / STOPPED, work / WHOLE)
    try:
        for folder in folders:
            _copy(directory, folder, run_dir.resolve())
        yield folders
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _copy(source: Path, target: Path, run_dir: Path) -> None:
    """Copy a folder; large files, hidden folders and folders of many files are linked.

    run_dir: left out, with all other folders that contain it.
    """
    target.mkdir(parents=True)
    for entry in sorted(os.scandir(source), key=lambda each: each.name):
        path, to = Path(entry.path), target / entry.name
        if run_dir.is_relative_to(path.resolve()):
            continue
        if entry.is_dir(follow_symlinks=False):
            if entry.name == "__pycache__":
                continue
            if entry.name.startswith(".") or _has_many(path):
                to.symlink_to(path.resolve())
            else:
                _copy(path, to, run_dir)
        elif entry.is_file() and entry.stat().st_size <= _LARGE:
            shutil.copy2(path, to)
        else:
            to.symlink_to(path.resolve())


def _has_many(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return sum(1 for _ in zip(entries, range(_MANY + 1), strict=False)) > _MANY
