"""Find the largest global batch of each configuration that fits into memory.

Short trials measure it: from a small batch on, each batch is twice the one before, until the line
through the last two measurements meets the bound. Ranks are not given more private memory than the
bound allows, so a batch that does not fit ends with an error of the rank, and neither the machine
nor a control group runs out of memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.analysis.between_runs.speeds import trial_speed
from paceline.analysis.trial.reading import load_trial
from paceline.base.errors import EnvironmentLacks, ExitCode, UsageError
from paceline.base.host.machine import usable_cores
from paceline.collectives.host import available_bytes
from paceline.measure.records.files import fields_of, read_json, write_json
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.loading import Spec
from paceline.plan.spec.models import Experiment, TrialRequest, WorkloadRequest
from paceline.plan.spec.rules.trial import applies
from paceline.plan.spec.values import EVALUATION_KEYS
from paceline.plan.spec.workloads import workload_of
from paceline.plan.trials.trial import Trial
from paceline.runner.trials.directory import check_run_dir, made_run_dir, only_runner
from paceline.runner.trials.planning import Planned, Progress, make_datasets, manifest_of
from paceline.runner.trials.preview import preflight
from paceline.runner.trials.run_trial import failure_of, run_followed
from paceline.runner.tune.spaces import check_batches, plan_one
from paceline.train.data.dataset import open_dataset

SCHEMA = 2
_MIB = 2**20
_STEPS, _WARMUP_STEPS = 4, 1
_USED = 0.8  # of the available memory, if no bound is given
_FIRST = 1 / 4  # of the usual batch
_CLOSE = 1.05  # a batch that is larger by less than this factor is not worth a trial
_MOST_PROBES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProbe:
    """A short trial with one batch size."""

    global_batch: int
    private_bytes: list[int] = field(default_factory=list)  # of each rank
    shared_bytes: int = 0
    fits: bool = True
    samples_per_s: float | None = None
    reason: str | None = None  # why it did not fit

    @property
    def measured_bytes(self) -> int:
        """Peak memory of all ranks; 0 if a rank failed before the end."""
        return sum(self.private_bytes) + self.shared_bytes

    def to_json(self) -> dict[str, Any]:
        return {
            "global_batch": self.global_batch,
            "measured_bytes": self.measured_bytes or None,
            "fits": self.fits,
            "samples_per_s": self.samples_per_s,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFinding:
    """Result for one configuration."""

    workload: str
    configuration: str
    largest_batch: int | None  # that was measured to fit
    limited_by: str  # "memory", or "samples" of the data set
    probes: list[BatchProbe] = field(default_factory=list)  # by batch size


class BatchSearch:
    """The next batch to measure, from the batches that were measured."""

    def __init__(self, usual: int, most: int, replicas: int, bound_bytes: int) -> None:
        """most: largest batch of the data set. Batches are multiples of `replicas`."""
        self._replicas = replicas
        self._bound_bytes = bound_bytes
        self.most = self._rounded(most)
        self._first = self._rounded(min(usual * _FIRST, most)) or replicas
        self.probes: list[BatchProbe] = []

    @property
    def largest(self) -> BatchProbe | None:
        """The largest batch that fits."""
        fitting = [probe for probe in self.probes if probe.fits]
        return max(fitting, key=lambda probe: probe.global_batch, default=None)

    def next_batch(self) -> int | None:
        """Return the next batch to measure; None if the largest is found."""
        if self.most == 0 or len(self.probes) >= _MOST_PROBES:
            return None
        if not self.probes:
            return self._first
        largest = self.largest
        too_large = min(
            (probe.global_batch for probe in self.probes if not probe.fits), default=None
        )
        if largest is None:
            smaller = self._rounded(self.probes[-1].global_batch / 2)
            return smaller or None
        wanted = min(2 * largest.global_batch, self._estimate(), self.most)
        if too_large is not None:
            wanted = min(wanted, (largest.global_batch + too_large) / 2)
        batch = self._rounded(wanted)
        is_last = batch == self.most and batch > largest.global_batch
        return batch if is_last or batch > _CLOSE * largest.global_batch else None

    def rank_limit_mib(self) -> int:
        """Return the limit of the private memory of each rank.

        Ranks need different amounts. So each may use the part that the rank with the largest need
        has had of the bound, less shared memory. Nothing is known before the first trial.
        """
        largest = self.largest
        if largest is None:
            return max(1, self._bound_bytes // _MIB)
        room = max(0, self._bound_bytes - largest.shared_bytes)
        return max(1, room * max(largest.private_bytes) // sum(largest.private_bytes) // _MIB)

    def _estimate(self) -> float:
        """Return the largest batch on the line through the two largest that fit."""
        fitting = sorted(
            (probe for probe in self.probes if probe.fits), key=lambda probe: probe.global_batch
        )
        if len(fitting) == 1:
            return math.inf
        low, high = fitting[-2:]
        per_sample = (high.measured_bytes - low.measured_bytes) / (
            high.global_batch - low.global_batch
        )
        if per_sample <= 0:
            return math.inf
        return high.global_batch + (self._bound_bytes - high.measured_bytes) / per_sample

    def _rounded(self, batch: float) -> int:
        """Return the largest multiple of the number of replicas that is not above `batch`."""
        return int(batch) // self._replicas * self._replicas


def bound_of(memory_mib: int | None) -> int:
    """Return the memory that the ranks of a trial may use, in bytes.

    Raises EnvironmentLacks if the machine does not have the requested memory.
    """
    free = available_bytes()
    if memory_mib is None:
        return int(_USED * free)
    if memory_mib * _MIB > free:
        raise EnvironmentLacks(
            f"--memory: expected at most the {free // _MIB} MiB that are available now, got "
            f"{memory_mib}"
        )
    return memory_mib * _MIB


def tune_batch(
    spec: Spec, run_dir: Path, *, memory_mib: int | None, progress: Progress
) -> list[BatchFinding]:
    """Search for all trials of the spec; write `batch.json` into `run_dir`.

    memory_mib: bound for the ranks of a trial; None: a part of what is available.
    Raises UsageError for trials on several nodes, EnvironmentLacks before anything runs.
    """
    files = RunFiles(run_dir)
    check_run_dir(files, spec, resume=False)
    experiment, bound = spec.experiment, bound_of(memory_mib)
    check_batches(experiment, "tune batch")
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
            _TrialSearch(experiment, workload, request, datasets, bound)
            for workload, request in pairs
        ]
        preflight(search.trial(search.usual_batch) for search in searches)
    with only_runner(run_dir):
        trials = [search.trial(search.usual_batch) for search in searches]
        planned = Planned(
            experiment=experiment, spec_text=spec.text, datasets=dict(datasets), trials=trials
        )
        write_json(files.manifest, manifest_of(planned))
        found = [search.run(files, progress) for search in searches]
        rows = [
            {**fields_of(each), "probes": [probe.to_json() for probe in each.probes]}
            for each in found
        ]
        write_json(files.batch, {"schema": SCHEMA, "bound_bytes": bound, "found": rows})
    return found


class _TrialSearch:
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
        """Measure batches until the largest that fits is found."""
        search = BatchSearch(self.usual_batch, self._samples(), self._replicas, self._bound)
        while (batch := search.next_batch()) is not None:
            search.probes.append(self._probe(batch, search.rank_limit_mib(), files, progress))
        largest = search.largest
        batch = None if largest is None else largest.global_batch
        return BatchFinding(
            workload=self._workload.name,
            configuration=self.trial(None).configuration,
            largest_batch=batch,
            limited_by="samples" if batch == search.most else "memory",
            probes=sorted(search.probes, key=lambda probe: probe.global_batch),
        )

    def _probe(self, batch: int, limit_mib: int, files: RunFiles, progress: Progress) -> BatchProbe:
        trial = self.trial(batch)
        limits = trial.limits.model_copy(update={"rank_memory_mib": limit_mib})
        trial = trial.model_copy(update={"limits": limits})
        places = files.trial(trial.id)
        outcome = run_followed(trial, places, progress, 1, 1)
        if outcome.status != "ok":
            if outcome.exit_code != ExitCode.ENVIRONMENT:  # that of too little memory
                raise failure_of(outcome)
            return BatchProbe(
                global_batch=batch, fits=False, reason=outcome.message or outcome.status
            )
        measured = [read_json(rank.memory) for _, rank in places.ranks()]
        speed = trial_speed(load_trial(places))
        probe = BatchProbe(
            global_batch=batch,
            private_bytes=[rank["peak_private_bytes"] for rank in measured],
            shared_bytes=sum(rank["shared_bytes"] for rank in measured),
            samples_per_s=None if speed is None else speed.rate,
        )
        if probe.measured_bytes <= self._bound:
            return probe
        reason = f"needed {probe.measured_bytes // _MIB} MiB"
        return replace(probe, fits=False, samples_per_s=None, reason=reason)

    def _samples(self) -> int:
        if not self._dataset:
            return workload_of(self._workload).facts().items or 1
        return sum(open_dataset(self._dataset).row_group_rows)
