"""Synthetic images with masks: discs, squares and triangles on a noisy background."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.data.masks import Pair

CLASSES = 4  # background and three shapes
_COLOURS = np.array([(90, 90, 90), (200, 80, 60), (60, 180, 80), (70, 90, 210)], dtype=np.float64)
_NOISE = 40.0  # standard deviation of a pixel: colours overlap, so shapes matter too


class Shapes:
    """A map-style data set; sample `index` depends on (seed, index, size) alone."""

    def __init__(self, samples: int, size: int, seed: int) -> None:
        self._samples, self._size, self._seed = samples, size, seed

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Pair:
        """Return pixels (size, size, 3) and classes (size, size), both uint8."""
        rng = np.random.default_rng([self._seed, index])
        size = self._size
        rows, columns = np.mgrid[:size, :size]
        mask = np.zeros((size, size), dtype=np.uint8)
        for kind in rng.permutation([1, 2, 3, *rng.integers(1, CLASSES, 2)]):
            radius = rng.uniform(0.12, 0.28) * size
            y, x = rng.uniform(0.15, 0.85, 2) * size
            mask[_inside(int(kind), rows - y, columns - x, radius)] = kind
        noise = rng.normal(0, _NOISE, (size, size, 3))
        return np.clip(_COLOURS[mask] + noise, 0, 255).astype(np.uint8), mask


def _inside(
    kind: int, y: NDArray[np.float64], x: NDArray[np.float64], radius: float
) -> NDArray[np.bool_]:
    """Return which pixels a shape covers; y and x are relative to its centre."""
    covered: NDArray[np.bool_]
    if kind == 1:
        covered = y**2 + x**2 <= radius**2
    elif kind == 2:
        covered = np.maximum(np.abs(y), np.abs(x)) <= radius
    else:
        covered = (y <= radius) & (2 * np.abs(x) <= y + radius)
    return covered
