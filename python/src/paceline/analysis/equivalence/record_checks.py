"""Checks of evaluations, and of updates that were made without a barrier."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from paceline.analysis.equivalence.checks import Check, not_decisive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.analysis.equivalence.tolerances import Tolerance
    from paceline.analysis.trial.evaluation import Evaluations

_MOST_NAMED = 3  # faulty updates in a message
_KEYS = ["worker", "sequence"]


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
