"""Synthetic images in class folders: fire, no_fire and smoke, in place of the paper's data sets.

A preset is the name of a workload, whose descriptor states number and sizes of the images. Image
`index` depends on (preset, seed, index) alone. So the bytes do not depend on the number of
threads, and the first N images are the same for every number of images.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zlib import crc32

import cv2
import numpy as np

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.plan.spec.extensions import WORKLOADS
from paceline.train.data.location import made_folder, require_new

# --- paint one outdoor scene of class fire, no_fire or smoke from a random generator -------------
#
# A landscape contains round objects in warm and grey colours, whatever the class. Flames and
# smoke plumes have the same colours, so shape and texture decide the class, not the mean colour.
# All textures are sums of octaves whose amplitude halves as the frequency doubles: natural images
# have such 1/f amplitude spectra (Field, J. Opt. Soc. Am. A 4, 1987). So JPEG files have natural
# sizes. Measured at JPEG qualities 78 to 90: median 1.3 bits per pixel (0.7 to 2.2) at 480 to 1080
# lines and 1.8 at 120 to 200 lines; four photographs among scikit-image's examples (astronaut,
# chelsea, coffee, rocket) have 0.9 to 2.4 at 300 to 512 lines. Decoding an image of `simple-big`
# to 224x224 pixels takes 1.9 ms on one core.

CLASSES = ("fire", "no_fire", "smoke")

# OpenCV's stubs know only Mat, so arrays of NDArray[np.float32] are typed Any.
Field = Any  # shape (height, width)
Canvas = Any  # shape (height, width, 3), RGB, 0..255

_SKIES = [(70, 120, 200), (150, 180, 225), (205, 205, 205), (110, 110, 120), (245, 140, 60)]
_GROUNDS = [(85, 120, 55), (120, 130, 70), (150, 125, 85), (95, 75, 55), (110, 110, 112)]
_OBJECTS = [(205, 95, 20), (235, 180, 50), (250, 225, 150), (60, 90, 40), (200, 200, 200),
            (120, 120, 125), (70, 70, 75)]  # fmt: skip
_FLAME_HEATS = (0.0, 0.3, 0.6, 1.0)
_FLAME_COLOURS = np.array([(110, 20, 5), (230, 90, 15), (255, 185, 55), (255, 250, 205)], float)


def paint(rng: np.random.Generator, kind: str, width: int, height: int) -> Any:
    """Return an image of class `kind`: uint8 RGB of shape (height, width, 3)."""
    canvas = _landscape(rng, width, height)
    for _ in range(int(rng.integers(3, 8))):
        _object(rng, canvas)
    for _ in range(int(rng.integers(1, 3))):
        if kind == "fire":
            _flame(rng, canvas)
        elif kind == "smoke":
            _plume(rng, canvas)
    return _photograph(rng, canvas)


def _noise(
    rng: np.random.Generator, height: int, width: int, *, cells: int = 3, stretch: float = 1.0
) -> Field:
    """Return 1/f noise of standard deviation 1; its coarsest octave has `cells` per short side.

    stretch: width of a cell divided by its height.
    """
    field: Field = np.zeros((height, width), np.float32)
    short, amplitude = min(height, width), np.float32(1)
    while cells <= short:
        rows, columns = max(2, cells * height // short), cells * width / short / stretch
        coarse: Field = rng.standard_normal((rows, max(2, int(columns))), np.float32)
        field += amplitude * cv2.resize(coarse, (width, height))
        cells, amplitude = cells * 2, amplitude / 2
    return field / max(field.std(), np.float32(1e-6))


def _choose(rng: np.random.Generator, colours: list[tuple[int, int, int]]) -> Canvas:
    colour = np.array(colours[int(rng.integers(len(colours)))])
    return np.float32(colour + rng.normal(0, 12, 3))


def _step(values: Field, edge: float) -> Field:
    """Return 0 where `values` < 0, 1 where they exceed `edge`, and a ramp between."""
    return np.clip(values / np.float32(edge), 0, 1)


def _blend(region: Canvas, colour: Canvas, alpha: Field) -> None:
    region += alpha[..., None] * (colour - region)


def _landscape(rng: np.random.Generator, width: int, height: int) -> Canvas:
    down = np.linspace(0, 1, height, dtype=np.float32)[:, None]
    upper, lower = _choose(rng, _SKIES), _choose(rng, _SKIES)
    clouds = _noise(rng, height, width, cells=2, stretch=2)[..., None]
    canvas = upper + down[..., None] * (lower - upper) + np.float32(12) * clouds
    texture = _noise(rng, height, width, cells=4, stretch=2)
    horizon = down - np.float32(rng.uniform(0.3, 0.65)) + np.float32(0.02) * texture
    light = (1 + np.float32(0.25) * texture)[..., None]
    _blend(canvas, _choose(rng, _GROUNDS) * light, _step(horizon, 0.01))
    return canvas


def _box(
    rng: np.random.Generator, canvas: Canvas, smallest: float, largest: float, aspect: float
) -> tuple[Canvas, Field, Field]:
    """Choose a box of the canvas; sizes are heights relative to the canvas.

    Returns the box, and the coordinates in it: across from -1 to 1, up from 0 to 1.
    """
    height, width = canvas.shape[:2]
    high = int(rng.uniform(smallest, largest) * height)
    wide = min(width, int(high * aspect * rng.uniform(0.7, 1.3)))
    left, top = (int(rng.integers(room + 1)) for room in (width - wide, height - high))
    across = np.linspace(-1, 1, wide, dtype=np.float32)[None, :]
    up = np.linspace(1, 0, high, dtype=np.float32)[:, None]
    return canvas[top : top + high, left : left + wide], across, up


def _object(rng: np.random.Generator, canvas: Canvas) -> None:
    """Paint a round object: a tree, a rock, a cloud or a lamp."""
    region, across, up = _box(rng, canvas, 0.12, 0.4, 1.2)
    noise = _noise(rng, *region.shape[:2])
    radius = np.sqrt(across**2 + (2 * up - 1) ** 2)
    colour = _choose(rng, _OBJECTS) * (1 + np.float32(0.15) * noise[..., None])
    _blend(region, colour, _step(np.float32(0.8) - radius + np.float32(0.08) * noise, 0.1))


def _flame(rng: np.random.Generator, canvas: Canvas) -> None:
    """Paint tongues that taper upwards around a white-hot core."""
    region, across, up = _box(rng, canvas, 0.3, 0.7, 0.8)
    noise = _noise(rng, *region.shape[:2], cells=4, stretch=0.4)
    width = np.float32(0.75) * (1 - up) ** 0.7
    heat = np.clip(width - np.abs(across) + np.float32(0.18) * noise * (0.4 + up), 0, 1)
    colour = np.stack([np.interp(heat, _FLAME_HEATS, c) for c in _FLAME_COLOURS.T], axis=-1)
    _blend(region, colour.astype(np.float32), _step(heat - np.float32(0.05), 0.15) * _step(up, 0.1))


def _plume(rng: np.random.Generator, canvas: Canvas) -> None:
    """Paint grey, translucent smoke that widens and leans as it rises."""
    region, across, up = _box(rng, canvas, 0.5, 0.95, 0.9)
    noise = _noise(rng, *region.shape[:2], cells=4)
    lean = np.float32(rng.uniform(-0.4, 0.4)) * up**1.5
    body = 0.15 + np.float32(0.6) * up - np.abs(across - lean) + np.float32(0.15) * noise * up
    grey = np.float32(rng.uniform(60, 220)) * (1 + np.float32(0.2) * noise[..., None])
    _blend(region, grey, _step(body, 0.3) * np.float32(0.95) * (1 - up**6))


def _photograph(rng: np.random.Generator, canvas: Canvas) -> Any:
    """Apply exposure, white balance, lens blur and sensor noise."""
    balance = np.float32(np.exp(rng.normal(0, 0.2) + rng.normal(0, 0.05, 3)))
    image: Canvas = cv2.GaussianBlur(canvas * balance, (0, 0), float(rng.uniform(0.3, 0.6)))
    grain = rng.standard_normal(image.shape[:2], np.float32) * np.float32(rng.uniform(3, 6))
    return np.clip(image + grain[..., None], 0, 255).astype(np.uint8)


# Nine of 25 images show fire and eight each of the other classes, so classes are slightly uneven.
_CLASS_CYCLE = (0, 2, 1, 0, 1, 2, 0, 2, 1, 0, 1, 0, 2, 1, 0, 2, 2, 0, 1, 0, 1, 2, 0, 2, 1)
_NAMES = ("IMG_{:04d}.jpg", "DSC{:05d}.JPG", "P{:07d}.jpg", "photo {:d}.jpeg", "frame-{:06d}.jpg")
_ASPECTS = (4 / 3, 3 / 2, 16 / 9, 1.0)


def synthesise(
    out_dir: Path,
    preset: str,
    images: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    *,
    workers: int | None = None,
) -> None:
    """Write images to `out_dir`/CLASS/NAME: either all of them or none.

    images: how many; None means the preset's number. progress(done, total) is called as images
    are finished. workers: threads; None means one per core (NumPy and OpenCV release the GIL).
    Raises UsageError for an unknown preset, fewer images than classes, or an `out_dir` that is
    not empty; EnvironmentLacks if the images cannot be written.
    """
    total = _checked_count(preset, images)
    if seed < 0:
        raise UsageError(f"seed: expected 0 or more, got {seed}")
    out_dir = Path(out_dir)
    require_new(out_dir)
    made_folder(out_dir.parent)
    partial = Path(tempfile.mkdtemp(dir=out_dir.parent, prefix=f".{out_dir.name}.partial-"))
    try:
        for name in CLASSES:
            (partial / name).mkdir()
        cv2.setNumThreads(0)
        with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
            written = pool.map(lambda i: _write(partial, preset, seed, i), range(total))
            for done, _ in enumerate(written, start=1):
                if progress is not None:
                    progress(done, total)
        partial.chmod(0o755)
        partial.replace(out_dir)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise EnvironmentLacks(
                f"{out_dir}: cannot be written ({error.strerror}); expected a writable disk with "
                "room for the images"
            ) from error
        raise


def class_of(index: int) -> str:
    """Return the class of image `index`, the same for every preset and seed."""
    return CLASSES[_CLASS_CYCLE[index % len(_CLASS_CYCLE)]]


def image_name(preset: str, seed: int, index: int) -> str:
    """Return the file name of an image in one of several cameras' styles; its number is unique."""
    style = int(_generator(preset, seed, index, stream=1).integers(len(_NAMES)))
    return _NAMES[style].format(1000 + index)


def image_bytes(preset: str, seed: int, index: int) -> bytes:
    """Return the JPEG file of an image."""
    rng = _generator(preset, seed, index, stream=0)
    low, high = WORKLOADS.get(preset).shorter_side
    short = int(rng.integers(low // 8, high // 8 + 1)) * 8
    long = round(short * _ASPECTS[int(rng.integers(len(_ASPECTS)))])
    width, height = (long, short) if rng.random() < 0.75 else (short, long)
    image = paint(rng, class_of(index), width, height)
    quality = int(rng.integers(78, 91))
    _, encoded = cv2.imencode(".jpg", image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    return bytes(encoded)


def _generator(preset: str, seed: int, index: int, *, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, crc32(preset.encode()), index, stream]))


def _checked_count(preset: str, images: int | None) -> int:
    workload = WORKLOADS.get(preset)
    if images is None:
        return workload.samples
    if images < len(CLASSES):
        raise UsageError(f"images: expected at least {len(CLASSES)}, one per class, got {images}")
    return images


def _write(folder: Path, preset: str, seed: int, index: int) -> None:
    target = folder / class_of(index) / image_name(preset, seed, index)
    target.write_bytes(image_bytes(preset, seed, index))
