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
from zlib import crc32

import cv2
import numpy as np

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.plan.spec.extensions import WORKLOADS
from paceline.train.data.location import made_folder, require_new
from paceline.train.data.scenes import CLASSES, paint

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
