"""The stages of a run, in order, the decision before each repeat whether it is needed, and the
comparison of finished trials with their baseline.
"""

from __future__ import annotations

import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Literal

from paceline.analysis.between_runs.speeds import target_speed, trial_speed
from paceline.analysis.equivalence.check import (
    check_equivalence,
    read_equivalence,
    write_equivalence,
)
from paceline.analysis.equivalence.shown import Shown
from paceline.analysis.predict.prediction import ShareMeasurement
from paceline.analysis.statistics.intervals import FIRST_LOOK, levels
from paceline.analysis.statistics.rates import RepeatRate, RunRates
from paceline.analysis.trial.reading import load_manifest, load_trial
from paceline.base.errors import PacelineError, PacelineWarning, UsageError
from paceline.base.host.own_runs import remember_run
from paceline.measure.records.documents import LookRecord, Stopping, set_aside, write_stopping
from paceline.measure.records.files import document, read_json, write_json
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.phases import replayed_after
from paceline.measure.records.rows import Outcome
from paceline.plan.spec.loading import Spec, load_spec
from paceline.plan.spec.models import Experiment
from paceline.plan.spec.values import EVALUATION_KEYS, toml_document
from paceline.plan.spec.workloads import is_name_with_batch
from paceline.plan.trials.sample_order import SampleOrder
from paceline.plan.trials.trial import Trial, measured_again, planned_steps
from paceline.runner.trials.directory import (
    check_added,
    check_code,
    check_run_dir,
    has_ended,
    made_run_dir,
    only_runner,
    recorded_spec,
)
from paceline.runner.trials.planning import (
    Planned,
    Progress,
    known_samples,
    make_datasets,
    manifest_of,
    plan,
)
from paceline.runner.trials.preview import preflight, preview_run, warn_of_small_disk
from paceline.runner.trials.run_trial import failure_of, failure_of_all, is_finished, run_followed
from paceline.runner.trials.verify_script import ScriptMarks


def run(
    spec: Spec,
    run_dir: Path,
    *,
    resume: bool,
    progress: Progress,
    keep_going: bool | None = None,
    changed_script: bool = False,
) -> list[Outcome]:
    """Run every trial of `spec` into `run_dir`; return the outcomes of the trials that failed.

    resume: run the failed and missing trials of a run. Its spec may have a higher number of repeats
    and further [[trials]], which the run gets, as if it had been started with them.
    keep_going: run the other trials after one has failed. False: raise RankFailed or TimedOut, with
    all earlier trials intact. None: go on if the plan has several configurations.
    changed_script: resume also with other code than that of the finished trials.
    Raises UsageError, EnvironmentLacks, DataError or NotComparable before anything runs.
    """
    files = RunFiles(run_dir)
    check_run_dir(files, spec, resume=resume)
    before = recorded_spec(files.root, trust_run=True).experiment if resume else None
    extended = before is not None and before != spec.experiment
    if resume and not extended and has_ended(files):
        with only_runner(run_dir):
            progress.stage(f"{run_dir}: all trials are done, so nothing runs")
        return []
    if resume and not changed_script:
        check_code(files)
    with made_run_dir(run_dir):
        planned = plan(spec)
        make_datasets(spec.experiment, progress, {t.training.entry_name for t in planned.trials})
        if before is not None and before.trials != planned.experiment.trials:
            check_added(files, planned.trials, planned.left_out)
        preview = preview_run(planned, run_dir.parent)
        preview.check()
        preflight(planned.trials)
        warn_of_small_disk(preview.disk, spec.experiment.limits.trial_s, run_dir)
        for text in (*(f"left out: {each}" for each in preview.left_out), *preview.warnings):
            warnings.warn(text, PacelineWarning, stacklevel=2)
        lines = "\n".join([preview.summary, *preview.load.lines])
        progress.planned(lines, planned.trials, preview.expected_trials_s)
    if keep_going is None:
        keep_going = len({trial.configuration for trial in planned.trials}) > 1
    with only_runner(run_dir):
        _write_plan(planned, files, extended=extended)
        first = _baselines_for_states(planned, files) if extended else []
        ordered = [*first, *_in_order(planned.trials, files)]
        marks = ScriptMarks(files, progress)
        try:
            return _run_trials(planned, ordered, files, progress, marks, keep_going=keep_going)
        finally:
            marks.remove_tensors()


def _write_plan(planned: Planned, files: RunFiles, *, extended: bool) -> None:
    """Write the manifest of a new run; give that of an extended one its further trials."""
    if not files.manifest.exists():
        write_json(files.manifest, manifest_of(planned))
        remember_run(files.root)
    elif extended:
        files.repeats.unlink(missing_ok=True)  # other looks follow, or none
        plan = {"spec_toml": planned.spec_text, "trials": [trial.id for trial in planned.trials]}
        write_json(files.manifest, {**read_json(files.manifest), **plan})


def _run_trials(
    planned: Planned,
    ordered: Sequence[Trial],
    files: RunFiles,
    progress: Progress,
    marks: ScriptMarks,
    *,
    keep_going: bool,
) -> list[Outcome]:
    """Run trials in their order. ordered: those that are planned, and baselines before them."""
    known = list(planned.trials)  # and those that are measured again
    keep_tensors = planned.experiment.keep_tensors
    failed: list[Outcome] = []
    hopeless: set[str] = set()
    rule, number, repeat = None, 0, 0
    if planned.experiment.repeats == "auto":
        rule = AutomaticRepeats(planned.experiment, known, files)
    progress.between_trials(files)
    for repeat, own in groupby(ordered, key=lambda t: t.planned_repeat):
        if rule is not None and repeat and not rule.another(repeat):
            return failed
        for trial in _with_repeated(list(own), files, planned.experiment):
            number += 1
            if trial.is_again:
                known.append(trial)
            trial_files = files.trial(trial.id)
            if trial.configuration in hopeless or is_finished(trial_files):
                continue
            set_aside(files, trial)
            outcome = run_followed(trial, trial_files, progress, number, len(known))
            if outcome.status == "ok":
                check_equivalences(known, files, marks.shown, keep_tensors=keep_tensors)
            elif not keep_going or outcome.status == "interrupted":
                raise failure_of(outcome, files)
            else:
                failed.append(outcome)
                if _is_hopeless(trial, planned.trials, files):
                    hopeless.add(trial.configuration)
            progress.between_trials(files)
    if rule is not None:
        rule.ended(repeat + 1)
    return failed


def _with_repeated(
    trials: Sequence[Trial], files: RunFiles, experiment: Experiment
) -> Iterator[Trial]:
    """Yield the trials of a repeat, then once more those that ran beside other work.

    Speeds do not decide it: the choice would make slow configurations faster.
    """
    yield from trials
    first = [trial for trial in trials if not trial.is_again]
    for trial in first if experiment.measure_again else ():
        ended = document(files.trial(trial.id).outcome, Outcome)
        if ended is not None and ended.status == "ok" and ended.beside_others:
            yield measured_again(trial)


def _in_order(trials: Sequence[Trial], files: RunFiles) -> list[Trial]:
    """Return the trials with the next baselines before the others of their repeat if states lack.

    The others replay steps from states of a baseline, which the good end of a run removes.
    """
    if files.replay.exists():
        return list(trials)
    left = (t.repeat for t in trials if t.is_baseline and not is_finished(files.trial(t.id)))
    first = min(left, default=None)
    return sorted(trials, key=lambda t: (t.repeat, t.repeat == first and not t.is_baseline))


def _baselines_for_states(planned: Planned, files: RunFiles) -> list[Trial]:
    """Return baselines to measure again, before configurations that were added to a run.

    The added ones replay steps from states of a baseline, which the good end of a run has removed.
    An earlier trial of the same name becomes an attempt.
    """
    left = [trial for trial in planned.trials if not is_finished(files.trial(trial.id))]
    first = [trial for trial in left if trial.repeat == left[0].repeat and trial.is_replayed]
    wanted = {_baseline_key(t) for t in first} - {_baseline_key(t) for t in first if t.is_baseline}
    if files.replay.exists():
        return []
    found = {
        key: measured_again(trial)
        for trial in planned.trials
        if trial.is_baseline and _replays(planned, trial)
        if (key := _baseline_key(trial)) in wanted
    }
    for trial in found.values():
        set_aside(files, trial)
    return list(found.values())


def _baseline_key(trial: Trial) -> tuple[str, int, int]:
    """Identify the training and the repeat whose baseline has the states to replay from."""
    return trial.training.workload, trial.training.seed, trial.repeat


def _replays(planned: Planned, trial: Trial) -> bool:
    """Return whether the trial is so long that others replay steps from its states."""
    steps = planned_steps(trial.training, known_samples(planned, trial.training))
    return steps is not None and bool(replayed_after(steps))


def _is_hopeless(failed: Trial, trials: Iterable[Trial], files: RunFiles) -> bool:
    """Return whether the other repeats of a failed trial would probably fail, too.

    That is a configuration of which no trial has finished. Without a baseline nothing can be
    ranked, so each repeat of a baseline is tried.
    """
    repeats = (t for t in trials if t.configuration == failed.configuration)
    return not failed.is_baseline and not any(is_finished(files.trial(t.id)) for t in repeats)


# --- measurements beside a run that has ended: shares of the batch -------------------------------

SHARE_REPEATS = 3
_SHARE_STEPS, _SHARE_WARMUP = 15, 3
# Keys of a spec that belong to a longer training, or to repeats = "auto".
_LEFT_OUT = ("max_repeats", "tie_margin", "tune", "checkpoint", "failures", "restarts", "baseline")


def run_share(
    files: RunFiles, wanted: ShareMeasurement, progress: Progress
) -> PacelineError | None:
    """Run short trials of configurations on one node with the batch of a node's share.

    They are a run of their own below the run directory. One that was interrupted is continued.
    Return the error of trials that failed. Raises the errors of `paceline.runner.trials.run`.
    """
    checksum = zlib.crc32(" ".join(wanted.configurations).encode())
    folder = files.shares / f"{wanted.workload}-b{wanted.global_batch}-{checksum:08x}"
    # a run after a search has the tuned spec
    text = load_manifest(files).get("spec_toml")
    if text is None:
        raise UsageError(f"{files.root}: expected a run of `paceline run`, found no spec in it")
    entries = [str(entry.get("name")) for entry in toml_document(text)["workloads"]]
    if any(is_name_with_batch(wanted.workload, entry) for entry in entries):
        raise UsageError(
            f"--measure: expected a workload with one global batch, {wanted.workload} of "
            f"{files.root} is one of several batches; run its spec with that number as "
            "global_batch, and predict from that run"
        )
    spec = _share_spec(text, wanted)
    failed = run(
        spec, folder, resume=RunFiles(folder).manifest.exists(), progress=progress, keep_going=True
    )
    return failure_of_all(failed, RunFiles(folder)) if failed else None


def _share_spec(text: str, wanted: ShareMeasurement) -> Spec:
    """Return the spec of a run with another batch and few steps."""
    document = {k: v for k, v in toml_document(text).items() if k not in _LEFT_OUT}
    document.get("limits", {}).pop("run_s", None)
    lasting = (*EVALUATION_KEYS, "epochs")
    training = {k: v for k, v in document.pop("training", {}).items() if k not in lasting}
    return load_spec(
        {
            **document,
            "repeats": SHARE_REPEATS,
            "only": list(wanted.configurations),
            "training": training,
            "workloads": [
                {k: v for k, v in workload.items() if k not in lasting}
                | {
                    "global_batch": wanted.global_batch,
                    "max_steps": _SHARE_STEPS,
                    "warmup_steps": _SHARE_WARMUP,
                }
                for workload in document["workloads"]
                if workload.get("name") == wanted.workload
            ],
            "trials": [
                {k: v for k, v in trial.items() if k != "workloads"}
                for trial in document["trials"]
                if wanted.workload in trial.get("workloads", [wanted.workload])
                and trial.get("nodes", 1) == 1
            ],
        }
    )


class AutomaticRepeats:
    """Repeats run until the ranking of every workload is decided or the budget is used up.

    The looks of an earlier run of the same directory are made again from its files, with the same
    results, so a resumed run decides the same.
    """

    def __init__(self, experiment: Experiment, trials: Sequence[Trial], files: RunFiles) -> None:
        self._trials = trials  # grows by those that are measured again
        self._files = files
        self._levels = levels(experiment.max_repeats)
        self._deadline_s = None
        if experiment.limits.run_s is not None:
            self._deadline_s = time.monotonic() + experiment.limits.run_s
        self._speeds: dict[str, RepeatRate | None] = {}
        self._record = Stopping(
            max_repeats=experiment.max_repeats, tie_margin=experiment.tie_margin
        )

    def another(self, repeats: int) -> bool:
        """Look at the ranking; return whether a repeat is needed after this number of them."""
        decided = self._look(repeats) if repeats >= FIRST_LOOK else False
        if decided:
            self._write("decided")
        elif self._deadline_s is not None and repeats and time.monotonic() > self._deadline_s:
            self._write("time")
        else:
            return True
        return False

    def ended(self, repeats: int) -> None:
        """Record the last look, after all planned repeats."""
        self._write("decided" if self._look(repeats) else "max_repeats")

    def _look(self, repeats: int) -> bool:
        level, tie_margin = self._levels[repeats], self._record.tie_margin
        found = {
            workload: RunRates(rates).fastest(level=level, margin=tie_margin).undecided
            for workload, rates in self._ranking(repeats).items()
        }
        made = LookRecord(repeats=repeats, level=level, undecided=found)
        self._record = replace(self._record, looks=(*self._record.looks, made))
        self._write(None)
        return not any(found.values())

    def _ranking(self, repeats: int) -> dict[str, dict[str, dict[int, RepeatRate]]]:
        """Return the speeds that may be ranked, by workload, configuration and repeat.

        With a target they are those of reaching it, also of lossy configurations.
        """
        found: dict[str, dict[str, dict[int, RepeatRate]]] = {}
        excluded: set[str] = set()
        for trial in self._trials:
            if trial.planned_repeat >= repeats or not is_finished(self._files.trial(trial.id)):
                continue
            speed = self._speed(trial)
            is_fair = trial.is_exact or trial.training.target is not None
            missed = speed is None and trial.training.target is not None
            if not is_fair or missed or self._is_different(trial):
                excluded.add(trial.configuration)
            if speed is not None:
                rates = found.setdefault(trial.training.workload, {})
                rates.setdefault(trial.configuration, {})[trial.repeat] = speed
        return {
            workload: {name: each for name, each in rates.items() if name not in excluded}
            for workload, rates in found.items()
        }

    def _is_different(self, trial: Trial) -> bool:
        """Return whether the trial was shown not to be equivalent to the baseline."""
        path = self._files.trial(trial.id).equivalence
        return path.exists() and read_equivalence(path).equivalent is False

    def _speed(self, trial: Trial) -> RepeatRate | None:
        if trial.id not in self._speeds:
            record = load_trial(self._files.trial(trial.id))
            has_target = trial.training.target is not None
            self._speeds[trial.id] = target_speed(record) if has_target else trial_speed(record)
        return self._speeds[trial.id]

    def _write(self, stopped: Literal["decided", "max_repeats", "time"] | None) -> None:
        self._record = replace(self._record, stopped=stopped)
        write_stopping(self._files, self._record)


# --- comparison of finished trials with their baseline, as soon as both have ended ---------------


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
        baseline = _baseline_of(trial, finished, trials, files)
        if baseline is None:
            continue
        own = shown(trial, baseline)
        found = check_equivalence(trial_files, files.trial(baseline.id), _order_of(trial), own)
        write_equivalence(trial_files, found)
        if trial.id != baseline.id and not keep_tensors:
            shutil.rmtree(trial_files.weights.parent, ignore_errors=True)


def _order_of(trial: Trial) -> SampleOrder | None:
    """Return the samples that the trial's steps should have used; None for a script."""
    if trial.training.script is not None:
        return None
    from paceline.train.data.dataset import order_of  # noqa: PLC0415  (a script needs no data set)

    return order_of(trial.training)


def _baseline_of(
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
