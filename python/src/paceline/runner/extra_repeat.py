"""One more repeat of a configuration, in the directory of a run that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.plan.planning import repeated
from paceline.records.attempts import set_aside
from paceline.runner.directory import only_runner
from paceline.runner.equivalence import check_equivalences
from paceline.runner.experiment import preflight
from paceline.runner.run_trial import failure_of, run_trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.trial import Trial
    from paceline.records.layout import RunFiles
    from paceline.runner.progress import Progress


def run_extra_repeat(
    files: RunFiles, configuration: str, trials: Sequence[Trial], progress: Progress
) -> Trial:
    """Run a configuration once more and return the trial.

    trials: all trials of the run, the baselines included. The new one trains as the first repeat.
    Raises UsageError if the run lacks the configuration, EnvironmentLacks before the trial starts,
    and RankFailed or TimedOut if it fails.
    """
    own = [trial for trial in trials if trial.configuration == configuration]
    if not own:
        raise UsageError(f"{files.root}: expected a trial of {configuration}, found none")
    number = max(trial.repeat for trial in own) + 1
    first = min(own, key=lambda trial: trial.repeat)
    trial = repeated(first, number)
    trial_files = files.trial(trial.id)
    preflight([trial])
    with only_runner(files.root):
        set_aside(files, trial)  # a repeat of this number may have failed
        progress.trial_started(trial, trial_files, 1, 1)
        outcome = run_trial(trial, trial_files)
        progress.trial_ended(trial, outcome)
        if outcome.status != "ok":
            raise failure_of(outcome)
        check_equivalences([*trials, trial], files, keep_tensors=False)
    return trial
