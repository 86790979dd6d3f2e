"""From a run directory to a comparison: load, check, measure, rank.

Speed is steady state: samples of a global step over its time, warm-up steps left out. Every
configuration's speedup is against the one baseline of its workload (fp32 where there are several);
its equivalence is checked against the baseline of its own precision where there is one.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from paceline.analysis import resources
from paceline.analysis.background_load import disturbance, disturbance_flags
from paceline.analysis.comparison import (
    Best,
    Comparison,
    Difference,
    Tie,
    UnfinishedTrial,
)
from paceline.analysis.compression import relate_less_to_send
from paceline.analysis.equivalence import equivalence_of
from paceline.analysis.local_global import relate
from paceline.analysis.phases import trial_phases
from paceline.analysis.pipeline import trial_pipeline
from paceline.analysis.reading import TrialRecord, load_manifest, load_run, read_hosts
from paceline.analysis.rows import Measured, configuration_row
from paceline.analysis.statistics import Interval, Series, ratio_interval, run_noise, series
from paceline.analysis.steps import global_steps, read_steps
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.analysis.usage import trial_usage
from paceline.errors import NotComparable
from paceline.records.phases import STEP_PHASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline.analysis.row import Row
    from paceline.records.layout import RunFiles, TrialFiles


def compare_run(run: RunFiles, *, require_baseline: bool = True) -> Comparison:
    """Compare the finished trials of `run`; writes the `equivalence.json` of those not yet checked.

    require_baseline: without a finished baseline there is no speedup; False still gives the rows,
    with `speedup` None.
    Raises NotComparable if no trial has finished, or the baseline is required and missing;
    DataError if a file is damaged.
    """
    records = load_run(run)
    finished = [r for r in records if r.finished]
    unfinished = [_unfinished(r) for r in records if not r.finished]
    if not finished:
        raise NotComparable(_nothing_finished(run, unfinished))
    if require_baseline and not any(r.trial.is_baseline for r in finished):
        raise NotComparable(
            f"{run.root}: expected a finished baseline (launcher local, local strategy "
            f"sequential) to compare with, found none among {len(finished)} finished trials. "
            "Run it into the same directory, or mend it and `paceline run --resume`."
        )
    by_workload: dict[str, list[TrialRecord]] = {}
    for record in finished:
        by_workload.setdefault(record.trial.training.workload, []).append(record)
    parts = [_compare_workload(name, found) for name, found in by_workload.items()]
    return Comparison(
        experiment=finished[0].trial.experiment,
        rows=tuple(row for part in parts for row in part.rows),
        baselines={p.workload: p.baseline for p in parts if p.baseline is not None},
        ties=tuple(tie for part in parts for tie in part.ties),
        best={p.workload: p.best for p in parts if p.best is not None},
        unfinished=tuple(unfinished),
        flags=tuple(_flags(finished, parts)),
        local_global=tuple(found for part in parts for found in part.local_global),
        less_to_send=tuple(found for part in parts for found in part.less_to_send),
        trials={name: found for part in parts for name, found in part.trials.items()},
        manifest=load_manifest(run),
    )


class _WorkloadPart:
    """The comparison of one workload's finished trials."""

    def __init__(
        self,
        workload: str,
        trials: Mapping[str, tuple[TrialAnalysis, ...]],
        baseline: str | None,
    ) -> None:
        self.workload = workload
        self.trials = trials
        self.baseline = baseline
        self._images = {name: _by_repeat(found) for name, found in trials.items()}
        self._noise = run_noise(list(self._images.values()))
        measured = Measured(noise=self._noise, baseline=baseline, images=self._images)
        rows = [configuration_row(name, found, measured) for name, found in trials.items()]
        self.rows = sorted(rows, key=_rank)
        ranked = [row for row in self.rows if row.ranked]
        self._ratios = {
            (a.configuration, b.configuration): self._ratio(a.configuration, b.configuration)
            for a, b in combinations(ranked, 2)
        }
        self.ties = [
            Tie(workload=workload, faster=faster, slower=slower, ratio=ratio)
            for (faster, slower), ratio in self._ratios.items()
            if ratio is not None and ratio.contains(1)
        ]
        self.best = self._best(ranked)
        self.local_global = relate(workload, ranked, self._ratio)
        self.less_to_send = relate_less_to_send(self.rows, trials, baseline, self._ratio)

    def _ratio(self, faster: str, slower: str) -> Interval | None:
        return ratio_interval(self._images[faster], self._images[slower], self._noise)

    def _best(self, ranked: Sequence[Row]) -> Best | None:
        if not ranked:
            return None
        first = ranked[0]
        tied = [t.slower for t in self.ties if t.faster == first.configuration]
        behind = [r for r in ranked[1:] if r.configuration not in tied]
        runner_up = behind[0] if behind else None
        return Best(
            workload=self.workload,
            configuration=first.configuration,
            speedup=first.speedup,
            tied_with=tuple(tied),
            runner_up=None if runner_up is None else runner_up.configuration,
            over_runner_up=None
            if runner_up is None
            else self._ratios[first.configuration, runner_up.configuration],
            reason=None if runner_up is None else largest_difference(first, runner_up),
        )


def largest_difference(faster: Row, slower: Row) -> Difference | None:
    """The step phase in which `faster` saves most; None where neither was measured.

    A phase that only one of them has (communication, the bubble of a pipeline) counts as 0 for the
    other: it spends no time there.
    """
    pairs = {
        name: (faster.step_phases_s.get(name) or 0.0, slower.step_phases_s.get(name) or 0.0)
        for name in STEP_PHASES
    }
    name = max(pairs, key=lambda phase: pairs[phase][1] - pairs[phase][0])
    ours, theirs = pairs[name]
    if theirs <= ours:
        return None
    return Difference(phase=name, faster_s=ours, slower_s=theirs)


def _compare_workload(workload: str, records: Sequence[TrialRecord]) -> _WorkloadPart:
    baselines = [r for r in records if r.trial.is_baseline]
    found: dict[str, list[TrialAnalysis]] = {}
    for record in records:
        analysis = _analyse(record, _equivalence_baseline(record, baselines))
        found.setdefault(record.trial.configuration, []).append(analysis)
    reference = min(baselines, key=_plainness, default=None)
    return _WorkloadPart(
        workload,
        {name: tuple(sorted(trials, key=lambda t: t.repeat)) for name, trials in found.items()},
        None if reference is None else reference.trial.configuration,
    )


def _analyse(record: TrialRecord, baseline: TrialFiles | None) -> TrialAnalysis:
    table = read_steps(record)
    steps = global_steps(record, table)
    hosts = read_hosts(record.files)
    warmup = record.trial.training.warmup_steps
    period = record.trial.round_steps
    first = None
    if record.outcome is not None and len(steps.step) and steps.step[0] == 0:
        first = float(steps.ended_unix_s[0]) - record.outcome.launched_unix_s
    return TrialAnalysis(
        record=record,
        steps=steps,
        phases=trial_phases(record, table),
        usage=trial_usage(record, hosts),
        disturbance=disturbance(record, hosts),
        pipeline=trial_pipeline(record, table),
        equivalence=None if baseline is None else equivalence_of(record.files, baseline),
        samples_per_s=series(steps.samples_per_s(warmup, period), record.trial.id),
        step_s=series(steps.step_s(warmup, period), record.trial.id),
        time_to_first_step_s=first,
    )


def _equivalence_baseline(
    record: TrialRecord, baselines: Sequence[TrialRecord]
) -> TrialFiles | None:
    """The baseline trial to check against: of the same precision, with its tensors, if any is."""
    wanted = record.trial.training.precision
    best = min(
        baselines,
        key=lambda b: (
            b.trial.training.precision != wanted,
            not b.files.weights.exists(),
            *_plainness(b),
        ),
        default=None,
    )
    return None if best is None else best.files


def _plainness(record: TrialRecord) -> tuple[bool, bool, int]:
    training = record.trial.training
    return (
        training.precision != "fp32",
        training.memory_format != "contiguous",
        record.trial.repeat,
    )


def _by_repeat(trials: Iterable[TrialAnalysis]) -> dict[int, Series]:
    return {t.repeat: t.samples_per_s for t in trials if t.samples_per_s is not None}


def _rank(row: Row) -> tuple[bool, float]:
    return (not row.ranked, -(0.0 if row.samples_per_s is None else row.samples_per_s.median))


def _flags(finished: Sequence[TrialRecord], parts: Sequence[_WorkloadPart]) -> list[str]:
    """Sentences, each once, however many repeats they hold for."""
    flags = [
        f"workload {p.workload}: its baseline has not finished, so there is no speedup"
        for p in parts
        if p.baseline is None
    ]
    flags += [
        f"{record.trial.configuration}: {sentence}"
        for record in finished
        for sentence in resources.trial_flags(record)
    ]
    flags += resources.flags_between(finished)
    flags += resources.core_budget_flags(finished)
    flags += disturbance_flags(
        {
            trial.record.trial.id: trial.disturbance
            for part in parts
            for found in part.trials.values()
            for trial in found
        }
    )
    return list(dict.fromkeys(flags))


def _unfinished(record: TrialRecord) -> UnfinishedTrial:
    outcome = record.outcome
    return UnfinishedTrial(
        trial_id=record.trial.id,
        configuration=record.trial.configuration,
        workload=record.trial.training.workload,
        status="not finished" if outcome is None else outcome.status,
        exit_code=None if outcome is None else outcome.exit_code,
        message=None if outcome is None else outcome.message,
    )


def _nothing_finished(run: RunFiles, unfinished: Sequence[UnfinishedTrial]) -> str:
    if not unfinished:
        return (
            f"{run.root}: expected a run directory with trials/<id>/trial.json, found none; "
            "`paceline run SPEC --out RUN_DIR` makes one"
        )
    reasons = "".join(
        f"\n  - {t.trial_id}: {t.status}" + (f": {t.message}" if t.message else "")
        for t in unfinished
    )
    return (
        f"{run.root}: expected finished trials to compare, but none of {len(unfinished)} ended "
        f"well; `paceline run SPEC --out {run.root} --resume` repeats them:{reasons}"
    )
