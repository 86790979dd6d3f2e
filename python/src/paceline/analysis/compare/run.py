"""Compare a run: load, check, measure and rank its trials.

Speed is that of the steady state: the samples of all steps after the warm-up over their total time,
so stalls count. The
speedup of every configuration is over the one baseline of its workload: the sequential one (fp32
where there are several), or the one that the user has chosen. Its equivalence is always checked
against the sequential baseline, of its own precision if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from paceline.analysis.compare.compression import CompressionEffect, compression_effects
from paceline.analysis.compare.compute_row import (
    Measured,
    configuration_row,
    evaluations_by_seed,
    is_equivalent,
    planned_row,
    repeats_itself,
)
from paceline.analysis.compare.local_global import LocalGlobal, relate
from paceline.analysis.compare.ranking import (
    Ranking,
    counts_samples,
    rankings,
    rates_of,
    with_equal_steps,
)
from paceline.analysis.compare.row import Row
from paceline.analysis.compare.verdict import Verdict, make_verdict
from paceline.analysis.compare.weak_scaling import WeakScaling, weak_scalings
from paceline.analysis.equivalence.check import equivalence_baseline, plainness
from paceline.analysis.explain.evidence import ExplainedTrials
from paceline.analysis.explain.explanation import Explanation, explain
from paceline.analysis.statistics.fastest import Fastest
from paceline.analysis.statistics.rates import RunRates
from paceline.analysis.trial import resource_checks as resources
from paceline.analysis.trial.load import LoadOfRun, load_of_run
from paceline.analysis.trial.reading import (
    TrialRecord,
    by_workload,
    load_manifest,
    load_run,
    load_shares,
    source_flags,
    with_sources,
)
from paceline.analysis.trial_analysis import TrialAnalysis, analyse_trial
from paceline.base.errors import NotComparable, UsageError
from paceline.measure.records.documents import Stopping, read_stopping
from paceline.measure.records.files import jsonable
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.rows import SCHEMA
from paceline.plan.trials.planning import matching, no_match

# The comparison of a run as values; `to_json` gives the document of `paceline compare --json`


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedTrial:
    """A trial that failed, or has no outcome yet."""

    trial_id: str
    configuration: str
    workload: str
    status: str
    exit_code: int | None
    message: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A whole run. Rows are grouped by workload: ranked ones first, in order of speed."""

    experiment: str
    rows: tuple[Row, ...]
    baselines: Mapping[str, str]  # configuration by workload, which speedups are relative to
    sequential: Mapping[str, str]  # configuration by workload, which equivalence is relative to
    verdicts: Mapping[str, Verdict]  # by workload
    unfinished: tuple[UnfinishedTrial, ...]
    flags: tuple[str, ...]
    local_global: tuple[LocalGlobal, ...]
    compression: tuple[CompressionEffect, ...]
    weak_scaling: tuple[WeakScaling, ...]
    trials: Mapping[str, tuple[TrialAnalysis, ...]]  # by configuration, in order of repeat
    manifest: Mapping[str, Any]
    load: LoadOfRun
    stopping: Stopping | None = None  # of `repeats = "auto"`

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(row.workload for row in self.rows))

    def rows_of(self, workload: str) -> list[Row]:
        return [row for row in self.rows if row.workload == workload]

    def row(self, configuration: str) -> Row:
        return next(row for row in self.rows if row.configuration == configuration)

    @property
    def dilation(self) -> int:
        """Return how many lab hosts took turns on the same cores; 1 if each had its own."""
        found = (trial.record.dilation for each in self.trials.values() for trial in each)
        return max(found, default=1)

    def load_of(self, configurations: Iterable[str]) -> LoadOfRun:
        """Return how many trials of some configurations ran beside other work."""
        return _load([trial for name in configurations for trial in self.trials.get(name, ())])

    def to_json(self) -> dict[str, Any]:
        """Return the document of the command line contract.

        `baseline` and `verdict` are those of the only workload; null if there are several, see
        `workloads`.
        """
        workloads = {
            name: {
                "baseline": self.baselines.get(name),
                "equivalence_baseline": self.sequential.get(name),
                "verdict": self.verdicts[name],
            }
            for name in self.workloads
        }
        only = next(iter(workloads.values())) if len(workloads) == 1 else {}
        document: dict[str, Any] = jsonable(
            {
                "schema": SCHEMA,
                "experiment": self.experiment,
                "baseline": only.get("baseline"),
                "verdict": only.get("verdict"),
                "workloads": workloads,
                "rows": [row.to_json() for row in self.rows],
                "unfinished": self.unfinished,
                "flags": self.flags,
                "local_global": self.local_global,
                "weak_scaling": self.weak_scaling,
                "gradient_compression": self.compression,
                "automatic_repeats": self.stopping,
                "load": self.load,
            }
        )
        return document


# Explain the differences within one run: a pair, or the fastest configuration and all others

_THREADS = 4  # reading, Polars and NumPy release the interpreter lock most of the time


class WorkloadExplainer:
    """Explains pairs of configurations of one workload; each configuration is read once.

    Two configurations differ if the ranking by speed says so: beside the fastest one, those that it
    does not separate from it do not differ, and for all pairs the interval of their ratio decides.
    """

    def __init__(
        self,
        trials: Mapping[str, Sequence[TrialAnalysis]],
        rates: RunRates,
        fastest: Fastest,
    ) -> None:
        """trials: of the workload, by configuration. rates, fastest: of the ranking by speed."""
        self._trials, self._rates, self._fastest = trials, rates, fastest
        self._sides: dict[str, ExplainedTrials] = {}

    def read(self, names: Sequence[str]) -> None:
        """Read several configurations at once."""
        with ThreadPoolExecutor(_THREADS) as pool:
            self._sides |= zip(names, pool.map(self._side, names), strict=True)

    def explain(self, first: str, second: str) -> Explanation:
        self.read([name for name in (first, second) if name not in self._sides])
        found = self._fastest
        others = {first, second} - {found.leader}
        return explain(
            self._sides[first],
            self._sides[second],
            self._rates.log_ratio(first, second),
            may_differ=len(others) > 1 or not others & set(found.not_separated),
            disturbed={name: self._rates.disturbed_repeats(name) for name in (first, second)},
        )

    def _side(self, name: str) -> ExplainedTrials:
        return ExplainedTrials(name, [trial.record for trial in self._trials.get(name, ())])


def explain_pair(comparison: Comparison, first: str, second: str) -> Explanation:
    """Explain the difference of two configurations.

    first, second: names, or shell patterns that match one configuration each.
    Raises UsageError if a pattern matches none or several, NotComparable if they belong to
    different workloads or have no steps.
    """
    names = [configuration_like(comparison, pattern) for pattern in (first, second)]
    if names[0] == names[1]:
        raise UsageError(
            f"{first!r} and {second!r}: expected two configurations, both are {names[0]}; name "
            "another one"
        )
    first_workload, second_workload = (comparison.row(name).workload for name in names)
    if first_workload != second_workload:
        raise NotComparable(
            f"expected two configurations of one workload, got {first_workload} and "
            f"{second_workload}; their steps are different work"
        )
    return _explainer(comparison, first_workload).explain(*names)


def explain_workload(
    comparison: Comparison, workload: str, most: int | None = None
) -> list[Explanation]:
    """Explain the fastest configuration of a workload against each of the others, in their order.

    Configurations that are not ranked are left out: their steps are other work, or were not
    measured. most: the number of explanations, None for all.
    """
    ranked = [row.configuration for row in comparison.rows_of(workload) if row.ranked]
    ranked = ranked if most is None else ranked[: most + 1]
    if len(ranked) < 2:
        return []
    explainer = _explainer(comparison, workload)
    explainer.read(ranked)
    return [explainer.explain(ranked[0], other) for other in ranked[1:]]


def speed_ranking(comparison: Comparison, workload: str) -> Ranking:
    """Rank the configurations of a workload by speed, also where it has a target."""
    by_speed, _ = rankings(_trials_of(comparison, workload), comparison.stopping)
    return by_speed


def _explainer(comparison: Comparison, workload: str) -> WorkloadExplainer:
    ranking = speed_ranking(comparison, workload)
    ranked = (row.configuration for row in comparison.rows_of(workload) if row.ranked)
    trials = _trials_of(comparison, workload)
    return WorkloadExplainer(trials, ranking.rates, ranking.fastest(ranked))


def _trials_of(comparison: Comparison, workload: str) -> dict[str, Sequence[TrialAnalysis]]:
    names = [row.configuration for row in comparison.rows_of(workload)]
    return {name: comparison.trials[name] for name in names if name in comparison.trials}


def configuration_like(comparison: Comparison, pattern: str) -> str:
    """Return the one configuration that matches a shell pattern.

    Raises UsageError if none or several match.
    """
    names = [row.configuration for row in comparison.rows]
    found = matching(names, pattern)
    if not found:
        raise no_match("configuration", [pattern], names)
    if len(found) > 1:
        listed = "".join(f"\n  - {name}" for name in found)
        raise UsageError(f"{pattern!r}: expected one configuration, it matches:{listed}")
    return found[0]


def compare_run(
    run: RunFiles,
    *,
    baseline: str | None = None,
    analysed: dict[str, TrialAnalysis] | None = None,
) -> Comparison:
    """Compare the finished trials of `run`. Writes nothing.

    Without a finished baseline there is no speedup.
    baseline: shell pattern of configurations; speedups are over the fastest equivalent one that
    matches. Default: that of the spec, else the sequential baseline.
    analysed: checked trials by id, which are not analysed again; new ones are added.
    Raises NotComparable if no trial has finished, UsageError if no configuration matches
    `baseline`, DataError if a file is damaged.
    """
    records, manifest = load_run(run), load_manifest(run)
    finished = [r for r in records if r.finished]
    unfinished = [_unfinished(r) for r in records if not r.finished]
    if not finished:
        raise NotComparable(_nothing_finished(run, unfinished))
    names = [record.trial.configuration for record in records]
    if baseline is not None and not matching(names, baseline):
        raise no_match("baseline", [baseline], names)
    pattern = manifest.get("baseline") if baseline is None else baseline
    stopping = read_stopping(run)
    shares = by_workload(load_shares(run))
    parts = [
        _Workload(
            name,
            found,
            pattern,
            stopping,
            {} if analysed is None else analysed,
            shares.get(name, []),
        )
        for name, found in by_workload(records).items()
    ]
    trials = {name: found for part in parts for name, found in part.trials.items()}
    rows = tuple(row for part in parts for row in part.rows)
    return Comparison(
        experiment=finished[0].trial.experiment,
        rows=rows,
        baselines={p.name: p.baseline for p in parts if p.baseline is not None},
        sequential={p.name: p.sequential for p in parts if p.sequential is not None},
        verdicts={p.name: p.verdict for p in parts},
        unfinished=tuple(unfinished),
        stopping=stopping,
        flags=(*(f for part in parts for f in part.flags), *_flags(finished)),
        local_global=tuple(found for part in parts for found in part.local_global),
        compression=tuple(found for part in parts for found in part.compression),
        weak_scaling=weak_scalings(rows, trials),
        trials=trials,
        manifest=with_sources(manifest, finished),
        load=_load([trial for found in trials.values() for trial in found]),
    )


class _Workload:
    """The comparison of one workload's trials."""

    def __init__(
        self,
        name: str,
        records: Sequence[TrialRecord],
        chosen_baseline: str | None,
        stopping: Stopping | None,
        analysed: dict[str, TrialAnalysis],
        shares: Sequence[TrialRecord],
    ) -> None:
        """chosen_baseline: shell pattern of configurations, or None for the sequential one.

        stopping: of `repeats = "auto"`. shares: see `load_shares`.
        """
        self.name = name
        self.flags: list[str] = []
        self.trials = _analyse_all([r for r in records if r.finished], analysed)
        sequential = min(
            (t[0].record for t in self.trials.values() if t[0].record.trial.is_baseline),
            key=plainness,
            default=None,
        )
        self.sequential = None if sequential is None else sequential.trial.configuration
        no_baseline = _no_baseline(records) if sequential is None else None
        by_speed, by_target = rankings(self.trials, stopping)
        self._speeds = by_speed.rates
        self.baseline = self._chosen(chosen_baseline, records) or self.sequential
        measured = Measured(
            speeds=self._speeds,
            steps=rates_of(self.trials, lambda trial: trial.steps_per_s),
            wholes=rates_of(self.trials, lambda trial: trial.wholes_per_s),
            baseline=None if self.baseline is None else self.trials[self.baseline][0].record.trial,
            to_target=by_target,
            counts_samples=counts_samples(self.trials),
            no_baseline=no_baseline,
            baseline_repeats_itself=repeats_itself(
                t.record for t in self.trials.get(self.sequential or "", ())
            ),
            baseline_evaluations=evaluations_by_seed(self.trials.get(self.sequential or "", ())),
        )
        rows = [configuration_row(name, found, measured) for name, found in self.trials.items()]
        rows = with_equal_steps(rows, counts=measured.counts_samples)
        self.rows = [*sorted(rows, key=_rank), *_failed_rows(records, self.trials)]
        ranked = [row.configuration for row in self.rows if row.ranked]
        ranking = by_target or by_speed
        fastest = ranking.fastest(ranked)

        def explain(first: str, second: str) -> Explanation:
            by_rate = fastest if ranking is by_speed else by_speed.fastest(ranked)
            return WorkloadExplainer(self.trials, self._speeds, by_rate).explain(first, second)

        self.verdict = make_verdict(
            name, self.rows, ranking, fastest, explain, no_baseline=no_baseline
        )
        fair = [row for row in self.rows if row.has_comparable_speed]
        self.local_global = relate(name, fair, self.trials, by_speed, shares)
        self.compression = compression_effects(
            self.rows, self.trials, self.baseline, self._speeds.ratio
        )

    def _chosen(self, pattern: str | None, records: Sequence[TrialRecord]) -> str | None:
        """Return the fastest equivalent configuration that matches the pattern, if there is one."""
        if pattern is None:
            return None
        wanted = matching([record.trial.configuration for record in records], pattern)
        usable = {
            name: speed.value
            for name in wanted
            if (speed := self._speeds.log_rate(name)) is not None
            and is_equivalent(self.trials[name])
        }
        if wanted and not usable:
            self.flags.append(
                f"{self.name}: no equivalent configuration that matches the baseline {pattern!r} "
                "has finished, so speedups are over the sequential baseline"
            )
        return max(usable, key=lambda name: usable[name], default=None)


def _analyse_all(
    records: Sequence[TrialRecord], analysed: dict[str, TrialAnalysis]
) -> dict[str, tuple[TrialAnalysis, ...]]:
    """Return the analyses by configuration, in order of repeat.

    analysed: the checked ones by trial; each of the others is analysed alone and added, if checked.
    """
    baselines = [r for r in records if r.trial.is_baseline]
    found: dict[str, list[TrialAnalysis]] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        analyses = pool.map(
            lambda record: (
                analysed.get(record.trial.id)
                or analyse_trial(record, equivalence_baseline(record, baselines))
            ),
            records,
        )
        for record, analysis in zip(records, analyses, strict=True):
            if analysis.equivalence is not None:
                analysed[record.trial.id] = analysis
            found.setdefault(record.trial.configuration, []).append(analysis)
    return {name: tuple(sorted(trials, key=lambda t: t.repeat)) for name, trials in found.items()}


def _failed_rows(records: Sequence[TrialRecord], finished: Mapping[str, object]) -> list[Row]:
    """Return a row for each configuration of which trials failed and none finished."""
    failed: dict[str, Row] = {}
    for record in records:
        reason, configuration = _failure(record), record.trial.configuration
        if reason is not None and configuration not in finished:
            failed[configuration] = planned_row(record.trial, reason)
    return list(failed.values())


def _failure(record: TrialRecord) -> str | None:
    """Return one line that says how a trial failed; None if it did not fail."""
    outcome = record.outcome
    if outcome is None or outcome.status == "ok":
        return None
    first_line = (outcome.message or "").partition("\n")[0]
    return f"{outcome.status}: {first_line}" if first_line else outcome.status


def _no_baseline(records: Sequence[TrialRecord]) -> str:
    """Explain why there is no finished baseline."""
    failures = (_failure(record) for record in records if record.trial.is_baseline)
    failure = next((reason for reason in failures if reason is not None), None)
    return "no baseline finished" if failure is None else f"the baseline failed ({failure})"


def _rank(row: Row) -> tuple[bool, float, float]:
    """Sort ranked rows first, by time to the target if there is one, else by speedup.

    Rows that missed the target in a repeat follow those that never did. Without a baseline, samples
    per second decide.
    """
    if row.ranked and row.goal.time_to_target_s is not None:
        return (
            False,
            float((row.goal.target_reached or 0) < row.repeats),
            row.goal.time_to_target_s.estimate,
        )
    speedup = 0.0 if row.speed.speedup is None else row.speed.speedup.estimate
    rate = 0.0 if row.speed.samples_per_s is None else row.speed.samples_per_s.estimate
    return not row.ranked, -speedup, -rate


def _flags(finished: Sequence[TrialRecord]) -> list[str]:
    flags = [
        f"{record.trial.configuration}: {sentence}"
        for record in finished
        for sentence in resources.trial_flags(record)
    ]
    flags += resources.flags_between(finished)
    flags += resources.allocated_cores_flags(finished)
    flags += resources.shared_machine_flags(finished)
    flags += resources.clock_flags(finished)
    flags += resources.turns_flags(finished)
    flags += source_flags(finished)
    return list(dict.fromkeys(flags))


def _load(trials: Sequence[TrialAnalysis]) -> LoadOfRun:
    again = {t.record.trial.id for t in trials if t.record.trial.is_again}
    return load_of_run({t.record.trial.id: t.disturbance for t in trials}, again)


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
        f"well; `paceline run --resume {run.root}` repeats them:{reasons}"
    )
