"""Verify a script: train a reference and other layouts, and compare what ranks observe."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from paceline.analysis.equivalence.module_calls import Kind
from paceline.analysis.equivalence.observed import LayoutFinding, judge
from paceline.analysis.equivalence.options import OptionsComparison, compared_options
from paceline.analysis.equivalence.own_checks import Level, RankFinding
from paceline.analysis.equivalence.ranks import ONE_RANK, RanksFinding, Statement, judge_ranks
from paceline.analysis.equivalence.shown import REFERENCE_SHOWN, Shown, shown
from paceline.analysis.equivalence.trained_rows import (
    changed_rows,
    judge_rows,
    later_other_step,
    words_of,
)
from paceline.base.errors import StepsDiffer
from paceline.measure.records.files import document, jsonable, write_json
from paceline.measure.records.layout import RankFiles, RunFiles, TrialFiles
from paceline.measure.records.own_steps import Observed, OwnSteps, TrainedRows
from paceline.measure.records.rows import Outcome
from paceline.plan.spec.loading import Spec
from paceline.plan.trials.trial import Alterations, Observation, Trial
from paceline.runner.trials.directory import check_run_dir, made_run_dir, only_runner
from paceline.runner.trials.planning import Planned, Progress, manifest_of
from paceline.runner.trials.preview import preflight
from paceline.runner.trials.run_trial import failure_of, run_followed, run_trial

T = TypeVar("T")

# Of a training that gives a configuration of a script its mark in a run.
_OBSERVE = Observation(reference=None, steps=4, followed_s=2.0)

REFERENCE, ROUNDED = "reference", "reference-rounded"  # trials
_ALTERED, _LAST = "altered", "last"  # end the name of a layout's trial
_MOST_LAST = 4  # steps at the end that are compared if one has other numbers of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Equalising:
    """Options that make a script equal to its reference without an edit.

    altered: in the reference and a training of each layout beside it. Ranks are checked against
    each other in a training without it, because equal seeds hide a missing broadcast.
    share: an option of the script, and its value for one process; a rank gets its share of it.
    reference: on several ranks; None: one process.
    """

    altered: Alterations | None = None
    share: tuple[str, int] | None = None
    reference: Trial | None = None

    @property
    def is_altered(self) -> bool:
        return self.altered is not None

    @property
    def unaltered(self) -> Equalising:
        return replace(self, altered=None)

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
        if altered.same_start:
            found.append("--same-start")
        if self.reference is not None:
            found.append(f"--reference-ranks {self.reference.placement.ranks}")
        return " ".join(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedLayout:
    """One way to distribute a script, and what was found.

    finding: compared with the reference. shown: by this, and by the ranks against each other.
    """

    trial: Trial
    finding: LayoutFinding
    shown: Shown
    failure: str | None = None  # the cause and the end of the log, if it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedScript:
    """All layouts of a script. options: with which they were compared with the reference."""

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
    accept: Collection[str] = (),
    *,
    last_steps: int = 0,
    progress: Progress,
) -> VerifiedScript:
    """Train the script of a spec in every layout; compare its ranks, and it with the reference.

    The number of first steps is `max_steps` of the script. last_steps: before its end, in which its
    ranks are compared with each other. accept: names of findings that are meant.
    Raises UsageError, EnvironmentLacks before anything runs; RankFailed, TimedOut if the script
    fails in one process and in every layout.
    """
    files = RunFiles(run_dir)
    check_run_dir(files, spec, resume=False)
    layouts = sorted((t for t in planned.trials if not t.is_baseline), key=lambda t: t.id)
    [baseline] = [trial for trial in planned.trials if trial.is_baseline]
    chosen = equalising.reference or baseline
    with made_run_dir(run_dir):
        preflight([*planned.trials, *([] if chosen is baseline else [chosen])])
    with only_runner(run_dir):
        write_json(files.manifest, manifest_of(planned))
        trainings = Trainings(files, progress, 1 + len(layouts) * (1 + equalising.is_altered))
        observe = Observation(
            reference=None, steps=baseline.training.max_steps or 1, last=last_steps
        )
        reference = Reference(trainings, chosen, equalising, observe)
        verified, outcomes = [], []
        for trial in layouts:
            layout, outcome = verified_layout(trainings, trial, reference, accept)
            verified.append(layout)
            outcomes.append(outcome)
    if all(each.status != "ok" for each in outcomes):
        if reference.outcome.status != "ok":
            raise failure_of(reference.outcome)
        if all(each.status == "refused" for each in outcomes):
            raise failure_of(outcomes[0])
    assert baseline.training.script is not None
    return VerifiedScript(
        script=baseline.training.script.path,
        options=equalising.words,
        layouts=tuple(verified),
    )


@dataclass(frozen=True, slots=True)
class ComparedRecords:
    """The records of the ranks of a training that are compared with those of the reference."""

    observed: list[Observed]
    rows: list[TrainedRows]

    @classmethod
    def of(cls, files: TrialFiles) -> ComparedRecords:
        return cls(_observed(files), _rows(files))


class Reference:
    """The training with which layouts are compared: of one process, or of several ranks."""

    def __init__(
        self, trainings: Trainings, trial: Trial, equalising: Equalising, observe: Observation
    ) -> None:
        """observe: the reference; all others observe the same."""
        self.equalising = equalising
        self.observe = observe.model_copy(update={"reference": REFERENCE})
        self._trainings, self._trial = trainings, trial
        self.outcome, self._files = trainings.run(_equal(trial, REFERENCE, equalising, observe))
        self._observed = _observed(self._files)
        self._rounded: list[Observed] = []
        self.rows = _rows(self._files)
        self.words = words_of(trial.placement.ranks)
        self.statement = Statement.EQUAL
        self._own: RanksFinding | None = None
        if trial.placement.ranks > 1:
            of_rows = judge_rows(self.rows)
            self._own = judge_ranks(_own_steps(self._files), observe.steps, of_rows)
            self.statement = self._own.statement

    def compared(self, layout: ComparedRecords) -> LayoutFinding:
        """Compare what the ranks of a layout observed."""
        found, trained = layout.observed, (self.rows, layout.rows)
        if self.outcome.status != "ok":
            return self.not_compared(f"{self.words} did not run: {self.outcome.reason}")
        if self._own is not None and self.statement == Statement.WRONG:
            reason = self._own.findings[0].reason
            return self.not_compared(f"{self.words} train wrong themselves: {reason}", "none")
        finding = judge(self._observed, self._rounded, found, trained)
        if finding.passed is False and not self._rounded:
            # Roundings only widen the limits, so a layout that agrees needs no such training.
            again = self.observe.model_copy(update={"last": 0, "rounded": True})
            rounded = _equal(self._trial, ROUNDED, self.equalising, again)
            self._rounded = _observed(self._trainings.finished(rounded))
            finding = judge(self._observed, self._rounded, found, trained)
        return finding

    def options(self, layout: ComparedRecords) -> OptionsComparison:
        """Compare the options of a layout's optimisers with those of the reference."""
        return compared_options(self._observed, layout.observed, (self.rows, layout.rows))

    def changed_rows(self, layout: ComparedRecords) -> list[RankFinding]:
        """Find rows of a layout that are none of the reference's."""
        return changed_rows((layout.rows, layout.observed), (self.rows, self._observed))

    def not_compared(self, reason: str, kind: Kind = "not-run") -> LayoutFinding:
        return LayoutFinding(passed=None, reason=reason, kind=kind, reference=self.words)


def verified_layout(
    trainings: Trainings, trial: Trial, reference: Reference, accept: Collection[str] = ()
) -> tuple[VerifiedLayout, Outcome]:
    """Train a layout, and return what is shown of it, and its end."""
    equalising = reference.equalising
    observe = reference.observe
    outcome, own = trainings.run(_equal(trial, trial.id, equalising.unaltered, observe))
    compared = own
    if equalising.is_altered and outcome.status == reference.outcome.status == "ok":
        altered = _equal(trial, f"{trial.id}.{_ALTERED}", equalising, observe)
        outcome, compared = trainings.run(altered)
    seen = ComparedRecords.of(own)
    equal = seen if compared is own else ComparedRecords.of(compared)
    if outcome.status == "ok":
        finding = reference.compared(equal)
    else:
        finding = reference.not_compared("the training of the ranks failed", "none")
    of_rows = judge_rows(seen.rows, () if equalising.is_altered else reference.rows)
    if not of_rows and equal is not seen:
        of_rows = judge_rows(equal.rows, reference.rows)
    of_rows = of_rows or reference.changed_rows(equal)
    ranks = ONE_RANK
    if trial.placement.ranks > 1:
        options = reference.options(seen)
        ranks = judge_ranks(_own_steps(own), observe.steps, of_rows, options)
        if outcome.status == "ok" and ranks.statement < Statement.NOT_SHOWN:
            ranks = _with_other_step(trainings, trial, reference, seen.rows, of_rows, ranks)
    if outcome.status != "ok":
        ranks = ranks.beside(_of_failure(outcome))
    found = shown(finding, ranks, reference.statement, equalising.words, accept)
    layout = VerifiedLayout(trial=trial, finding=finding, shown=found, failure=outcome.message)
    return layout, outcome


def _with_other_step(
    trainings: Trainings,
    trial: Trial,
    reference: Reference,
    rows: Sequence[TrainedRows],
    of_rows: Sequence[RankFinding],
    ranks: RanksFinding,
) -> RanksFinding:
    """Judge the ranks in a later step, too, if it has other numbers of rows than the first ones.

    A step that is not near the end is only named. rows: of its ranks. ranks: what the first steps
    show.
    """
    observe = reference.observe
    found = later_other_step(rows, observe.steps)
    if found is None or observe.last >= found[1]:
        return ranks
    step, last = found
    if last <= _MOST_LAST and all(each.is_whole for each in rows):
        to_the_end = observe.model_copy(update={"last": last})
        again = _equal(trial, f"{trial.id}.{_LAST}", reference.equalising.unaltered, to_the_end)
        outcome, files = trainings.run(again)
        if outcome.status == "ok":
            options = reference.options(ComparedRecords.of(files))
            return judge_ranks(_own_steps(files), observe.steps, of_rows, options)
    reason = (
        f"step {step + 1} has other numbers of rows than the first ones, and was not compared; "
        "--steps would"
    )
    return ranks.beside(RankFinding(level=Level.REMARK, kind="later-rows", reason=reason))


def _of_failure(outcome: Outcome) -> RankFinding:
    """Return what the end of a training that failed shows: steps that agree are not all."""
    if outcome.error is not None and outcome.error.kind == StepsDiffer.__name__:
        return RankFinding(level=Level.FAULT, kind="counts", reason=outcome.error.message)
    reason = f"the training failed: {outcome.reason}"
    return RankFinding(level=Level.NOT_SHOWN, kind="failed", reason=reason)


def _equal(trial: Trial, name: str, equalising: Equalising, observation: Observation) -> Trial:
    """Return the trial under a name, so that it can be equal to its reference."""
    equal = verified_trial(trial, name, altered=equalising.altered, observe=observation)
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


class ScriptMarks:
    """Statements of `paceline verify` on the configurations of scripts in a run.

    Each configuration trains a few steps for it, beside its measured trials. What is shown is kept
    in the run directory, and serves all repeats.
    """

    def __init__(self, files: RunFiles, progress: Progress) -> None:
        self._files, self._progress = files, progress
        self._references: dict[str, Reference] = {}  # by workload

    def shown(self, trial: Trial, baseline: Trial) -> Shown | None:
        """Return what is shown of a finished trial; None if it trains no script."""
        if trial.training.script is None:
            return None
        if trial.is_baseline:
            return REFERENCE_SHOWN
        workload = trial.training.workload
        file = self._files.verified(workload).trial(trial.configuration).shown
        found = document(file, Shown)
        if found is None:
            trainings = _MarkTrainings(self._files.verified(workload), self._progress)
            if workload not in self._references:
                self._references[workload] = Reference(
                    trainings, _short(baseline), Equalising(), _OBSERVE
                )
            layout, _ = verified_layout(trainings, _short(trial), self._references[workload])
            found = layout.shown
            write_json(file, jsonable(found))
        return found

    def remove_tensors(self) -> None:
        """Remove the tensors with which configurations were compared."""
        for workload in self._references:
            for _, trial_files in self._files.verified(workload).trials():
                shutil.rmtree(trial_files.tensors, ignore_errors=True)


class _MarkTrainings(Trainings):
    """Trainings between the trials of a run, which are no trials of it."""

    def __init__(self, files: RunFiles, progress: Progress) -> None:
        super().__init__(files, progress, 0)

    def run(self, trial: Trial) -> tuple[Outcome, TrialFiles]:
        """Run a training, in place of an earlier one, and return its end and its files."""
        files = self._files.trial(trial.id)
        shutil.rmtree(files.root, ignore_errors=True)
        self._progress.stage(f"verify {trial.id}")
        return run_trial(trial, files), files


def _short(trial: Trial) -> Trial:
    """Return a trial of a few steps, which is not measured."""
    steps = min(trial.training.max_steps or _OBSERVE.steps, _OBSERVE.steps)
    return trial.model_copy(
        update={
            "id": trial.configuration,
            "training": trial.training.model_copy(update={"max_steps": steps}),
            "telemetry": trial.telemetry.model_copy(update={"enabled": False}),
        }
    )
