"""Smooth random fields with the spectrum of natural images, and small drawing arithmetic.

Natural photos have amplitude spectra close to 1/f (Field, J. Opt. Soc. Am. A 4, 1987). A sum of
octaves of interpolated white noise whose amplitude halves as the frequency doubles has it too,
and costs a few resizes instead of a Fourier transform of the whole picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Field = Any  # NDArray[np.float32]; OpenCV's stubs know only Mat


def octaves(
    rng: np.random.Generator,
    height: int,
    width: int,
    *,
    cells: int = 3,
    levels: int = 6,
    stretch: float = 1.0,
) -> NDArray[np.float32]:
    """A field of shape (height, width), mean about 0 and standard deviation about 1.

    cells: noise cells along the shorter side at the coarsest octave.
    stretch: above 1 the cells are wider than high (ground, fog), below 1 higher than wide.
    """
    field: Field = np.zeros((height, width), dtype=np.float32)
    short = min(height, width)
    amplitude, total = 1.0, 0.0
    for level in range(levels):
        per_side = cells * 2**level
        if per_side > short:
            break
        rows = max(2, min(height, round(per_side * height / short)))
        columns = max(2, min(width, round(per_side * width / short / stretch)))
        coarse = rng.standard_normal((rows, columns), dtype=np.float32)
        field += amplitude * cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR)
        total += amplitude**2
        amplitude *= 0.5
    # Linear interpolation takes about half of the variance of white noise away.
    result: NDArray[np.float32] = field / np.float32(np.sqrt(total * 0.45))
    return result


def smoothstep(low: float, high: float, values: Field) -> Field:
    """0 below `low`, 1 above `high`, a cubic between them."""
    t = np.clip((values - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    return t * t * (np.float32(3.0) - np.float32(2.0) * t)


def blend(region: Field, colour: Field, alpha: Field) -> None:
    """Lay `colour` (3,) or (h, w, 3) over `region` (h, w, 3) in place; alpha (h, w) in 0..1."""
    region += alpha[..., None] * (colour - region)


def ramp(values: Field, stops: list[tuple[float, tuple[int, int, int]]]) -> Field:
    """Colours (h, w, 3) of `values` (h, w) by linear interpolation between `stops`."""
    where = np.array([stop for stop, _ in stops], dtype=np.float32)
    table = np.array([colour for _, colour in stops], dtype=np.float32)
    steps = np.linspace(where[0], where[-1], 256, dtype=np.float32)
    lookup = np.stack([np.interp(steps, where, table[:, c]) for c in range(3)], axis=1)
    scale = np.float32(255.0) / (where[-1] - where[0])
    index = np.clip((values - where[0]) * scale, 0, 255).astype(np.uint8)
    return lookup.astype(np.float32)[index]
