"""Verify a script: train it in one process and in other layouts, and compare what ranks observe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.analysis.equivalence.observed import LayoutFinding, judge
from paceline.analysis.equivalence.ranks import Statement, judge_ranks
from paceline.analysis.equivalence.shown import Shown, shown
from paceline.analysis.equivalence.trained_rows import judge_rows
from paceline.measure.records.files import document, write_json
from paceline.measure.records.layout import RankFiles, RunFiles, TrialFiles
from paceline.measure.records.observed import Observed
from paceline.measure.records.own_steps import OwnSteps, TrainedRows
from paceline.measure.records.rows import Outcome
from paceline.plan.spec import Spec
from paceline.plan.trials.trial import Alterations, Observation, Trial
from paceline.runner.trials.directory import check_run_dir, made_run_dir, only_runner
from paceline.runner.trials.experiment import preflight
from paceline.runner.trials.planning import Planned, Progress, manifest_of
from paceline.runner.trials.run_trial import failure_of, run_followed

T = TypeVar("T")

REFERENCE, ROUNDED = "reference", "reference-rounded"  # trials
_ALTERED = "altered"  # ends the name of a layout's trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Equalising:
    """Options that make a script equal to one process without an edit.

    altered: in the one process and a training of each layout beside it. Ranks are checked against
    each other in a training without it, because equal seeds hide a missing broadcast.
    share: an option of the script, and its value for one process; a rank gets its share of it.
    """

    altered: Alterations | None = None
    share: tuple[str, int] | None = None

    def arguments(self, trial: Trial) -> tuple[str, ...]:
        """Return the arguments of a trial, with its share. Its ranks must divide the value."""
        if self.share is None:
            return trial.arguments
        option, value = self.share
        return (*trial.arguments, f"{option}={value // trial.placement.ranks}")

    @property
    def words(self) -> str:
        """Return the options as the user types them."""
        altered, found = self.altered or Alterations(), []
        if altered.seed is not None:
            found.append(f"--seed {altered.seed}")
        if altered.no_dropout:
            found.append("--no-dropout")
        if self.share is not None:
            option, value = self.share
            found.append(f"--share {option}={value}")
        return " ".join(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedLayout:
    """One way to distribute a script, and what was found.

    finding: compared with one process. shown: by this, and by the ranks against each other.
    """

    trial: Trial
    finding: LayoutFinding
    shown: Shown
    failure: str | None = None  # the cause and the end of the log, if it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedScript:
    """All layouts of a script. options: with which they were compared with one process."""

    script: str
    options: str
    layouts: tuple[VerifiedLayout, ...]

    @property
    def statement(self) -> Statement:
        """Return the statement that is true of all layouts."""
        return max(each.shown.statement for each in self.layouts)


class Trainings:
    """The trainings of one verification, which run one after the other."""

    def __init__(self, files: RunFiles, progress: Progress, total: int) -> None:
        """total: of the trainings that are certain."""
        self._files, self._progress, self._total = files, progress, total
        self._done = 0

    def run(self, trial: Trial) -> tuple[Outcome, TrialFiles]:
        """Run a trial, and return its end and its files."""
        files = self._files.trial(trial.id)
        self._done += 1
        self._total = max(self._total, self._done)
        return run_followed(trial, files, self._progress, self._done, self._total), files

    def finished(self, trial: Trial) -> TrialFiles:
        """Run a trial to its good end. Raises RankFailed or TimedOut if it fails."""
        outcome, files = self.run(trial)
        if outcome.status != "ok":
            raise failure_of(outcome)
        return files


def verify_script(
    spec: Spec,
    planned: Planned,
    run_dir: Path,
    equalising: Equalising,
    *,
    progress: Progress,
) -> VerifiedScript:
    """Train the script of a spec in every layout; compare its ranks, and it with one process.

    The number of steps is `max_steps` of the script. Raises UsageError, EnvironmentLacks before
    anything runs; RankFailed, TimedOut if the script fails in one process and in every layout.
    """
    files = RunFiles(run_dir)
    check_run_dir(files, spec, resume=False)
    layouts = sorted((t for t in planned.trials if not t.is_baseline), key=lambda t: t.id)
    steps = planned.trials[0].training.max_steps or 1
    [baseline] = [trial for trial in planned.trials if trial.is_baseline]
    with made_run_dir(run_dir):
        preflight(planned.trials)
    with only_runner(run_dir):
        write_json(files.manifest, manifest_of(planned))
        is_altered = equalising.altered is not None
        trainings = Trainings(files, progress, 1 + len(layouts) * (1 + is_altered))
        observe = Observation(reference=None, steps=steps)
        one_process = _equal(baseline, REFERENCE, equalising)
        alone, alone_files = trainings.run(_observing(one_process, observe))
        reference = _observed(alone_files)
        rounded: list[Observed] = []
        failed, verified = [], []
        for trial in layouts:
            observe = Observation(reference=REFERENCE, steps=steps)
            layout = trial.model_copy(update={"arguments": equalising.arguments(trial)})
            outcome, plain_files = trainings.run(_observing(layout, observe))
            layout_files = plain_files
            if is_altered and outcome.status == "ok" and alone.status == "ok":
                layout = _equal(trial, f"{trial.id}.{_ALTERED}", equalising)
                outcome, layout_files = trainings.run(_observing(layout, observe))
            found = _observed(layout_files)
            if outcome.status != "ok":
                failed.append(outcome)
                finding = _not_compared(f"it did not run: {outcome.reason}")
            elif alone.status != "ok":
                finding = _not_compared(f"one process did not run: {alone.reason}")
            else:
                finding = judge(reference, rounded, found)
            if finding.passed is False and not rounded:
                # Roundings only widen the limits, so a layout that agrees needs no such training.
                again = Observation(reference=REFERENCE, steps=steps, rounded=True)
                one_process = _equal(baseline, ROUNDED, equalising)
                rounded = _observed(trainings.finished(_observing(one_process, again)))
                finding = judge(reference, rounded, found)
            of_rows = judge_rows(_rows(plain_files), None) if is_altered else []
            if not of_rows and (not is_altered or layout_files is not plain_files):
                of_rows = judge_rows(_rows(layout_files), next(iter(_rows(alone_files)), None))
            ranks = judge_ranks(_own_steps(plain_files), steps, of_rows)
            verified.append(
                VerifiedLayout(
                    trial=trial,
                    finding=finding,
                    shown=shown(finding, ranks),
                    failure=outcome.message,
                )
            )
    if len(failed) == len(verified):
        if alone.status != "ok":
            raise failure_of(alone)
        if all(each.status == "refused" for each in failed):
            raise failure_of(failed[0])
    assert baseline.training.script is not None
    return VerifiedScript(
        script=baseline.training.script.path,
        options=equalising.words,
        layouts=tuple(verified),
    )


def _not_compared(reason: str) -> LayoutFinding:
    return LayoutFinding(passed=None, reason=reason)


def _observing(trial: Trial, observation: Observation) -> Trial:
    return verified_trial(trial, trial.id, observe=observation)


def _equal(trial: Trial, name: str, equalising: Equalising) -> Trial:
    """Return the trial under a name, so that it can be equal to one process."""
    equal = verified_trial(trial, name, altered=equalising.altered)
    return equal.model_copy(update={"arguments": equalising.arguments(trial)})


def verified_trial(trial: Trial, name: str, **changes: Any) -> Trial:
    """Return the trial under a name, with other values of its script, without kept weights."""
    script = trial.training.script
    assert script is not None
    training = trial.training.model_copy(update={"script": script.model_copy(update=changes)})
    return trial.model_copy(update={"id": name, "training": training, "save_tensors": False})


def _observed(files: TrialFiles) -> list[Observed]:
    return rank_documents(files, lambda rank: rank.observed, Observed)


def rank_documents(
    files: TrialFiles, file_of: Callable[[RankFiles], Path], kind: type[T]
) -> list[T]:
    """Return what the ranks of a trial recorded in a file; ranks without it are left out."""
    found = (document(file_of(rank), kind) for _, rank in files.ranks())
    return [each for each in found if each is not None]


def _own_steps(files: TrialFiles) -> list[OwnSteps]:
    return rank_documents(files, lambda rank: rank.own_steps, OwnSteps)


def _rows(files: TrialFiles) -> list[TrainedRows]:
    return rank_documents(files, lambda rank: rank.trained_rows, TrainedRows)
