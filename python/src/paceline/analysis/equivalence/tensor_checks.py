"""Checks of tensors: gradients and weights of a trial against its baseline.

The largest tensor of VGG16 has 411 MB, so tensors are read from the memory map in parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from paceline.analysis.equivalence.checks import Check, not_decisive
from paceline.analysis.equivalence.tolerances import Tolerance
from paceline.analysis.trial.reading import TrialRecord
from paceline.base.errors import DataError, NotComparable
from paceline.measure.records.phases import (
    EARLY,
    EARLY_STEPS,
    FINAL,
    ROUNDOFF,
    replay_point,
    replayed_after,
)

FINAL_WEIGHTS, REPLAY = "final_weights", "replay_"  # names of checks
_LEAST_SHARE = 2.0**-7
_PART_ELEMENTS = 1 << 20
_TYPES = {"F32", "F64", "I64", "I32", "U8", "BOOL"}  # of parameters and buffers


def gradient_check(trial: TrialRecord, baseline: TrialRecord, allowed: Tolerance) -> Check:
    name = "first_gradient"
    if _same_bits(trial, baseline):
        return _not_needed(name, allowed.gradient)
    ours, theirs = trial.files.gradient, baseline.files.gradient
    if not (ours.exists() and theirs.exists()):
        return Check(name=name, passed=None, reason=_no_tensors("gradient", ours))
    least = ROUNDOFF["fp32"] / allowed.gradient
    return _compared_gradients(name, (ours, theirs), allowed.gradient, least, allowed.noise)


def _compared_gradients(
    name: str, files: tuple[Path, Path], limit: float, least: float, noise: Collection[str]
) -> Check:
    """Compare two gradients.

    The gradient of a tensor may be nearly zero. Then it is compared with a share `least` of the
    whole gradient, and one that is known to be noise with all of it.
    """
    ours, theirs = files
    try:
        differences = tensor_differences(ours, theirs)
    except NotComparable as error:
        return Check(name=name, passed=False, reason=str(error))
    whole = math.hypot(*(d.baseline_l2 for d in differences))
    scales = {
        d.name: whole if d.name in noise else d.baseline_l2 + least * whole for d in differences
    }
    return _worst(name, differences, scales, limit, "times its gradient's norm")


def weights_check(
    trial: TrialRecord, baseline: TrialRecord, allowed: Tolerance
) -> tuple[Check, float | None]:
    """Compare the final weights; return the check and the largest absolute difference."""
    if _same_bits(trial, baseline):
        reason = "equal bit for bit (SHA-256)"
        check = Check(
            name=FINAL_WEIGHTS, passed=True, reason=reason, value=0.0, tolerance=allowed.weights
        )
        return check, 0.0
    check, largest = _point_check(FINAL_WEIGHTS, FINAL, trial, baseline, allowed)
    if not allowed.weights_judged and largest is not None and math.isfinite(largest):
        check = not_decisive(check, allowed)
    return check, largest


def early_weights_check(
    trial: TrialRecord, baseline: TrialRecord, allowed: Tolerance
) -> Check | None:
    """Compare the weights after `EARLY_STEPS` steps; None for a shorter training."""
    if allowed.steps <= EARLY_STEPS:
        return None
    name = f"weights_{EARLY}"
    if _same_bits(trial, baseline):
        return _not_needed(name, None)
    check, _ = _point_check(name, EARLY, trial, baseline, allowed)
    if check.passed is False and not allowed.judges(EARLY):
        return not_decisive(check, allowed)
    # records of older versions have none
    return dataclasses.replace(check, decisive=check.passed is not None)


def replay_checks(trial: TrialRecord, baseline: TrialRecord, allowed: Tolerance) -> list[Check]:
    """Compare the weights after the replayed steps; an impossible comparison does not count."""
    found = []
    for first in replayed_after(allowed.steps):
        point = replay_point(first)
        name = f"{REPLAY}{first}"
        replayed = None if trial.result is None else trial.result.replayed
        if replayed is not None and point in replayed.faults:
            check = Check(name=name, passed=False, reason=replayed.faults[point])
        elif replayed is not None and point in replayed.missing:
            check = Check(name=name, passed=None, reason=replayed.missing[point])
        else:
            check, _ = _point_check(name, point, trial, baseline, allowed, least=_LEAST_SHARE)
            files = trial.files.gradient_at(point), baseline.files.gradient_at(point)
            if check.passed and all(file.exists() for file in files):
                gradient = _compared_gradients(
                    name, files, allowed.at(point), _LEAST_SHARE, allowed.noise
                )
                check = max(check, gradient, key=lambda c: (not c.passed, c.value or 0.0))
        found.append(dataclasses.replace(check, decisive=check.passed is not None))
    return found


def _point_check(
    name: str,
    point: str,
    trial: TrialRecord,
    baseline: TrialRecord,
    allowed: Tolerance,
    *,
    least: float = 0.0,
) -> tuple[Check, float | None]:
    """Compare the weights at a point: all but noise.

    The limit of each tensor is a share of the distance that training moved it. least: share of the
    distance of all trained parameters that is added to it, so that rounding of a tensor which
    hardly moves is none. Return the check and the largest absolute difference.
    """
    limit, steps = allowed.at(point), allowed.steps_until(point)
    ours, theirs = trial.files.weights_at(point), baseline.files.weights_at(point)
    if baseline.result is None or not (ours.exists() and theirs.exists()):
        return Check(name=name, passed=None, reason=_no_tensors("weights", ours)), None
    try:
        differences = tensor_differences(ours, theirs)
    except NotComparable as error:
        return Check(name=name, passed=False, reason=str(error)), None
    largest = max((d.max_abs for d in differences), default=0.0)
    moved_l2 = {FINAL: baseline.result.update_l2, **baseline.result.replayed.moved_l2}
    moved = moved_l2.get(point, {})
    unknown = sorted(d.name for d in differences if d.name not in moved)
    if unknown:
        reason = f"the baseline did not record its update of {', '.join(unknown[:3])}"
        return Check(name=name, passed=None, reason=reason), largest
    trained = tensor_names(baseline.files.gradient) & moved.keys() if least else set()
    floor = least * math.hypot(*(moved[tensor] for tensor in trained))
    # The distance that training moved each tensor is at least its rounding in these steps.
    rounding = ROUNDOFF["fp32"] * steps / limit if steps else 0
    scales = {d.name: moved[d.name] + rounding * d.baseline_l2 + floor for d in differences}
    judged = [d for d in differences if d.name not in allowed.noise]
    check = _worst(name, judged, scales, limit, "times the distance that training moved it")
    return check, largest


def _worst(
    name: str,
    differences: list[TensorDifference],
    scales: Mapping[str, float],
    allowed: float,
    unit: str,
) -> Check:
    """Check every tensor; report the one with the largest relative difference."""
    relative = {d.name: _ratio(d.difference_l2, scales[d.name]) for d in differences}
    if not relative:
        return Check(name=name, passed=None, reason="the files contain no tensors")
    worst = max(relative, key=lambda tensor: _nan_as_infinite(relative[tensor]))
    value = relative[worst]
    reason = (
        f"{worst} differs most, by {value:.2g} {unit}"
        if math.isfinite(value)
        else f"{worst} contains a value that is not finite, or differs where the baseline is zero"
    )
    return Check(name=name, passed=value <= allowed, reason=reason, value=value, tolerance=allowed)


def _ratio(difference: float, scale: float) -> float:
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / scale


def _nan_as_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _same_bits(trial: TrialRecord, baseline: TrialRecord) -> bool:
    ours, theirs = trial.result, baseline.result
    return ours is not None and theirs is not None and ours.weights_sha256 == theirs.weights_sha256


def _not_needed(name: str, tolerance: float | None) -> Check:
    reason = "not needed: the final weights are equal bit for bit"
    return Check(name=name, passed=True, reason=reason, value=0.0, tolerance=tolerance)


def _no_tensors(what: str, ours: Path) -> str:
    side = "the baseline's" if ours.exists() else "its own"
    return f"{side} {what} do not exist, so they cannot be compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """Difference of one tensor from the baseline's; NaN where a value is not finite."""

    name: str
    difference_l2: float
    baseline_l2: float
    max_abs: float


def tensor_names(path: Path) -> set[str]:
    """Return the names of the tensors of a file; none if it does not exist.

    Raises DataError if it cannot be read.
    """
    if not path.exists():
        return set()
    try:
        with safe_open(str(path), framework="numpy") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: expected a readable safetensors file: {error}") from error


def tensor_differences(ours: Path, baseline: Path) -> list[TensorDifference]:
    """Compare every tensor, in order of name.

    Raises NotComparable if names, shapes or types differ, or a tensor is of another type than the
    weights, counters and running statistics of fp32 models; DataError if a file cannot be read.
    """
    try:
        with (
            safe_open(str(ours), framework="numpy") as a,
            safe_open(str(baseline), framework="numpy") as b,
        ):
            names = sorted(b.keys())
            if sorted(a.keys()) != names:
                odd = sorted(set(a.keys()) ^ set(names))
                raise NotComparable(
                    f"{ours}: expected the tensors of {baseline}; only in one of them: {odd}"
                )
            return [_difference(name, a, b, ours) for name in names]
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{ours} or {baseline}: expected readable safetensors files: {error}"
        ) from error


def _difference(name: str, ours: Any, baseline: Any, path: Path) -> TensorDifference:
    a, b = ours.get_slice(name), baseline.get_slice(name)
    types = {a.get_dtype(), b.get_dtype()}
    if a.get_shape() != b.get_shape() or len(types) > 1 or not types <= _TYPES:
        raise NotComparable(
            f"{path}: tensor {name}: expected {b.get_dtype()} of shape {b.get_shape()}, "
            f"got {a.get_dtype()} {a.get_shape()} (baseline: {b.get_dtype()})"
        )
    squares = base = 0.0
    largest = 0.0
    for x, y in _parts(name, ours, baseline, a.get_shape()):
        difference = x.astype(np.float64) - y.astype(np.float64)
        squares += float(np.vdot(difference, difference))
        base += float(np.vdot(y.astype(np.float64), y.astype(np.float64)))
        if difference.size:
            # np.maximum keeps NaN, max does not
            largest = float(np.maximum(largest, np.abs(difference).max()))
    return TensorDifference(
        name=name,
        difference_l2=math.sqrt(squares),
        baseline_l2=math.sqrt(base),
        max_abs=largest,
    )


def _parts(
    name: str, ours: Any, baseline: Any, shape: list[int]
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    if not shape:
        yield ours.get_tensor(name), baseline.get_tensor(name)
        return
    a, b = ours.get_slice(name), baseline.get_slice(name)
    rows = max(1, _PART_ELEMENTS // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        end = min(start + rows, shape[0])
        yield a[start:end], b[start:end]
