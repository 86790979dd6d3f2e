"""Train with each batch size, with linear and square-root scaling of the learning rate.

A larger batch has fewer and faster steps, but may need more samples for the same quality. So all
trainings see the same number of samples: steps that the spec counts are scaled with the batch.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.analysis.progress import (
    last_metrics,
    progress_by_speed,
    progress_to_target,
    target_fields,
)
from paceline.analysis.reading import load_trial
from paceline.analysis.statistics import median_interval
from paceline.analysis.trial_analysis import analyse_trial
from paceline.errors import ExitCode, UsageError
from paceline.plan.planning import repeated
from paceline.runner import failure_of, run_trial
from paceline.spec.rules import first_given
from paceline.spec.workloads import workload_of
from paceline.tune.spaces import plan_one

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paceline.analysis.progress import Progress as RateProgress
    from paceline.analysis.statistics import Interval
    from paceline.analysis.trial_analysis import TrialAnalysis
    from paceline.plan.trial import Trial
    from paceline.records.layout import RunFiles
    from paceline.runner import Progress
    from paceline.spec import Experiment, TrialRequest, WorkloadRequest
    from paceline.spec.values import LearningRateScaling

SCALINGS: tuple[LearningRateScaling, ...] = ("linear", "sqrt")
# Values of [training] and [[workloads]] that are numbers of steps.
_STEP_KEYS = ("max_steps", "evaluate_every_steps", "learning_rate_warmup_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Trainings with one batch size and learning rate, over all repeats."""

    global_batch: int
    scaling: LearningRateScaling  # equal rates for the reference batch
    learning_rate: float
    repeats: int  # that trained to the end
    metrics: dict[str, float] = field(default_factory=dict)  # median at the last evaluation
    samples_per_s: Interval | None = None
    target_reached: int | None = None  # repeats; None without a target
    time_to_target_s: Interval | None = None  # None unless more than half of them reached it
    samples_to_target: float | None = None
    is_fastest: bool = False  # to the target, or not significantly slower than the fastest
    reason: str | None = None  # why it could not train


@dataclass(frozen=True, slots=True)
class Choice:
    """A batch size with a scaling of the learning rate."""

    global_batch: int
    scaling: LearningRateScaling

    @property
    def name(self) -> str:
        return f"b{self.global_batch}.{self.scaling}"


class BatchTraining:
    """The trainings of one workload and trial of a spec."""

    def __init__(
        self,
        experiment: Experiment,
        workload: WorkloadRequest,
        request: TrialRequest,
        dataset: str,
        cores: int,
    ) -> None:
        """Raises UsageError if the spec has no evaluations."""
        if first_given("held_out_samples", workload, experiment) is None:
            raise UsageError(
                f"--train: workload {workload.name} has no evaluations; add held_out_samples, and "
                "a target for the time to it"
            )
        self._experiment, self._workload, self._request = experiment, workload, request
        self._dataset, self._cores = dataset, cores
        defaults = workload_of(workload)
        usual = first_given("global_batch", workload, experiment) or defaults.global_batch
        self.usual_batch: int = usual
        self.reference_batch: int = usual
        if (first_given("learning_rate_scaling", workload, experiment) or "none") != "none":
            given = first_given("reference_batch", workload, experiment)
            self.reference_batch = given or defaults.global_batch
        self.target = self.trial(Choice(usual, SCALINGS[0])).training.target

    def choices(self, batches: Sequence[int]) -> list[Choice]:
        """Return what to train: both scalings, but one training where they are equal."""
        return [
            Choice(batch, scaling)
            for batch in sorted(set(batches))
            for scaling in (SCALINGS[:1] if batch == self.reference_batch else SCALINGS)
        ]

    def trial(self, choice: Choice) -> Trial:
        """Return the first repeat of a training."""
        factor = self.usual_batch / choice.global_batch
        update: dict[str, Any] = {
            "global_batch": choice.global_batch,
            "learning_rate_scaling": choice.scaling,
            "reference_batch": self.reference_batch,
        }
        for name in _STEP_KEYS:
            steps = first_given(name, self._workload, self._experiment)
            update[name] = None if steps is None else math.ceil(steps * factor)
        # The default excludes as many steps from the speed as a short training allows.
        off: dict[str, Any] = {"warmup_steps": None}
        general = self._experiment.training.model_copy(update=off)
        experiment = self._experiment.model_copy(update={"training": general, "tune": None})
        workload = self._workload.model_copy(update=update | off)
        planned = plan_one(experiment, workload, self._request, self._dataset, self._cores)
        telemetry = planned.telemetry.model_copy(update={"enabled": False})
        return planned.model_copy(update={"save_tensors": False, "telemetry": telemetry})

    def run(
        self,
        batches: Sequence[int],
        limit_mib: Callable[[Trial], int],
        files: RunFiles,
        progress: Progress,
    ) -> list[Trained]:
        """Train with all batch sizes, with repeats interleaved in seeded random order.

        limit_mib: returns the largest private memory of a rank of a trial.
        Raises the failure of a trial, unless its ranks needed too much memory.
        """
        trials = {choice: self._limited(choice, limit_mib) for choice in self.choices(batches)}
        done: dict[Choice, list[TrialAnalysis]] = {choice: [] for choice in trials}
        reasons: dict[Choice, str] = {}
        repeats = self._experiment.planned_repeats
        total = repeats * len(trials)
        for number, (choice, trial) in enumerate(self._in_order(trials, repeats), start=1):
            if choice in reasons:
                continue
            places = files.trial(trial.id)
            progress.trial_started(trial, places, number, total)
            outcome = run_trial(trial, places)
            progress.trial_ended(trial, outcome)
            if outcome.status == "ok":
                done[choice].append(analyse_trial(load_trial(places), None))
            elif outcome.exit_code == ExitCode.ENVIRONMENT:  # that of too little memory
                reasons[choice] = outcome.message or outcome.status
            else:
                raise failure_of(outcome)
        return summary(trials, done, reasons)

    def _limited(self, choice: Choice, limit_mib: Callable[[Trial], int]) -> Trial:
        trial = self.trial(choice)
        limits = trial.limits.model_copy(update={"rank_memory_mib": limit_mib(trial)})
        return trial.model_copy(update={"limits": limits})

    def _in_order(
        self, trials: Mapping[Choice, Trial], repeats: int
    ) -> Iterator[tuple[Choice, Trial]]:
        order = random.Random(self._experiment.seed)  # noqa: S311  (an order, not a secret)
        for repeat in range(repeats):
            block = list(trials)
            order.shuffle(block)
            for choice in block:
                trial = repeated(trials[choice], repeat, vary_seed=self._experiment.vary_seed)
                name = f"{trial.configuration}.{choice.name}.r{repeat}"
                yield choice, trial.model_copy(update={"id": name})


def summary(
    trials: Mapping[Choice, Trial],
    done: Mapping[Choice, Sequence[TrialAnalysis]],
    reasons: Mapping[Choice, str],
) -> list[Trained]:
    """Return the medians over repeats. reasons: of those that could not train."""
    found = {choice.name: repeats for choice, repeats in done.items() if choice not in reasons}
    speeds, to_target = progress_by_speed(found), progress_to_target(found)
    rows = []
    for choice, trial in trials.items():
        known: dict[str, Any] = {"reason": reasons.get(choice)}
        if choice not in reasons:
            name, repeats = choice.name, done[choice]
            fields = target_fields(name, repeats, to_target, None)
            steps = fields.get("steps_to_target")
            known = {
                "metrics": last_metrics(repeats),
                "samples_per_s": median_interval(speeds.rates[name], speeds.noises.of(name)),
                "target_reached": fields.get("target_reached"),
                "time_to_target_s": fields.get("time_to_target_s"),
                "samples_to_target": None if steps is None else steps * choice.global_batch,
            }
        rows.append(
            Trained(
                global_batch=choice.global_batch,
                scaling=choice.scaling,
                learning_rate=trial.training.learning_rate,
                repeats=0 if choice in reasons else len(done[choice]),
                **known,
            )
        )
    return _with_fastest(rows, to_target)


def _with_fastest(rows: list[Trained], to_target: RateProgress | None) -> list[Trained]:
    """Mark the fastest to the target, and those that do not differ significantly from it."""
    times = {
        Choice(row.global_batch, row.scaling).name: row.time_to_target_s.median
        for row in rows
        if row.time_to_target_s is not None
    }
    if to_target is None or not times:
        return rows
    best = min(times, key=lambda name: times[name])
    pairs = to_target.pairs(list(times), None)
    fastest = {name for name in times if name == best or pairs.is_tie(best, name)}
    return [
        replace(row, is_fastest=Choice(row.global_batch, row.scaling).name in fastest)
        for row in rows
    ]
