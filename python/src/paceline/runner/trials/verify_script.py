"""Verify a script: train it in one process and in other layouts, and compare what ranks observe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.analysis.equivalence.observed import LayoutFinding, judge
from paceline.measure.records.files import document, write_json
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.observed import Observed
from paceline.measure.records.rows import Outcome
from paceline.plan.spec import Spec
from paceline.plan.trials.trial import Observation, Trial
from paceline.runner.trials.directory import check_run_dir, made_run_dir, only_runner
from paceline.runner.trials.experiment import preflight
from paceline.runner.trials.planning import Planned, Progress, manifest_of
from paceline.runner.trials.run_trial import failure_of, run_followed

REFERENCE, ROUNDED = "reference", "reference-rounded"  # trials


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedLayout:
    """One way to distribute a script, and what was found."""

    trial: Trial
    finding: LayoutFinding


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedScript:
    """All layouts of a script, compared with one process."""

    script: str
    layouts: tuple[VerifiedLayout, ...]

    @property
    def passed(self) -> bool | None:
        """True if all layouts train the same, False if one does not, None if one is unknown."""
        found = [each.finding.passed for each in self.layouts]
        return False if False in found else None if None in found else True


class _Runs:
    """The trials of one verification, which run one after the other."""

    def __init__(self, files: RunFiles, progress: Progress, total: int) -> None:
        """total: of the trainings that are certain."""
        self._files, self._progress, self._total = files, progress, total
        self._done = 0

    def observed(self, trial: Trial, observation: Observation) -> tuple[Outcome, list[Observed]]:
        """Run a trial, and return what its ranks observed."""
        trial, files = _observing(trial, observation), self._files.trial(trial.id)
        self._done += 1
        self._total = max(self._total, self._done)
        outcome = run_followed(trial, files, self._progress, self._done, self._total)
        return outcome, _read(files)

    def reference(self, trial: Trial, name: str, observation: Observation) -> list[Observed]:
        """Run one process. Raises RankFailed or TimedOut if it fails."""
        outcome, found = self.observed(trial.model_copy(update={"id": name}), observation)
        if outcome.status != "ok":
            raise failure_of(outcome)
        return found


def verify_script(
    spec: Spec,
    planned: Planned,
    run_dir: Path,
    *,
    progress: Progress,
) -> VerifiedScript:
    """Train the script of a spec in every layout, and compare each with one process.

    The number of steps is `max_steps` of the script. Raises UsageError, EnvironmentLacks before
    anything runs; RankFailed, TimedOut if the reference fails.
    """
    files = RunFiles(run_dir)
    check_run_dir(files, spec, resume=False)
    layouts = sorted((t for t in planned.trials if not t.is_baseline), key=lambda t: t.id)
    [baseline] = [trial for trial in planned.trials if trial.is_baseline]
    with made_run_dir(run_dir):
        preflight(planned.trials)
    with only_runner(run_dir):
        write_json(files.manifest, manifest_of(planned))
        runs = _Runs(files, progress, 1 + len(layouts))
        reference = runs.reference(baseline, REFERENCE, Observation(reference=None))
        rounded: list[Observed] = []
        verified = []
        for trial in layouts:
            outcome, found = runs.observed(trial, Observation(reference=REFERENCE))
            finding = LayoutFinding(passed=None, reason=f"it did not run: {outcome.message}")
            if outcome.status == "ok":
                finding = judge(reference, rounded, found)
            if finding.passed is False and not rounded:
                # Roundings only widen the limits, so a layout that agrees needs no such training.
                again = Observation(reference=REFERENCE, rounded=True)
                rounded = runs.reference(baseline, ROUNDED, again)
                finding = judge(reference, rounded, found)
            verified.append(VerifiedLayout(trial=trial, finding=finding))
    assert baseline.training.script is not None
    return VerifiedScript(script=baseline.training.script.path, layouts=tuple(verified))


def _observing(trial: Trial, observation: Observation) -> Trial:
    script = trial.training.script
    assert script is not None
    training = trial.training.model_copy(
        update={"script": script.model_copy(update={"observe": observation})}
    )
    return trial.model_copy(update={"training": training, "save_tensors": False})


def _read(files: TrialFiles) -> list[Observed]:
    found = (document(rank.observed, Observed) for _, rank in files.ranks())
    return [each for each in found if each is not None]
