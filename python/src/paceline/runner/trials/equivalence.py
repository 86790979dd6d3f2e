"""The comparison of finished trials with their baseline, as soon as both have ended."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

from paceline.analysis.equivalence.check import check_equivalence, write_equivalence
from paceline.analysis.equivalence.shown import Shown
from paceline.measure.records.layout import RunFiles
from paceline.plan.trials.sample_order import SampleOrder
from paceline.plan.trials.trial import Trial
from paceline.runner.trials.run_trial import is_finished


def check_equivalences(
    trials: Sequence[Trial],
    files: RunFiles,
    shown: Callable[[Trial, Trial], Shown | None] = lambda _trial, _baseline: None,
    *,
    keep_tensors: bool,
) -> None:
    """Compare the finished ones of `trials` with their baseline, if it has finished, too.

    Tensors of a trial are big (VGG16: 2 x 537 MB). They are deleted after the comparison, except
    those of the first baseline of each workload, seed and precision.
    shown: returns what `paceline verify` shows of a trial, beside its baseline; None: nothing.
    """
    finished = [t for t in trials if is_finished(files.trial(t.id))]
    for trial in finished:
        trial_files = files.trial(trial.id)
        if trial_files.equivalence.exists():
            continue
        baseline = _baseline(trial, finished, trials, files)
        if baseline is None:
            continue
        own = shown(trial, baseline)
        found = check_equivalence(trial_files, files.trial(baseline.id), _order(trial), own)
        write_equivalence(trial_files, found)
        if trial.id != baseline.id and not keep_tensors:
            shutil.rmtree(trial_files.weights.parent, ignore_errors=True)


def _order(trial: Trial) -> SampleOrder | None:
    """Return the samples that the trial's steps should have used; None for a script."""
    if trial.training.script is not None:
        return None
    from paceline.train.data.dataset import order_of  # noqa: PLC0415  (a script needs no data set)

    return order_of(trial.training)


def _baseline(
    trial: Trial, finished: list[Trial], planned: Sequence[Trial], files: RunFiles
) -> Trial | None:
    """Return the baseline of the trial's seed and precision if one is planned, else the fp32 one.

    It is the first repeat that did not fail. None if that has not finished yet.
    """
    key = (trial.training.workload, trial.training.seed)
    ours = [t for t in planned if t.is_baseline and (t.training.workload, t.training.seed) == key]
    same = [t for t in ours if t.training.precision == trial.training.precision]
    usable = [t for t in same or ours if t in finished or not files.trial(t.id).outcome.exists()]
    return usable[0] if usable and usable[0] in finished else None
