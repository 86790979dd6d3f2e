"""Preview of a run before its first trial: steps, duration, disk, faults and warnings."""

from __future__ import annotations

import shutil
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.analysis.trial.reading import load_manifest
from paceline.base.errors import DataError, EnvironmentLacks, PacelineWarning, UsageError
from paceline.measure.records.documents import KEPT
from paceline.measure.records.files import document
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.phases import kept_after, replayed_after
from paceline.measure.records.rows import Outcome
from paceline.plan.trials.rules import FEW_STEPS, failure_faults, training_faults
from paceline.plan.trials.trial import Training, Trial, planned_steps, task_facts
from paceline.runner.lab.session import own_lab
from paceline.runner.launchers.base import launcher_for
from paceline.runner.preflight.load import Load, Looking
from paceline.runner.preflight.this_host import check_lab
from paceline.runner.trials.planning import Planned, check_dataset, known_samples

# --- an estimate of the disk use of a run, before it starts --------------------------------------
#
# Rows are JSON lines while their trial trains, and smaller Parquet files afterwards. The sizes of
# rows are rounded means of real runs. The traces of sidecars grow with the time of the training,
# which is not known before, so they are given as a rate.

_RUN_BYTES = 2_200_000  # the report holds the library that draws its figures
_TRIAL_BYTES = 15_000
_RANK_BYTES = 12_000
_HOST_BYTES = 25_000
# Of a step of a rank, with its operations; of a sample identifier; of a sample of the sidecar.
_STEP_JSON, _STEP_PARQUET = 830, 100
_ID_JSON, _ID_PARQUET = 6, 3
_TRACE_JSON, _TRACE_PARQUET = 1_600, 80
_RANK_TRACE_JSON, _RANK_TRACE_PARQUET = 280, 12
_COPIES_OF_SGD, _COPIES_OF_OTHERS = 1, 2  # Adam and its relatives have two

Parameters = tuple[int, int]  # bytes of all, and tensors of the optimiser for each


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Bytes on disk, without the traces of sidecars; these in bytes per second of training."""

    kept_bytes: float  # when the trials have ended well
    training_bytes: float  # more than that while a trial trains
    trace_kept_bytes_per_s: float = 0.0
    trace_training_bytes_per_s: float = 0.0

    def peak_bytes(self, training_s: float = 0.0) -> float:
        """Return the largest use of a run whose trials train for so long each."""
        return self.kept_bytes + self.training_bytes + self.trace_training_bytes_per_s * training_s


def total_disk_use(trials: Sequence[DiskUse]) -> DiskUse:
    """Return the disk use of a run, whose trials train one after the other."""
    return DiskUse(
        kept_bytes=_RUN_BYTES + sum(use.kept_bytes for use in trials),
        training_bytes=max((use.training_bytes for use in trials), default=0.0),
        trace_kept_bytes_per_s=max((use.trace_kept_bytes_per_s for use in trials), default=0.0),
        trace_training_bytes_per_s=max(
            (use.trace_training_bytes_per_s for use in trials), default=0.0
        ),
    )


def warn_of_small_disk(use: DiskUse, trial_s: float, folder: Path) -> None:
    """Warn if the disk of a folder has less free than the run may need.

    trial_s: the longest that a trial may take.
    """
    free, needed = shutil.disk_usage(folder).free, use.peak_bytes(trial_s)
    if needed > free:
        message = (
            f"{folder}: the run may need {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free; "
            "free some, choose another disk with --out, or write fewer checkpoints and tensors"
        )
        warnings.warn(message, PacelineWarning, stacklevel=2)


def trial_disk_use(
    trial: Trial, steps: int, parameters: Parameters, *, keeps_tensors: bool = False
) -> DiskUse:
    """Return the disk use of a trial. keeps_tensors: it keeps those for the comparison."""
    ranks, nodes = trial.placement.ranks, trial.placement.nodes
    ids = steps * trial.training.global_batch  # all ranks together log each sample once
    checkpoint = parameters[0] * (1.0 + parameters[1])
    tensors = 2.0 * parameters[0] if trial.save_tensors else 0.0  # gradient and final weights
    if trial.is_replayed:
        tensors += parameters[0] * len(kept_after(steps))
        if keeps_tensors and trial.is_baseline:
            states = checkpoint * len(replayed_after(steps))  # to replay from
            tensors += parameters[0] + states
    kept: float = _TRIAL_BYTES + ranks * (_RANK_BYTES + steps * _STEP_PARQUET) + ids * _ID_PARQUET
    # the Parquet file of a kind of rows is complete before its JSON lines are removed
    training: float = ranks * steps * _STEP_JSON + ids * _ID_JSON
    if keeps_tensors:
        kept += tensors
    else:
        training += tensors
    if trial.checkpoint is not None:  # one more is being written
        kept_checkpoints = KEPT * checkpoint if trial.checkpoint.keep else 0.0
        kept += kept_checkpoints
        training += (KEPT + 1) * checkpoint - kept_checkpoints
    if not trial.telemetry.enabled:
        return DiskUse(kept_bytes=kept, training_bytes=training)
    per_s = 1 / trial.telemetry.interval_s
    return DiskUse(
        kept_bytes=kept + nodes * _HOST_BYTES,
        training_bytes=training,
        trace_kept_bytes_per_s=per_s * (nodes * _TRACE_PARQUET + ranks * _RANK_TRACE_PARQUET),
        trace_training_bytes_per_s=per_s * (nodes * _TRACE_JSON + ranks * _RANK_TRACE_JSON),
    )


def _parameters(training: Training) -> Parameters:
    if training.script is not None:  # it writes no tensors of a known size
        return 0, 0
    facts = task_facts(training)
    copies = _COPIES_OF_SGD if facts.optimizer == "SGD" else _COPIES_OF_OTHERS
    return facts.parameter_bytes, copies


def disk_uses(planned: Planned) -> list[DiskUse]:
    """Return the disk use of each trial; asks for facts of the models, 1 to 2 s for each."""
    known: dict[str, tuple[int, Parameters]] = {}
    with_baseline: set[tuple[str, int, str]] = set()
    found = []
    for trial in planned.trials:
        training = trial.training
        if training.workload not in known:
            steps = planned_steps(training, known_samples(planned, training)) or 0
            known[training.workload] = steps, _parameters(training)
        key = (training.workload, training.seed, training.precision)
        is_first_baseline = trial.is_baseline and key not in with_baseline
        if is_first_baseline:
            with_baseline.add(key)
        keeps = planned.experiment.keep_tensors or is_first_baseline
        found.append(trial_disk_use(trial, *known[training.workload], keeps_tensors=keeps))
    return found


_MINUTE_S, _HOUR_S = 60, 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationPreview:
    """A configuration before it runs. None: not known."""

    configuration: str
    workload: str
    nodes: int
    ranks: int
    global_batch: int
    samples: int | None  # to train on
    steps: int | None
    warmup_steps: int
    repeats: int  # at most, with `repeats = "auto"`
    trial_s: float | None  # expected for one repeat, as in the latest run of the same spec
    disk_bytes: float  # kept by one repeat, without the traces of its sidecars


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A run before it starts."""

    configurations: tuple[ConfigurationPreview, ...]  # of each workload, the baseline first
    disk: DiskUse
    faults: tuple[str, ...]  # each once, although it would hit every trial
    warnings: tuple[str, ...]
    left_out: tuple[str, ...]  # configurations that this machine cannot have, each with its reason
    load: Load  # by others, meanwhile

    @property
    def trials(self) -> int:
        return sum(each.repeats for each in self.configurations)

    @property
    def expected_s(self) -> float | None:
        """Expected duration of all trials; None unless all configurations are known."""
        known_s = [c.repeats * c.trial_s for c in self.configurations if c.trial_s is not None]
        return sum(known_s) if len(known_s) == len(self.configurations) else None

    @property
    def expected_trials_s(self) -> dict[str, float]:
        """Expected duration of one repeat of each configuration that is known."""
        known = ((each.configuration, each.trial_s) for each in self.configurations)
        return {name: trial_s for name, trial_s in known if trial_s is not None}

    @property
    def summary(self) -> str:
        """The size of the run as one line."""
        trials, configurations = self.trials, len(self.configurations)
        counted = (
            f"{trials} trial{'s' if trials != 1 else ''} of "
            f"{configurations} configuration{'s' if configurations != 1 else ''}, "
            f"{self.disk.kept_bytes / 1e6:.0f} MB on disk"
        )
        if self.expected_s is None:
            return f"{counted}; duration unknown, because no earlier run of this spec was found"
        return (
            f"{counted}; about {duration(self.expected_s)}, {self.expected_s / trials:.1f} s for "
            "a trial, as in the latest run of this spec"
        )

    def check(self) -> None:
        """Raise UsageError with all faults that would make every trial fail or useless."""
        if self.faults:
            raise UsageError("\n".join(self.faults))


def duration(seconds: float) -> str:
    """Format an expected duration with its unit."""
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds / _HOUR_S:.1f} h"


def preview_run(planned: Planned, former_runs: Path) -> Preview:
    """Return what a run would do; takes 1 to 2 s for each model.

    former_runs: the folder with run directories in which a run of the same spec is sought.
    """
    looking = Looking()
    durations_s = _durations_s(planned.spec_text, former_runs)
    samples = {name: known_samples(planned, each) for name, each in _trainings(planned).items()}
    repeats = Counter(trial.configuration for trial in planned.trials)
    first_of_each = {trial.configuration: trial for trial in reversed(planned.trials)}
    uses = disk_uses(planned)
    disk_bytes = {
        t.configuration: use.kept_bytes
        for t, use in zip(reversed(planned.trials), reversed(uses), strict=True)
    }
    workloads = list(samples)
    in_order = sorted(
        first_of_each.values(),
        key=lambda t: (workloads.index(t.training.workload), not t.is_baseline, t.configuration),
    )
    configurations = tuple(
        ConfigurationPreview(
            configuration=trial.configuration,
            workload=trial.training.workload,
            nodes=trial.placement.nodes,
            ranks=trial.placement.ranks,
            global_batch=trial.training.global_batch,
            samples=samples[trial.training.workload],
            steps=planned_steps(trial.training, samples[trial.training.workload]),
            warmup_steps=trial.training.warmup_steps,
            repeats=repeats[trial.configuration],
            trial_s=durations_s.get(trial.configuration),
            disk_bytes=disk_bytes[trial.configuration],
        )
        for trial in in_order
    )
    return Preview(
        configurations=configurations,
        disk=total_disk_use(uses),
        faults=tuple(_faults(planned)),
        warnings=tuple(_warnings(planned)),
        left_out=tuple(planned.left_out),
        load=looking.end(),
    )


def preflight(trials: Iterable[Trial]) -> None:
    """Check every configuration before any trial runs. Raises EnvironmentLacks, UsageError."""
    first_of_each = {trial.configuration: trial for trial in reversed(list(trials))}
    for fault in failure_faults(first_of_each.values()):
        raise UsageError(fault)
    check_lab(first_of_each.values(), own_lab)
    for trial in reversed(first_of_each.values()):
        launcher_for(trial.launcher).preflight(trial)


def _faults(planned: Planned) -> Iterator[str]:
    """Yield the faults of each workload: its data set, script or loss, and number of steps."""
    unusable: set[str] = set()
    for training in _trainings(planned).values():
        name = training.entry_name
        if name in unusable:
            continue
        try:
            check_dataset(planned, name)
        except (UsageError, EnvironmentLacks, DataError) as error:
            unusable.add(name)
            yield f"workload {name}: {error}"
            continue
        yield from training_faults(training, known_samples(planned, training))


def _warnings(planned: Planned) -> Iterator[str]:
    for training in _trainings(planned).values():
        samples = known_samples(planned, training)
        steps = planned_steps(training, samples)
        if samples is None or steps is None:
            continue
        if training.global_batch > samples:
            yield (
                f"workload {training.workload}: global_batch = {training.global_batch}, but there "
                f"are only {samples} samples; each step trains {samples}"
            )
        if training.max_steps is not None and steps < training.max_steps:
            yield (
                f"workload {training.workload}: trains {steps} of max_steps = "
                f"{training.max_steps} steps, because epochs = {training.epochs} ends it"
            )
        measured = steps - training.warmup_steps
        if 0 < measured < FEW_STEPS:
            yield (
                f"workload {training.workload}: only {measured} "
                f"step{'s' if measured != 1 else ''} would be measured; "
                f"{FEW_STEPS} or more give narrower intervals"
            )


def _trainings(planned: Planned) -> dict[str, Training]:
    """Return the training of each workload, in the order of the spec and of the global batches."""
    found = {trial.training.workload: trial.training for trial in reversed(planned.trials)}
    entries = [workload.name for workload in planned.experiment.workloads]
    in_order = sorted(found.values(), key=lambda t: (entries.index(t.entry_name), t.global_batch))
    return {training.workload: training for training in in_order}


def _durations_s(spec_text: str, former_runs: Path) -> Mapping[str, float]:
    """Return the median duration of each configuration in the latest run of the same spec."""
    manifests = sorted(
        former_runs.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    for path in manifests:
        run = RunFiles(path.parent)
        try:
            if load_manifest(run).get("spec_toml") != spec_text:
                continue
            found: dict[str, list[float]] = {}
            for name, files in run.trials():
                outcome = document(files.outcome, Outcome)
                if outcome is not None and outcome.status == "ok":
                    duration_s = outcome.ended_unix_s - outcome.launched_unix_s
                    found.setdefault(name.rpartition(".r")[0], []).append(duration_s)
        except (DataError, OSError):
            continue  # a damaged run says nothing about this one
        if found:
            return {name: statistics.median(times) for name, times in found.items()}
    return {}
