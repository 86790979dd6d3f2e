"""Differences between two safetensors files, tensor by tensor, in bounded memory.

The largest tensor of VGG16 has 411 MB, so tensors are read from the memory map in parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from paceline.errors import DataError, NotComparable

_PART_ELEMENTS = 1 << 20
_TYPES = {"F32", "F64", "I64", "I32", "U8", "BOOL"}  # of parameters and buffers


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
