"""Find the largest global batch of each configuration that fits into memory.

The memory model predicts it. Short trials check the prediction. Their ranks are not given more
private memory than the bound allows, so a batch that does not fit ends with an error of the rank,
and neither the machine nor a control group runs out of memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.analysis.reading import load_trial
from paceline.analysis.speeds import trial_speed
from paceline.data.dataset import open_dataset
from paceline.errors import EnvironmentLacks, ExitCode, UsageError
from paceline.host.machine import usable_cores
from paceline.host.memory import available_bytes
from paceline.records.files import jsonable, read_json, write_json
from paceline.records.layout import RunFiles
from paceline.runner import (
    Planned,
    check_run_dir,
    failure_of,
    made_run_dir,
    make_datasets,
    manifest_of,
    only_runner,
    preflight,
    run_trial,
)
from paceline.spec.evaluation import EVALUATION_KEYS
from paceline.spec.own_task import workload_of
from paceline.spec.rules import first_given
from paceline.spec.trial_rules import applies
from paceline.tune.batch.prediction import (
    MIB,
    batch_that_fits,
    predict_memory,
    rank_limit_mib,
)
from paceline.tune.batch.training import BatchTraining, Trained
from paceline.tune.spaces import plan_one

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.plan.trial import Trial
    from paceline.runner import Progress
    from paceline.spec import Experiment, Spec, TrialRequest, WorkloadRequest
    from paceline.spec.evaluation import Target
    from paceline.tune.batch.prediction import Predicted

SCHEMA = 1
_STEPS, _WARMUP_STEPS = 4, 1
_USED = 0.8  # of the available memory, if no bound is given
_SHRINK = 0.85  # of a batch that does not fit
_MOST_PROBES = 4  # for the largest batch
_SIZES = 3  # batch sizes whose speed is measured, each half of the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A short trial with one batch size."""

    global_batch: int
    predicted_bytes: int
    measured_bytes: int | None = None  # None: it did not fit
    samples_per_s: float | None = None
    reason: str | None = None  # why it did not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFinding:
    """Result for one configuration."""

    workload: str
    configuration: str
    largest_batch: int | None  # that was measured to fit
    limited_by: str  # "memory", or "samples" of the data set
    probes: list[Probe] = field(default_factory=list)  # by batch size
    target: Target | None = None  # of the trainings
    trained: list[Trained] = field(default_factory=list)  # by batch size, with --train


def bound_of(memory_mib: int | None) -> int:
    """Return the memory that the ranks of a trial may use, in bytes.

    Raises EnvironmentLacks if the machine does not have the requested memory.
    """
    free = available_bytes()
    if memory_mib is None:
        return int(_USED * free)
    if memory_mib * MIB > free:
        raise EnvironmentLacks(
            f"--memory: expected at most the {free // MIB} MiB that are available now, got "
            f"{memory_mib}"
        )
    return memory_mib * MIB


def tune_batch(
    spec: Spec, run_dir: Path, *, memory_mib: int | None, trains: bool = False, progress: Progress
) -> list[BatchFinding]:
    """Search for all trials of the spec; write `batch.json` into `run_dir`.

    memory_mib: bound for the ranks of a trial; None: a part of what is available. trains: train
    with the batch sizes that fit, too.
    Raises UsageError for trials on several nodes, or for `trains` without evaluations,
    EnvironmentLacks before anything runs.
    """
    files = RunFiles(run_dir)
    check_run_dir(files, spec, resume=False)
    experiment, bound = spec.experiment, bound_of(memory_mib)
    if any(request.nodes > 1 for request in experiment.trials):
        raise UsageError("tune batch: expected trials on one node, whose memory it can measure")
    pairs = [
        (workload, request)
        for workload in experiment.workloads
        for request in experiment.trials
        if applies(request, workload) and workload.script is None
    ]
    if not pairs:
        raise UsageError("tune batch: expected a workload whose batch it can change, got scripts")
    with made_run_dir(run_dir):
        datasets = make_datasets(experiment, progress)
        searches = [
            _Search(experiment, workload, request, datasets, bound) for workload, request in pairs
        ]
        preflight(search.trial(search.usual_batch) for search in searches)
        trainings = [search.training() for search in searches] if trains else []
    with only_runner(run_dir):
        trials = [search.trial(search.usual_batch) for search in searches]
        planned = Planned(
            experiment=experiment, spec_text=spec.text, datasets=dict(datasets), trials=trials
        )
        write_json(files.manifest, manifest_of(planned))
        found = [search.run(files, progress) for search in searches]
        if trains:
            found = [
                search.train(training, each, files, progress)
                for search, training, each in zip(searches, trainings, found, strict=True)
            ]
        result = {"schema": SCHEMA, "bound_bytes": bound, "found": found}
        write_json(files.batch, jsonable(result))
    return found


class _Search:
    """The search for one workload and trial."""

    def __init__(
        self,
        experiment: Experiment,
        workload: WorkloadRequest,
        request: TrialRequest,
        datasets: Mapping[str, str],
        bound: int,
    ) -> None:
        self._experiment, self._workload, self._request = experiment, workload, request
        self._bound = bound
        self._dataset = datasets.get(workload.name, "")
        off: dict[str, Any] = dict.fromkeys(EVALUATION_KEYS)
        training = experiment.training.model_copy(update=off)
        self._short = experiment.model_copy(update={"training": training, "tune": None})
        self._cores = usable_cores()
        self.usual_batch = self.trial(None).training.global_batch
        self._replicas = self.trial(None).placement.replicas

    def trial(self, batch: int | None) -> Trial:
        """Return the short trial with this batch; None: that of the spec."""
        update: dict[str, Any] = dict.fromkeys(EVALUATION_KEYS) | {
            "max_steps": _STEPS,
            "warmup_steps": _WARMUP_STEPS,
            "epochs": _STEPS,  # an epoch has a step at least
        }
        if batch is not None:
            update["global_batch"] = batch
        workload = self._workload.model_copy(update=update)
        planned = plan_one(self._short, workload, self._request, self._dataset, self._cores)
        telemetry = planned.telemetry.model_copy(update={"enabled": False})
        name = f"{planned.configuration}.b{planned.training.global_batch}"
        return planned.model_copy(
            update={"id": name, "save_tensors": False, "telemetry": telemetry}
        )

    def run(self, files: RunFiles, progress: Progress) -> BatchFinding:
        """Predict, then measure the largest batch and smaller ones."""
        batch, limited_by = self._predicted_batch()
        probes: list[Probe] = []
        while batch and len(probes) < _MOST_PROBES:
            probes.append(self._probe(batch, files, progress))
            if probes[-1].measured_bytes is not None:
                break
            batch, limited_by = self._rounded(_SHRINK * batch), "memory"
        fits = bool(probes) and probes[-1].measured_bytes is not None
        largest = probes[-1].global_batch if fits else None
        for part in range(1, _SIZES if largest else 0):
            smaller = self._rounded((largest or 0) / 2**part)
            if smaller and smaller not in {p.global_batch for p in probes}:
                probes.append(self._probe(smaller, files, progress))
        return BatchFinding(
            workload=self._workload.name,
            configuration=self.trial(None).configuration,
            largest_batch=largest,
            limited_by=limited_by,
            probes=sorted(probes, key=lambda p: p.global_batch),
        )

    def training(self) -> BatchTraining:
        """Return the trainings with other batch sizes. Raises UsageError if one is not possible."""
        return BatchTraining(
            self._experiment, self._workload, self._request, self._dataset, self._cores
        )

    def train(
        self, training: BatchTraining, found: BatchFinding, files: RunFiles, progress: Progress
    ) -> BatchFinding:
        """Train with the batch sizes that were measured to fit, and with that of the spec."""
        if found.largest_batch is None:
            return found
        held_out = first_given("held_out_samples", self._workload, self._experiment) or 0
        most = min(found.largest_batch, self._rounded(self._samples() - held_out))
        fitting = [p.global_batch for p in found.probes if p.measured_bytes is not None]
        batches = [min(most, batch) for batch in [*fitting, training.usual_batch]]

        def limit_mib(trial: Trial) -> int:
            return rank_limit_mib(self._predicted(trial), self._bound)

        return replace(
            found,
            target=training.target,
            trained=training.run(batches, limit_mib, files, progress),
        )

    def _predicted_batch(self) -> tuple[int, str]:
        """Return the largest batch that fits into memory, and what limits it."""
        samples = self._samples()
        batches = sorted({self._rounded(min(self.usual_batch, samples)), self._rounded(samples)})
        low, *others = predict_memory(self.trial(None), batches)
        high = others[0] if others else low
        if high.total <= self._bound:
            return high.global_batch, "samples"
        if not others:
            return self._rounded(low.global_batch / 2), "memory"
        return self._rounded(batch_that_fits(low, high, self._bound)), "memory"

    def _probe(self, batch: int, files: RunFiles, progress: Progress) -> Probe:
        trial = self.trial(batch)
        predicted = self._predicted(trial)
        limit = rank_limit_mib(predicted, self._bound)
        limits = trial.limits.model_copy(update={"rank_memory_mib": limit})
        trial = trial.model_copy(update={"limits": limits})
        places = files.trial(trial.id)
        progress.trial_started(trial, places, 1, 1)
        outcome = run_trial(trial, places)
        progress.trial_ended(trial, outcome)
        if outcome.status != "ok":
            if outcome.exit_code != ExitCode.ENVIRONMENT:  # that of too little memory
                raise failure_of(outcome)
            reason = outcome.message or outcome.status
            return Probe(global_batch=batch, predicted_bytes=predicted.total, reason=reason)
        measured = [read_json(rank.memory) for _, rank in places.ranks()]
        total = sum(m["peak_private_bytes"] + m["shared_bytes"] for m in measured)
        speed = trial_speed(load_trial(places))
        fits = total <= self._bound
        return Probe(
            global_batch=batch,
            predicted_bytes=predicted.total,
            measured_bytes=total if fits else None,
            samples_per_s=None if speed is None or not fits else math.exp(speed.log_median),
            reason=None if fits else f"needed {total // MIB} MiB",
        )

    @staticmethod
    def _predicted(trial: Trial) -> Predicted:
        [found] = predict_memory(trial, [trial.training.global_batch])
        return found

    def _samples(self) -> int:
        if not self._dataset:
            return workload_of(self._workload).facts().items or 1
        return sum(open_dataset(self._dataset).row_group_rows)

    def _rounded(self, batch: float) -> int:
        """Return the largest multiple of the number of replicas that is not above `batch`."""
        return int(batch) // self._replicas * self._replicas
