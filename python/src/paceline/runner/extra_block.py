"""One more repeat of some configurations, in the directory of a run that has ended."""

from __future__ import annotations

import random
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


def run_extra_block(
    files: RunFiles, configurations: Sequence[str], trials: Sequence[Trial], progress: Progress
) -> list[Trial]:
    """Run each configuration once more, in random order after the baseline; return the trials.

    All get the same repeat number, which no trial has yet. So they are a block like every other
    repeat, and what they share in it cancels in comparisons.
    trials: all trials of the run, the baselines included. The new ones train as the first repeat.
    Raises UsageError if the run lacks a configuration, EnvironmentLacks before a trial starts, and
    RankFailed or TimedOut if one fails.
    """
    number = max((trial.repeat for trial in trials), default=0) + 1
    block = [repeated(_first(files, name, trials), number) for name in configurations]
    random.Random(number).shuffle(block)  # noqa: S311  (an order, not a secret)
    block.sort(key=lambda trial: not trial.is_baseline)  # others replay steps from its states
    preflight(block)
    with only_runner(files.root):
        for position, trial in enumerate(block, start=1):
            trial_files = files.trial(trial.id)
            set_aside(files, trial)  # a repeat of this number may have failed
            progress.trial_started(trial, trial_files, position, len(block))
            outcome = run_trial(trial, trial_files)
            progress.trial_ended(trial, outcome)
            if outcome.status != "ok":
                raise failure_of(outcome)
        check_equivalences([*trials, *block], files, keep_tensors=False)
    return block


def _first(files: RunFiles, configuration: str, trials: Sequence[Trial]) -> Trial:
    own = [trial for trial in trials if trial.configuration == configuration]
    if not own:
        raise UsageError(f"{files.root}: expected a trial of {configuration}, found none")
    return min(own, key=lambda trial: trial.repeat)
