"""Compare two runs: before and after a change, two machines, or two versions.

Rows are paired by the name of the configuration. Repeats of different runs have nothing in common,
so no drift of the machine cancels as it does within a run. Therefore both rates have the spread of
whole runs, and their difference is tested by Welch. All pairs of a workload are tested together
(Holm). With a single repeat in one of the runs, nothing can be said. A difference between two runs
may still come from the state of the machine at that time.
"""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.analysis.compare.compute_row import combined_equivalence, repeats_itself
from paceline.analysis.equivalence.check import (
    Equivalence,
    equivalence_baseline,
    equivalence_of,
    measured_rounding,
    plainness,
)
from paceline.analysis.equivalence.tolerances import tolerance
from paceline.analysis.statistics.intervals import Estimate, Interval, holm, welch_difference
from paceline.analysis.statistics.rates import RepeatRate, RunRates
from paceline.analysis.trial.evaluation import read_evaluations, target_time
from paceline.analysis.trial.reading import TrialRecord, by_workload, load_manifest, load_run
from paceline.analysis.trial.steps import GlobalSteps, global_steps, samples_rate
from paceline.base.errors import DataError
from paceline.measure.records.files import document, jsonable, write_json
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import SCHEMA
from paceline.plan.trials.trial import Training, Trial

# --- check that the baselines of two runs trained the same, so that the runs may be compared -----
#
# Within a run every configuration is compared with its baseline by gradients and weights, which are
# deleted afterwards. What is left of a baseline are the values of its training, the checksum of its
# initial weights, and the losses of its steps. Losses follow from the weights, so a changed update
# shows in the losses of the next steps.

# The types of the fields are needed at run time, because references are read from JSON, too.

_STEPS = 16  # compared at most: over more steps, rounding alone moves losses apart
# Places, the length of the training, and what does not change a step. The losses decide about the
# code of a task or script, and about the data.
_APART = {
    "dataset", "cache", "task", "task_sha256", "script", "epochs", "max_steps", "warmup_steps",
    "reading", "evaluation", "items",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineTraining:
    """Facts about the training of one repeat of a baseline."""

    training: Training
    initial_weights: tuple[str, ...]  # SHA-256 of its ranks; () if unknown
    losses: tuple[float | None, ...]  # of the first steps
    rounding: Mapping[str, float]  # changes that the baseline has measured, by point


def baseline_training(record: TrialRecord, steps: GlobalSteps) -> BaselineTraining:
    """Collect what a comparison with another run needs."""
    environments = [rank.environment for rank in record.ranks if rank.environment is not None]
    losses = steps.loss[:_STEPS].tolist()
    return BaselineTraining(
        training=record.trial.training,
        initial_weights=tuple(sorted({each.initial_weights_sha256 for each in environments})),
        losses=tuple(None if math.isnan(loss) else loss for loss in losses),
        rounding=measured_rounding(record),
    )


def why_other_training(before: BaselineTraining, after: BaselineTraining) -> str | None:
    """Return how the second baseline trained differently; None if no difference was found."""
    theirs, ours = (each.training.model_dump(exclude=_APART) for each in (before, after))
    changed = [
        f"{name} is {value}, not {theirs.get(name)}"
        for name, value in ours.items()
        if value != theirs.get(name)
    ]
    if changed:
        return "; ".join(changed)
    if before.initial_weights and after.initial_weights != before.initial_weights:
        return "the baseline begins with other weights"
    training = before.training
    allowed = tolerance(
        after.training.arithmetic,
        training.arithmetic,
        _STEPS,
        rounding=before.rounding,
        global_batch=training.global_batch,
    )
    for step, (old, new) in enumerate(zip(before.losses, after.losses, strict=False)):
        if old is None or new is None:
            continue
        # Each step adds the difference of its gradient.
        limit = allowed.loss + step * allowed.gradient
        difference = abs(new - old) / max(abs(old), abs(new), 1e-30)
        if difference > limit:
            return (
                f"the loss of the baseline in step {step} is {new:.6g}, not {old:.6g}: a relative "
                f"difference of {difference:.2g}, allowed are {limit:.2g}"
            )
    return None


# --- speeds of the finished trials of a run, without their causes --------------------------------
#
# For comparisons of whole runs, and for the decision whether another repeat is needed. Reading a
# run this way takes a small part of the time of `compare_run`. A reference file keeps the speeds of
# a run whose directory is gone.

# The types of the fields are needed at run time, because references are read from JSON.

_MOST_REFERENCE_BYTES = 2**24
_LARGEST_LOG = 50.0  # of a speed, either way
_KEPT_OF_MANIFEST = (
    "schema", "name", "created_unix_s", "host", "versions", "packages", "git", "spec_toml",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpeeds:
    """Samples per second of the finished trials, by configuration and repeat."""

    manifest: Mapping[str, Any]
    rates: dict[str, dict[int, RepeatRate]] = field(default_factory=dict)
    trials: dict[str, Trial] = field(default_factory=dict)  # one repeat of each configuration
    # None: a repeat was not checked, or is lossy on purpose
    equivalent: dict[str, bool | None] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)  # of those that are not equivalent
    unfinished: tuple[str, ...] = ()  # configurations without a finished repeat
    # by workload; of the first repeat, if it finished and could be repeated with equal weights
    baselines: dict[str, BaselineTraining] = field(default_factory=dict)
    schema: int = SCHEMA

    def of_workload(self, workload: str) -> RunRates:
        """Return the speeds of one workload's configurations."""
        return RunRates(
            {n: r for n, r in self.rates.items() if self.trials[n].training.workload == workload}
        )

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(trial.training.workload for trial in self.trials.values()))


def trial_speed(record: TrialRecord) -> RepeatRate | None:
    """Return the samples per second of the steady steps of a trial; None if it has none."""
    return samples_rate(record, global_steps(record))


def target_speed(record: TrialRecord) -> RepeatRate | None:
    """Return the rate at which a trial reached its target; None if it missed it."""
    steps = global_steps(record)
    found = target_time(record, steps, read_evaluations(record, steps))
    return found.rate if found is not None and found.reached else None


def read_speeds(run: RunFiles) -> RunSpeeds:
    """Read the speeds of a run. Raises DataError if a file is damaged."""
    manifest, records = load_manifest(run), load_run(run)
    found = RunSpeeds(manifest=manifest)
    for workload, finished in by_workload(r for r in records if r.finished).items():
        _add_workload(found, workload, finished)
    every = dict.fromkeys(record.trial.configuration for record in records)
    return replace(found, unfinished=tuple(name for name in every if name not in found.rates))


def write_reference(path: Path, speeds: RunSpeeds) -> None:
    """Write what a later run can be compared with."""
    rates = {
        name: {repeat: RepeatRate(log_rate=rate.log_rate) for repeat, rate in found.items()}
        for name, found in speeds.rates.items()
    }
    manifest = {key: speeds.manifest[key] for key in _KEPT_OF_MANIFEST if key in speeds.manifest}
    write_json(path, jsonable(replace(speeds, rates=rates, manifest=manifest)))


def read_reference(path: Path) -> RunSpeeds:
    """Read a file of `write_reference`. Raises DataError if it is something else."""
    size = path.stat().st_size
    if size > _MOST_REFERENCE_BYTES:
        raise DataError(
            f"{path}: expected a reference of at most {_MOST_REFERENCE_BYTES} bytes, got {size}; "
            "`paceline compare RUN_DIR --save-reference FILE` writes one"
        )
    found = document(path, RunSpeeds)
    if found is None or found.schema != SCHEMA:
        raise DataError(f"{path}: expected a reference of schema {SCHEMA}")
    logs = [rate.log_rate for rates in found.rates.values() for rate in rates.values()]
    if not all(math.isfinite(log) and abs(log) < _LARGEST_LOG for log in logs):
        raise DataError(f"{path}: expected logarithms of speeds, found other numbers in `rates`")
    if not found.rates.keys() <= found.trials.keys() & found.equivalent.keys():
        raise DataError(f"{path}: expected a trial for each configuration of `rates`")
    return found


def _add_workload(found: RunSpeeds, workload: str, finished: Sequence[TrialRecord]) -> None:
    baselines = [record for record in finished if record.trial.is_baseline]
    is_repeatable = repeats_itself(baselines)
    checks: dict[str, list[Equivalence | None]] = defaultdict(list)
    for record in finished:
        steps = global_steps(record)
        speed = samples_rate(record, steps)
        if speed is None:
            continue
        name = record.trial.configuration
        found.rates.setdefault(name, {})[record.trial.repeat] = speed
        found.trials.setdefault(name, record.trial)
        baseline = equivalence_baseline(record, baselines)
        checks[name].append(None if baseline is None else equivalence_of(record.files, baseline))
        if is_repeatable and record is min(baselines, key=plainness, default=None):
            found.baselines[workload] = baseline_training(record, steps)
    for name, each in checks.items():
        verdicts = [None if check is None else check.equivalent for check in each]
        found.equivalent[name] = combined_equivalence(verdicts, is_repeatable)
        if found.equivalent[name] is False:
            faults = (fault for check in each if check is not None for fault in check.faults)
            found.differences[name] = next(faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRow:
    """One configuration in two runs."""

    configuration: str
    workload: str
    before: Interval  # samples per second in the first run
    after: Interval  # in the second run
    ratio: Interval  # after / before
    is_different: bool  # significant at 5 % in the family of the workload
    equivalent: tuple[bool | None, bool | None]  # to the baseline of its own run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Two runs: rows in both, and configurations in one of them only."""

    rows: tuple[PairedRow, ...]  # the largest ratio first, by workload
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @property
    def faster(self) -> list[PairedRow]:
        return [row for row in self.rows if row.is_different and row.ratio.median > 1]

    @property
    def slower(self) -> list[PairedRow]:
        return [row for row in self.rows if row.is_different and row.ratio.median < 1]


def compare_runs(before: RunSpeeds, after: RunSpeeds) -> RunComparison:
    """Pair the configurations of two runs and test each pair."""
    rows: list[PairedRow] = []
    for workload in before.workloads:
        rows += _paired_rows(workload, before, after)
    return RunComparison(
        rows=tuple(rows),
        only_before=tuple(name for name in before.rates if name not in after.rates),
        only_after=tuple(name for name in after.rates if name not in before.rates),
    )


def paired_differences(before: RunRates, after: RunRates) -> dict[str, Estimate]:
    """Return the logarithm of after / before of each configuration that finished in both runs."""
    return {
        name: welch_difference(first, second)
        for name in before.repeats
        if (first := before.log_rate(name)) is not None
        and (second := after.log_rate(name)) is not None
    }


def tested_pairs(before: RunRates, after: RunRates) -> dict[str, tuple[Estimate, bool]]:
    """Return log(after / before) of each configuration in both, and whether it is different."""
    tests = paired_differences(before, after)
    different = holm({name: found.p_value for name, found in tests.items()})
    return {name: (found, name in different) for name, found in tests.items()}


def _paired_rows(workload: str, before: RunSpeeds, after: RunSpeeds) -> list[PairedRow]:
    ours, theirs = before.of_workload(workload), after.of_workload(workload)
    rows = []
    for name, (found, is_different) in tested_pairs(ours, theirs).items():
        speeds = ours.rate(name), theirs.rate(name)
        if speeds[0] is None or speeds[1] is None:
            continue
        rows.append(
            PairedRow(
                configuration=name,
                workload=workload,
                before=speeds[0],
                after=speeds[1],
                ratio=found.exponential(),
                is_different=is_different,
                equivalent=(before.equivalent[name], after.equivalent[name]),
            )
        )
    return sorted(rows, key=lambda row: -row.ratio.median)


# Differences between two runs in machine, packages, git commit and spec, from their manifests


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One value that differs; None: a run does not have it."""

    of: str  # machine, package, git or spec
    name: str
    before: str | None
    after: str | None


def run_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """List what differs between two manifests."""
    return [
        Difference(of=of, name=name, before=ours.get(name), after=theirs.get(name))
        for of, ours, theirs in zip(_KINDS, _facts(before), _facts(after), strict=True)
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]


def machine_identity(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return values that are equal for two runs on the same machine."""
    host = _table(manifest, "host")
    return tuple(str(host.get(name)) for name in _IDENTITY)


_KINDS = ("machine", "package", "git", "spec")
_IDENTITY = ("host", "cpu_model", "usable_cores")


def _facts(manifest: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    packages = _table(manifest, "versions") | _table(manifest, "packages")
    return (
        _strings(_table(manifest, "host")),
        _strings(packages),
        _strings(_table(manifest, "git")),
        _spec(manifest),
    )


def _spec(manifest: Mapping[str, Any]) -> dict[str, str]:
    try:
        spec = tomllib.loads(str(manifest.get("spec_toml", "")))
    except tomllib.TOMLDecodeError:
        return {}
    return dict(_flat(spec, ""))


def _flat(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Yield the values of nested tables and arrays of tables with their dotted keys."""
    inner: dict[str, object] = {}
    if isinstance(value, dict):
        inner = value
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        inner = {str(number): each for number, each in enumerate(value)}
    if not inner:
        yield place, str(value)
    for key, each in inner.items():
        yield from _flat(each, f"{place}.{key}" if place else key)


def _table(manifest: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = manifest.get(key)
    return found if isinstance(found, dict) else {}


def _strings(table: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in table.items() if value is not None}
