"""Checks of evaluations, of replicas, and of updates that were made without a barrier.

Over many steps rounding alone moves evaluations apart, so they do not decide whether trainings are
equivalent. A difference that is larger than the one between two seeds is still worth a look.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import polars as pl

from paceline.analysis.equivalence.checks import Check, not_decisive
from paceline.analysis.equivalence.sample_log import some
from paceline.analysis.equivalence.tolerances import Tolerance
from paceline.analysis.statistics.intervals import CONFIDENCE, spread_of_pairs
from paceline.analysis.trial.evaluation import Evaluations
from paceline.analysis.trial.reading import TrialRecord
from paceline.measure.records.files import document
from paceline.measure.records.rows import RankWeights

REPLICAS = "replicas"  # name of a check
_MOST_NAMED = 3  # faulty updates in a message
_KEYS = ["worker", "sequence"]
_UNKNOWN_SPREAD = (
    "the spread over seeds was not measured (vary_seed = true with repeats measures it)"
)
_UNMEASURED = 0.05  # of the baseline's value: a difference that is named where no seed was repeated


def evaluation_check(
    ours: Evaluations | None, theirs: Evaluations | None, allowed: Tolerance
) -> Check:
    """Compare all values with the baseline's.

    They follow from the weights, so they may differ as the final weights may: relative to the
    largest value of the metric. A metric that counts samples may also differ by one sample, whose
    scores are nearly equal. A value that is finite in one of them only fails the check.
    """
    name = "evaluation"
    if ours is None or theirs is None:
        return Check(name=name, passed=None, reason="a rank did not record its evaluations")
    if not np.array_equal(ours.steps, theirs.steps) or ours.metrics.keys() != theirs.metrics.keys():
        reason = "other evaluations or metrics than the baseline"
        return Check(name=name, passed=False, reason=reason)
    worst, value, where = -math.inf, 0.0, "no metric"
    for metric, step, difference, scale, slack in _differences(ours, theirs):
        beyond = _relative(difference - slack, scale)
        if math.isnan(beyond) or beyond > worst:
            worst, value = beyond, _relative(difference, scale)
            where = f"{metric} after {step} steps"
    reason = f"{where} differs most, by {value:.2g} of the metric's largest value"
    if math.isnan(worst):
        reason = f"{where} is a finite number in one of the two trainings only"
    check = Check(
        name=name,
        passed=worst <= allowed.weights,
        reason=reason,
        value=value,
        tolerance=allowed.weights,
    )
    return check if allowed.weights_judged or math.isnan(worst) else not_decisive(check, allowed)


def _differences(
    ours: Evaluations, theirs: Evaluations
) -> Iterator[tuple[str, int, float, float, float]]:
    """Yield metric, steps, absolute difference, scale and the resolution of the metric."""
    for metric, values in theirs.metrics.items():
        scale = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
        slack = theirs.resolution.get(metric, 0.0) * (1 + 1e-9)
        for number, a, b in zip(theirs.steps, ours.metrics[metric], values, strict=True):
            yield metric, int(number), _distance(float(a), float(b)), scale, slack


def _distance(ours: float, theirs: float) -> float:
    """Return the absolute difference: 0 for two NaN, NaN if it is not finite."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    distance = abs(ours - theirs)
    return distance if math.isfinite(distance) else math.nan


def _relative(difference: float, scale: float) -> float:
    """Return the difference as a share of the scale; infinite or NaN where that is 0."""
    if scale:
        return difference / scale
    return math.inf * difference if difference else 0.0


def unexplained_evaluations(
    ours: Mapping[int, Evaluations], baselines: Mapping[int, Evaluations]
) -> list[str]:
    """Name each metric whose last value differs by more than seeds explain, and say if their spread
    was not measured.

    ours, baselines: the evaluations of one trial for each seed.
    """
    common = sorted(ours.keys() & baselines.keys())
    if not common:
        return []
    found = []
    for metric in baselines[common[0]].metrics:
        own = _last(metric, [ours[seed] for seed in common])
        theirs = _last(metric, [baselines[seed] for seed in common])
        if len(own) < len(common) or len(theirs) < len(common):
            continue
        every = _last(metric, list(baselines.values()))
        value, expected = statistics.median(own), statistics.median(theirs)
        resolution = max(baselines[seed].resolution.get(metric, 0.0) for seed in common)
        limit, words = _explained(every, expected)
        if abs(value - expected) > max(limit, 1.5 * resolution):
            found.append(f"{metric} ends at {value:.3g}, the baseline's at {expected:.3g}{words}")
    return [*found, _UNKNOWN_SPREAD] if found and len(baselines) < 2 else found


def _explained(values: Sequence[float], expected: float) -> tuple[float, str]:
    """Return the largest difference that two seeds explain, and the words for it."""
    if len(values) < 2:
        return _UNMEASURED * abs(expected), ""
    limit = spread_of_pairs(np.array(values))
    share = f"{100 * CONFIDENCE:g} %"
    return limit, f"; two of its {len(values)} seeds differ by at most {limit:.2g} in {share}"


def _last(metric: str, evaluations: Sequence[Evaluations]) -> list[float]:
    """Return the last values that are known and finite."""
    values = [float(e.metrics[metric][-1]) for e in evaluations if metric in e.metrics]
    return [value for value in values if math.isfinite(value)]


def update_check(rows: pl.DataFrame, bound_steps: int | None) -> Check:
    """Check that every shard applied every pushed update once, and that the bound was kept.

    bound_steps: largest lead of a worker over the slowest one; None for no bound.
    """
    pushed = rows.filter(pl.col("event") == "pushed")
    applied = rows.filter(pl.col("event") == "applied")
    counts = applied.group_by(_KEYS).agg(
        pl.len().alias("applied"), pl.col("rank").n_unique().alias("ranks")
    )
    joined = pushed.join(counts, on=_KEYS, how="full", coalesce=True).with_columns(
        pl.col("applied", "ranks", "shards").fill_null(0)
    )
    faults = [
        *_named(joined.filter(pl.col("ranks") < pl.col("shards")), "lost"),
        *_named(joined.filter(pl.col("applied") > pl.col("ranks")), "applied twice"),
        *_named(joined.filter(pl.col("ranks") > pl.col("shards")), "applied, but never pushed"),
    ]
    lead = applied["lead_steps"].max()
    if bound_steps is not None and isinstance(lead, int) and lead > bound_steps:
        faults.append(f"a worker was {lead} steps ahead of the slowest, the bound is {bound_steps}")
    reason = f"{pushed.height} updates, each applied once by every shard"
    return Check(name="updates", passed=not faults, reason="; ".join(faults) or reason)


def _named(rows: pl.DataFrame, fault: str) -> list[str]:
    if rows.is_empty():
        return []
    places = rows.sort(_KEYS).head(_MOST_NAMED).select(_KEYS).iter_rows()
    named = ", ".join(f"{sequence} of rank {worker}" for worker, sequence in places)
    more = "" if rows.height <= _MOST_NAMED else f" and {rows.height - _MOST_NAMED} more"
    return [f"update {named}{more} was {fault}"]


def replicas_check(trial: TrialRecord) -> Check:
    """Check that all replicas of a trial ended with equal weights and buffers, bit for bit."""
    name = REPLICAS
    found = _rank_weights(trial)
    silent = sorted(rank for rank, weights in found.items() if weights is None)
    if silent or not found:
        listed = ", ".join(map(str, silent))
        reason = f"rank {listed} did not record checksums of its final weights"
        return Check(name=name, passed=None, reason=reason, decisive=False)
    known = [weights for weights in found.values() if weights is not None]
    local = {buffer for weights in known for buffer in weights.local}
    places: dict[str, dict[str, str]] = {}  # by tensor and checksum: the first place
    for rank, weights in zip(found, known, strict=True):
        for number, replica in enumerate(weights.replicas):
            place = f"replica {number - 1} of rank {rank}" if number else f"rank {rank}"
            for tensor in replica.keys() - local:
                places.setdefault(tensor, {}).setdefault(replica[tensor], place)
    different = sorted(tensor for tensor, sums in places.items() if len(sums) > 1)
    if different:
        first, other, *_ = places[different[0]].values()
        more = f" and {len(different) - 1} more tensors" if len(different) > 1 else ""
        reason = f"{other} ended with another {different[0]}{more} than {first}"
        return Check(name=name, passed=False, reason=reason)
    count = sum(max(1, len(weights.replicas) - 1) for weights in known)
    reason = f"{len(places)} tensors of {count} replicas are equal, bit for bit"
    if local:
        reason += f"; not compared, because batch_norm is per-replica: {', '.join(sorted(local))}"
    return Check(name=name, passed=True, reason=reason)


def every_step_check(trial: TrialRecord, baseline: TrialRecord) -> Check:
    """Check that each step changed the weights, if it changed the baseline's."""
    name = "every_step"
    ours, theirs = _unchanged_after(trial), _unchanged_after(baseline)
    if ours is None or theirs is None:
        reason = "no rank recorded in which steps its weights changed"
        return Check(name=name, passed=None, reason=reason, decisive=False)
    lost = sorted(step - 1 for step in ours - theirs)
    if lost:
        reason = f"the weights did not change in step {some(lost)}: an update was lost"
        return Check(name=name, passed=False, reason=reason)
    return Check(name=name, passed=True, reason="every step changed the weights")


def _unchanged_after(record: TrialRecord) -> set[int] | None:
    """Return the steps after which no rank's weights had changed; None if that is not known.

    A rank may own parts that a step does not use, such as rows of an embedding.
    """
    known = [w.unchanged_after for w in _rank_weights(record).values() if w is not None]
    found = [set(steps) for steps in known if steps is not None]
    return set.intersection(*found) if found else None


def _rank_weights(record: TrialRecord) -> dict[int, RankWeights | None]:
    return {r.rank: document(record.files.rank(r.rank).weights, RankWeights) for r in record.ranks}
