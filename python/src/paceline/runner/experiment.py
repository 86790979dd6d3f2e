"""The stages of a run, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paceline.launchers.base import launcher_for
from paceline.records.attempts import set_aside
from paceline.records.files import write_json
from paceline.records.layout import RunFiles
from paceline.runner.directory import check_run_dir, made_run_dir, only_runner
from paceline.runner.equivalence import check_equivalences
from paceline.runner.planning import make_datasets, manifest_of, planned_trials
from paceline.runner.trial import failure_of, is_finished, run_trial
from paceline.spec import load_spec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from paceline.plan.trial import Trial
    from paceline.records.layout import TrialFiles
    from paceline.records.rows import Outcome
    from paceline.runner.planning import Planned


class Progress(Protocol):
    """Receives the progress of a run; all methods return at once."""

    def stage(self, text: str) -> None: ...
    def data(self, done: int, total: int) -> None: ...
    def trial_started(self, trial: Trial, files: TrialFiles, number: int, of: int) -> None: ...
    def trial_ended(self, trial: Trial, outcome: Outcome) -> None: ...


def run(spec: str, run_dir: Path, *, resume: bool, progress: Progress) -> None:
    """Run every trial of `spec` into `run_dir`.

    Raises UsageError, EnvironmentLacks or DataError before anything runs; RankFailed or TimedOut
    when a trial fails, with all earlier trials intact.
    """
    experiment, text = load_spec(spec)
    files = RunFiles(run_dir)
    check_run_dir(files, experiment, text, resume=resume)
    with made_run_dir(run_dir):
        datasets = make_datasets(experiment, progress)
        planned = planned_trials(experiment, text, datasets)
        preflight(planned.trials)
    with only_runner(run_dir):
        if not files.manifest.exists():
            write_json(files.manifest, manifest_of(planned))
        _run_trials(planned, files, progress)


def preflight(trials: Iterable[Trial]) -> None:
    """Check every configuration before any trial runs. Raises EnvironmentLacks."""
    first_of_each = {trial.configuration: trial for trial in reversed(list(trials))}
    for trial in reversed(first_of_each.values()):
        launcher_for(trial.launcher).preflight(trial)


def _run_trials(planned: Planned, files: RunFiles, progress: Progress) -> None:
    total = len(planned.trials)
    for number, trial in enumerate(planned.trials, start=1):
        trial_files = files.trial(trial.id)
        if is_finished(trial_files):
            continue
        set_aside(files, trial.id)
        progress.trial_started(trial, trial_files, number, total)
        outcome = run_trial(trial, trial_files)
        progress.trial_ended(trial, outcome)
        if outcome.status != "ok":
            raise failure_of(outcome, files)
        check_equivalences(planned.trials, files, keep_tensors=planned.experiment.keep_tensors)
