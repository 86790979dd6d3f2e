"""Compute one configuration's row: estimates and medians over its repeats, intervals, and notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.analysis.compare.ranking import Ranking, last_metrics, row_goal, speedup_of
from paceline.analysis.compare.row import (
    RepeatSpeed,
    Row,
    RowEquivalence,
    RowPlacement,
    RowResult,
    RowSetup,
    RowSpeed,
    RowTimes,
    RowTraining,
    RowWork,
    main_cost,
)
from paceline.analysis.equivalence.check import Equivalence, Grade
from paceline.analysis.equivalence.record_checks import unexplained_evaluations
from paceline.analysis.equivalence.shown import Shown
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.statistics.rates import RunRates
from paceline.analysis.trial.evaluation import Evaluations
from paceline.analysis.trial.phases import (
    RankPhases,
    mean_of_each,
    median_of,
    median_of_each,
    median_pipeline,
)
from paceline.analysis.trial.reading import TIMES, TrialRecord, why_not_equivalent
from paceline.analysis.trial.recovery import recovery_values
from paceline.analysis.trial.stragglers import staleness
from paceline.analysis.trial.usage import median_usage
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.measure.records.phases import OTHER_SPANS, PHASES, STEP_PHASES, Phases
from paceline.measure.records.rows import TrainingResult
from paceline.plan.trials.trial import Trial

_SUPERLINEAR = 1.05  # efficiency above which a result asks for an explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of all configurations of a workload that one row depends on."""

    speeds: RunRates  # samples per second
    steps: RunRates  # steps per second
    wholes: RunRates  # trainings per second, each from the launch to the end
    baseline: Trial | None  # a trial of the configuration that speedups are relative to
    to_target: Ranking | None = None
    counts_samples: bool = True  # False: speeds are steps per second, too
    no_baseline: str | None = None  # why no baseline has finished
    # False for a script whose baseline ends with different weights each time
    baseline_repeats_itself: bool = True
    # by seed; of the baseline that equivalence is relative to
    baseline_evaluations: Mapping[int, Evaluations] = field(default_factory=dict)


def configuration_row(
    configuration: str, trials: Sequence[TrialAnalysis], measured: Measured
) -> Row:
    """Compute the row of one configuration; `trials` are its finished repeats, at least one."""
    row, base = planned_row(trials[0].record.trial), measured.baseline
    speed = _speed(configuration, trials, measured)
    return dataclasses.replace(
        row,
        training=dataclasses.replace(row.training, global_batch=_global_batch(trials)),
        repeats=len(trials),
        is_baseline=base is not None and configuration == base.configuration,
        speed=speed,
        times=_times(trials),
        usage=median_usage([t.usage for t in trials]),
        work=_work(trials),
        result=_result(trials),
        goal=row_goal(configuration, trials, measured.to_target, base),
        equivalence=_equivalence(trials, measured),
        notes=tuple(_notes(configuration, trials, measured, speed.efficiency)),
    )


def planned_row(trial: Trial, failed: str | None = None) -> Row:
    """Return the row of a configuration without measurements.

    failed: why no repeat of it finished.
    """
    return Row(
        configuration=trial.configuration,
        workload=trial.training.workload,
        setup=_setup(trial),
        placement=_placement(trial),
        training=RowTraining(
            precision=trial.training.precision,
            memory_format=trial.training.memory_format,
            global_batch=trial.training.global_batch or None,
            batch_per_replica=trial.training.batch_per_replica,
        ),
        failed=failed,
        times=RowTimes(
            phases_s=dict.fromkeys(PHASES),
            step_phases_s=dict.fromkeys(STEP_PHASES),
            other_parts_s=dict.fromkeys(OTHER_SPANS),
        ),
        equivalence=RowEquivalence(is_script=trial.training.script is not None),
    )


def _setup(trial: Trial) -> RowSetup:
    training, nodes = trial.training, trial.placement.nodes
    usual = ("cpu", "fp32", "contiguous")
    kinds = (trial.device, training.precision, training.memory_format)
    options: dict[str, Any] = {}
    for each in trial.options:
        options |= each.model_dump(mode="json", exclude_none=True)
    return RowSetup(
        launcher=trial.launcher,
        transport=trial.transport,
        local_strategy=trial.local_strategy,
        layout=trial.layout if nodes == 1 else f"{nodes}{TIMES}{trial.layout}",
        labels=(*(kind for kind in kinds if kind not in usual), *trial.labels),
        details=tuple(trial.details),
        options=options,
    )


def _placement(trial: Trial) -> RowPlacement:
    place = trial.placement
    return RowPlacement(
        nodes=place.nodes,
        ranks=place.ranks,
        ranks_per_node=place.ranks_per_node,
        threads_per_rank=place.threads_per_rank,
        threads_per_worker=place.threads_per_worker,
        replicas=place.replicas,
        replicas_per_node=place.replicas_per_node,
        stages=place.stages,
        device=trial.device,
        cores=place.cores,
    )


def _speed(configuration: str, trials: Sequence[TrialAnalysis], measured: Measured) -> RowSpeed:
    trial, base = trials[0].record.trial, measured.baseline
    samples_known = measured.counts_samples
    steps_per_s = measured.steps.rate(configuration)
    efficiency, speedup = None, speedup_of(configuration, base, measured.speeds)
    if speedup is not None and base is not None and _same_arithmetic(trial, base):
        efficiency = speedup.scaled(base.placement.cores / trial.placement.cores)
    return RowSpeed(
        samples_per_s=measured.speeds.rate(configuration) if samples_known else None,
        step_s=None if steps_per_s is None else steps_per_s.inverse(),
        step_median_s=median_of(t.step_median_s for t in trials),
        step_p95_s=median_of(t.step_p95_s for t in trials),
        speedup=speedup,
        wall_speedup=speedup_of(configuration, base, measured.wholes),
        efficiency=efficiency,
        samples=_steady_samples(trials) if samples_known else None,
        repeat_speeds=tuple(_repeat_speeds(configuration, measured.speeds, samples_known)),
        two_speeds=measured.speeds.two_speeds(configuration),
    )


def _repeat_speeds(
    configuration: str, rates: RunRates, samples_known: bool
) -> Iterable[RepeatSpeed]:
    estimate, disturbed = rates.rate(configuration), rates.disturbed(configuration)
    if estimate is None:
        return
    for repeat, found in sorted(rates.repeats[configuration].items()):
        yield RepeatSpeed(
            repeat=repeat,
            samples_per_s=found.rate if samples_known else None,
            relative=found.rate / estimate.estimate,
            disturbed=disturbed.get(repeat),
        )


def _times(trials: Sequence[TrialAnalysis]) -> RowTimes:
    step_phases_s = _over_trials(trials, STEP_PHASES, lambda rank: rank.step)
    cost, share = main_cost(step_phases_s) or (None, None)
    return RowTimes(
        time_to_first_step_s=median_of(t.time_to_first_step_s for t in trials),
        wall_s=median_of(t.phases[0].wall_s if t.phases else None for t in trials),
        phases_s=_over_trials(trials, PHASES, lambda rank: rank.whole),
        step_phases_s=step_phases_s,
        other_parts_s=_over_trials(trials, OTHER_SPANS, lambda rank: rank.other_parts),
        main_cost=cost,
        main_cost_share=share,
    )


def _work(trials: Sequence[TrialAnalysis]) -> RowWork:
    result = _first_result(trials)
    return RowWork(
        bytes_sent_per_step=reported_median(trials, "sent_bytes_per_step"),
        parameters=None if result is None else result.parameters,
        linear_parameters=None if result is None else result.linear_parameters,
        pipeline=median_pipeline([t.pipeline for t in trials if t.pipeline is not None]),
        staleness=staleness([t.updates for t in trials if t.updates is not None]),
    )


def _result(trials: Sequence[TrialAnalysis]) -> RowResult:
    return RowResult(
        final_loss=median_of(t.steps.final_loss for t in trials),
        recoveries=tuple(recovery_values(each) for t in trials for each in t.recoveries),
        metrics=last_metrics(trials),
    )


def _equivalence(trials: Sequence[TrialAnalysis], measured: Measured) -> RowEquivalence:
    trial, result = trials[0].record.trial, _first_result(trials)
    weight_diffs = [e.max_abs_weight_diff for e in _equivalences(trials)]
    shown = weakest_shown(trials)
    return RowEquivalence(
        equivalent=is_equivalent(trials, measured.baseline_repeats_itself),
        equivalence_grade=grade_of(trials),
        equivalence_reason=_equivalence_reason(trials, measured),
        unexplained_evaluations=tuple(
            unexplained_evaluations(evaluations_by_seed(trials), measured.baseline_evaluations)
        ),
        is_lossy=why_not_equivalent(trial) is not None,
        is_script=trial.training.script is not None,
        statement=None if shown is None else shown.statement,
        shown=None if shown is None else "; ".join(shown.sentences),
        max_abs_weight_diff=max((d for d in weight_diffs if d is not None), default=None),
        weights_sha256=None if result is None else result.weights_sha256,
    )


def weakest_shown(trials: Iterable[TrialAnalysis]) -> Shown | None:
    """Return what is shown of all repeats of a script; None if a repeat was not verified."""
    found = [None if t.equivalence is None else t.equivalence.shown for t in trials]
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return None
    return max(known, key=lambda each: each.statement)


def _first_result(trials: Sequence[TrialAnalysis]) -> TrainingResult | None:
    return next((t.record.result for t in trials if t.record.result is not None), None)


def reported_median(trials: Sequence[TrialAnalysis], key: str) -> float | None:
    """Return the median over repeats of a number that the ranks reported on communication."""
    results = [t.record.result for t in trials]
    reported = [r.communication.get(key) for r in results if r is not None]
    return median_of(v for v in reported if isinstance(v, int | float))


def _over_trials(
    trials: Sequence[TrialAnalysis], names: Sequence[str], part: Callable[[RankPhases], Phases]
) -> Phases:
    """Take the mean over ranks and the median over repeats, by the names of the phases."""
    found = median_of_each([mean_of_each([part(r) for r in t.phases]) for t in trials])
    return {name: found.get(name) for name in names}


def _same_arithmetic(trial: Trial, other: Trial) -> bool:
    return trial.training.arithmetic == other.training.arithmetic


def _global_batch(trials: Sequence[TrialAnalysis]) -> int | None:
    """Return the samples of a step: as planned, or those of a script's first step."""
    planned = trials[0].record.trial.training.global_batch
    steps = trials[0].steps
    if planned or not steps.samples_known or not len(steps.samples):
        return planned or None
    return int(steps.samples[0])


def _steady_samples(trials: Sequence[TrialAnalysis]) -> int | None:
    """Return the samples of the steady steps of all repeats; None without such a step."""
    found = 0
    for t in trials:
        found += int(t.steps.samples[t.steps.steady].sum())
    return found or None


def _equivalences(trials: Sequence[TrialAnalysis]) -> list[Equivalence]:
    return [t.equivalence for t in trials if t.equivalence is not None]


def is_equivalent(
    trials: Sequence[TrialAnalysis], baseline_repeats_itself: bool = True
) -> bool | None:
    """Combine all repeats: one that is not equivalent decides.

    What the ranks of a script show against each other needs no baseline that repeats itself.
    """
    baseline_repeats_itself |= weakest_shown(trials) is not None
    found = [None if t.equivalence is None else t.equivalence.equivalent for t in trials]
    return combined_equivalence(found, baseline_repeats_itself)


def combined_equivalence(
    repeats: Sequence[bool | None], baseline_repeats_itself: bool
) -> bool | None:
    """Combine the checks of all repeats of a configuration.

    baseline_repeats_itself: False if that of a script ends with other weights each time, so that no
    difference from it means anything.
    """
    if False in repeats:
        return False if baseline_repeats_itself else None
    return None if None in repeats else True


def repeats_itself(records: Iterable[TrialRecord]) -> bool:
    """Tell whether the repeats of a baseline end with the same weights; only scripts do not."""
    scripts = [r for r in records if r.trial.training.script is not None]
    return len({r.result.weights_sha256 for r in scripts if r.result is not None}) <= 1


def grade_of(trials: Sequence[TrialAnalysis]) -> Grade | None:
    """Return the lowest grade of all seeds; None unless all repeats are equivalent.

    Repeats with one seed replay the same steps, so one of them is enough.
    """
    best: dict[int, Grade] = {}
    for trial in trials:
        grade = None if trial.equivalence is None else trial.equivalence.grade
        if grade is None:
            return None
        seed = trial.record.trial.training.seed
        best[seed] = "whole" if "whole" in (grade, best.get(seed)) else "start"
    return "start" if "start" in best.values() else "whole"


def evaluations_by_seed(trials: Iterable[TrialAnalysis]) -> dict[int, Evaluations]:
    """Return the evaluations of one repeat for each seed."""
    return {t.record.trial.training.seed: t.evaluations for t in trials if t.evaluations}


def _equivalence_reason(trials: Sequence[TrialAnalysis], measured: Measured) -> str | None:
    """Explain why the row is not equivalent, or why this was not decided; None if it is."""
    failed = list(_failed_checks(trials))
    if failed and not measured.baseline_repeats_itself and weakest_shown(trials) is None:
        return (
            "not checked: repeats of the baseline end with different weights; fix every seed in "
            f"the script ({failed[0]})"
        )
    if failed:
        return failed[0]
    lossy = why_not_equivalent(trials[0].record.trial)
    if lossy is not None:
        return f"not equivalent (lossy): {lossy}"
    if any(t.equivalence is None for t in trials):
        return f"equivalence not checked: {measured.no_baseline or 'no baseline'}"
    return None


def _failed_checks(trials: Sequence[TrialAnalysis]) -> Iterable[str]:
    return dict.fromkeys(
        f"{check.name}: {check.reason}"
        for found in _equivalences(trials)
        for check in found.checks
        if check.decisive and check.passed is not True
    )


def _notes(
    configuration: str,
    trials: Sequence[TrialAnalysis],
    measured: Measured,
    efficiency: Interval | None,
) -> Iterable[str]:
    first = trials[0].record.trial
    yield from _failed_checks(trials)
    reason = why_not_equivalent(first)
    if reason is not None:
        yield f"not equivalent (lossy): {reason}"
    if not measured.counts_samples:
        yield (
            "the samples of a step are not known: speeds are compared in steps per second, which "
            "is fair only if every configuration has the same global batch"
        )
    if (measured.speeds.two_speeds(configuration) or 0.0) > 0.5:
        yield "its repeats have two speeds, and the interval contains both"
    baseline = measured.baseline
    if baseline is not None and not _same_arithmetic(first, baseline):
        yield (
            f"no efficiency: the baseline ran in {baseline.training.arithmetic}, this in "
            f"{first.training.arithmetic}"
        )
    if len(measured.speeds.repeats[configuration]) == 1 and not measured.speeds.has_noise:
        yield "one repeat: the run-to-run noise is unknown"
    if baseline is not None:
        base = measured.speeds.repeats[baseline.configuration]
        if not set(base) & set(measured.speeds.repeats[configuration]):
            yield "no repeat in common with the baseline: no speedup"
    hashes = {t.record.result.weights_sha256 for t in trials if t.record.result is not None}
    if len({t.record.trial.training.seed for t in trials}) > 1:
        yield "each repeat has another seed"
    elif len(hashes) > 1:
        yield "its repeats end with weights that are not equal bit for bit"
    if efficiency is not None and efficiency.low > _SUPERLINEAR:
        yield (
            f"efficiency {efficiency.estimate:.2f} is above 1: smaller batches per core may fit "
            "the caches better, or the baseline was disturbed"
        )
    incomplete = [t.record.trial.id for t in trials if len(t.record.ranks) < first.placement.ranks]
    if incomplete:
        listed = ", ".join(map(str, incomplete))
        yield f"{listed}: records of some ranks are missing"
