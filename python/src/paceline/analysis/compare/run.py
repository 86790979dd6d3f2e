"""Compare a run: load, check, measure and rank its trials.

Speed is that of the steady state: the samples of all steps after the warm-up over their total time,
so stalls count. The
speedup of every configuration is over the one baseline of its workload: the sequential one (fp32
where there are several), or the one that the user has chosen. Its equivalence is always checked
against the sequential baseline, of its own precision if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from paceline.analysis.compare.compression import compression_effects
from paceline.analysis.compare.compute_row import (
    Measured,
    configuration_row,
    evaluations_by_seed,
    is_equivalent,
    planned_row,
    repeats_itself,
)
from paceline.analysis.compare.explain_run import WorkloadExplainer
from paceline.analysis.compare.local_global import relate, relate_figures
from paceline.analysis.compare.ranking import rankings, rates_of
from paceline.analysis.compare.result import Comparison, UnfinishedTrial
from paceline.analysis.compare.row import Row
from paceline.analysis.compare.verdict import make_verdict
from paceline.analysis.equivalence.check import equivalence_baseline, plainness
from paceline.analysis.explain.explanation import Explanation
from paceline.analysis.trial import resource_checks as resources
from paceline.analysis.trial.configuration import node_setup
from paceline.analysis.trial.reading import TrialRecord, by_workload, load_manifest, load_run
from paceline.analysis.trial.usage import disturbance_flags
from paceline.analysis.trial_analysis import TrialAnalysis, analyse_trial
from paceline.base.errors import NotComparable
from paceline.measure.records.documents import Stopping, read_stopping
from paceline.measure.records.layout import RunFiles
from paceline.plan.trials.selection import matching, no_match

_THREADS = 4  # reading, Polars and NumPy release the interpreter lock most of the time


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
    parts = [
        _Workload(name, found, pattern, stopping, {} if analysed is None else analysed)
        for name, found in by_workload(records).items()
    ]
    trials = {name: found for part in parts for name, found in part.trials.items()}
    return Comparison(
        experiment=finished[0].trial.experiment,
        rows=tuple(row for part in parts for row in part.rows),
        baselines={p.name: p.baseline for p in parts if p.baseline is not None},
        sequential={p.name: p.sequential for p in parts if p.sequential is not None},
        verdicts={p.name: p.verdict for p in parts},
        unfinished=tuple(unfinished),
        stopping=stopping,
        flags=(*(f for part in parts for f in part.flags), *_flags(finished, trials)),
        local_global=tuple(found for part in parts for found in part.local_global),
        node_figures=tuple(found for part in parts for found in part.node_figures),
        compression=tuple(found for part in parts for found in part.compression),
        trials=trials,
        manifest=manifest,
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
    ) -> None:
        """chosen_baseline: shell pattern of configurations, or None for the sequential one.

        stopping: of `repeats = "auto"`.
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
            baseline=None if self.baseline is None else self.trials[self.baseline][0].record.trial,
            to_target=by_target,
            no_baseline=no_baseline,
            baseline_repeats_itself=repeats_itself(
                t.record for t in self.trials.get(self.sequential or "", ())
            ),
            baseline_evaluations=evaluations_by_seed(self.trials.get(self.sequential or "", ())),
        )
        rows = [configuration_row(name, found, measured) for name, found in self.trials.items()]
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
        setups = {name: node_setup(found[0].record.trial) for name, found in self.trials.items()}
        fair = [row for row in self.rows if row.has_comparable_speed]
        ratio = self._speeds.ratio
        self.local_global = relate(name, fair, setups, ratio, by_speed.fastest)
        self.node_figures = relate_figures(name, fair)
        self.compression = compression_effects(self.rows, self.trials, self.baseline, ratio)

    def _chosen(self, pattern: str | None, records: Sequence[TrialRecord]) -> str | None:
        """Return the fastest equivalent configuration that matches the pattern, if there is one."""
        if pattern is None:
            return None
        wanted = matching([record.trial.configuration for record in records], pattern)
        usable = {
            name: speed.value
            for name in wanted
            if (speed := self._speeds.log_rate(name)) and is_equivalent(self.trials[name])
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
            row.goal.time_to_target_s.median,
        )
    speedup = 0.0 if row.speed.speedup is None else row.speed.speedup.median
    rate = 0.0 if row.speed.samples_per_s is None else row.speed.samples_per_s.median
    return not row.ranked, -speedup, -rate


def _flags(
    finished: Sequence[TrialRecord], trials: Mapping[str, tuple[TrialAnalysis, ...]]
) -> list[str]:
    flags = [
        f"{record.trial.configuration}: {sentence}"
        for record in finished
        for sentence in resources.trial_flags(record)
    ]
    flags += resources.flags_between(finished)
    flags += resources.allocated_cores_flags(finished)
    flags += resources.shared_machine_flags(finished)
    flags += resources.clock_flags(finished)
    flags += disturbance_flags(
        {t.record.trial.id: t.disturbance for found in trials.values() for t in found}
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
        f"well; `paceline run --resume {run.root}` repeats them:{reasons}"
    )
