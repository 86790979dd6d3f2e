"""Synthetic photos in class folders: fire, no_fire and smoke, a stand-in for the paper's photos.

Photo `index` of a preset is a function of (preset, seed, index) alone: the same bytes whoever
paints it, and the first N photos are the same however many are asked for.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from paceline.data._scenes import CLASSES, paint
from paceline.errors import PacelineError, TimedOut, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Part of the name of cached data sets: raise it when a change here changes any byte.
GENERATOR_VERSION = 1

# 25 photos: nine with fire, eight of each other class, so that classes are slightly uneven.
_CLASS_CYCLE = (0, 2, 1, 0, 1, 2, 0, 2, 1, 0, 1, 0, 2, 1, 0, 2, 2, 0, 1, 0, 1, 2, 0, 2, 1)
_NAMES = ("IMG_{:04d}.jpg", "DSC{:05d}.JPG", "P{:07d}.jpg", "photo {:d}.jpeg", "frame-{:06d}.jpg")
_IN_PROCESS_PHOTOS = 64  # starting a worker costs as much as painting about this many small ones
_WORKER_SILENCE_S = 120.0
_WORKER_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Preset:
    """How many photos, and between which sizes (of the shorter side, in pixels)."""

    code: int  # part of each photo's seed
    images: int
    shorter_side: tuple[int, int]


PRESETS = {
    "complex-small": Preset(code=1, images=791, shorter_side=(480, 1080)),
    "simple-big": Preset(code=2, images=6003, shorter_side=(480, 864)),
    "tiny": Preset(code=3, images=96, shorter_side=(120, 200)),
}
_ASPECTS = (4 / 3, 3 / 2, 16 / 9, 1.0)


@dataclass(frozen=True, slots=True)
class SynthSummary:
    """What was painted."""

    out_dir: Path
    preset: str
    seed: int
    images: int
    class_counts: dict[str, int]
    total_bytes: int


def synthesise(
    out_dir: Path,
    preset: str,
    images: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    *,
    workers: int | None = None,
) -> SynthSummary:
    """Paint photos into `out_dir`/CLASS/NAME; all of them or nothing.

    images: how many; None means as many as the preset has. progress(done, total) is called as
    photos are finished. workers: processes; None means one a core.
    Raises UsageError for an unknown preset, a number below one photo a class, or an `out_dir`
    that holds something already.
    """
    total = _checked_images(preset, images)
    if seed < 0:
        raise UsageError(f"seed: expected 0 or more, got {seed}")
    out_dir = Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UsageError(
            f"{out_dir}: expected a new or empty folder for the photos, but it holds something; "
            "remove it or name another"
        )
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=out_dir.parent, prefix=f".{out_dir.name}.partial-"))
    try:
        for name in CLASSES:
            (partial / name).mkdir()
        _paint_all(partial, preset, seed, total, progress, workers)
        partial.chmod(0o755)
        partial.replace(out_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return _summary(out_dir, preset, seed, total)


def class_of(index: int) -> str:
    """Class of photo `index`, the same for every preset and seed."""
    return CLASSES[_CLASS_CYCLE[index % len(_CLASS_CYCLE)]]


def photo_name(preset: str, seed: int, index: int) -> str:
    """File name of a photo, as cameras and people give them; unique by its number."""
    style = int(_generator(preset, seed, index, stream=1).integers(len(_NAMES)))
    return _NAMES[style].format(1000 + index)


def photo_bytes(preset: str, seed: int, index: int) -> bytes:
    """The JPEG file of a photo."""
    rng = _generator(preset, seed, index, stream=0)
    low, high = PRESETS[preset].shorter_side
    short = int(rng.integers(low // 8, high // 8 + 1)) * 8
    long = round(short * _ASPECTS[int(rng.integers(len(_ASPECTS)))])
    width, height = (long, short) if rng.random() < 0.75 else (short, long)
    picture = paint(rng, class_of(index), width, height)
    quality = int(rng.integers(78, 91))
    _, encoded = cv2.imencode(".jpg", picture[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    return bytes(encoded)


def _generator(preset: str, seed: int, index: int, *, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, PRESETS[preset].code, index, stream]))


def _checked_images(preset: str, images: int | None) -> int:
    if preset not in PRESETS:
        raise UsageError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    if images is None:
        return PRESETS[preset].images
    if images < len(CLASSES):
        raise UsageError(
            f"images: expected at least {len(CLASSES)}, one a class, got {images}",
        )
    return images


def _summary(out_dir: Path, preset: str, seed: int, total: int) -> SynthSummary:
    counts = dict.fromkeys(CLASSES, 0)
    for index in range(total):
        counts[class_of(index)] += 1
    size = sum(file.stat().st_size for file in out_dir.rglob("*") if file.is_file())
    return SynthSummary(out_dir, preset, seed, total, counts, size)


def _paint_all(
    folder: Path,
    preset: str,
    seed: int,
    total: int,
    progress: Callable[[int, int], None] | None,
    workers: int | None,
) -> None:
    count = min(workers or len(os.sched_getaffinity(0)), total)
    if count == 1 or (workers is None and total <= _IN_PROCESS_PHOTOS):
        finished = paint_share(folder, preset, seed, range(total))
    else:
        finished = _paint_in_processes(folder, preset, seed, total, count)
    for done, _ in enumerate(finished, start=1):
        if progress is not None:
            progress(done, total)


def paint_share(folder: Path, preset: str, seed: int, indices: Sequence[int]) -> Iterator[int]:
    """Paint the photos `indices` into `folder`/CLASS; yields each index when it is written."""
    cv2.setNumThreads(0)
    for index in indices:
        target = folder / class_of(index) / photo_name(preset, seed, index)
        target.write_bytes(photo_bytes(preset, seed, index))
        yield index


def _paint_in_processes(
    folder: Path, preset: str, seed: int, total: int, count: int
) -> Iterator[int]:
    """Yield the indices as `count` fresh interpreters finish them.

    Not multiprocessing: its spawn runs the caller's main script again, and fork is unsafe beside
    threads. A worker writes a line a photo; it ends by itself when nobody reads them any more.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "paceline.data._paint_worker", str(folder), preset]
            + [str(number) for number in (seed, worker, total, count)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for worker in range(count)
    ]
    try:
        yield from _collect(processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate(timeout=_WORKER_END_S)


def _collect(processes: list[subprocess.Popen[bytes]]) -> Iterator[int]:
    with selectors.DefaultSelector() as selector:
        for process in processes:
            assert process.stdout is not None
            selector.register(process.stdout.fileno(), selectors.EVENT_READ, process)
        rests = dict.fromkeys(selector.get_map(), b"")
        while selector.get_map():
            ready = selector.select(_WORKER_SILENCE_S)
            if not ready:
                raise TimedOut(
                    f"painting photos: none was finished in {_WORKER_SILENCE_S:.0f} s; is the "
                    "machine out of memory or the disk stuck? Run the command again"
                )
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                *lines, rests[key.fd] = (rests[key.fd] + chunk).split(b"\n")
                yield from map(int, lines)
                if not chunk:
                    selector.unregister(key.fd)
                    _check_ended(key.data)


def _check_ended(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=_WORKER_END_S)
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["without a message"]
        raise PacelineError(
            f"painting photos: a worker ended with status {process.returncode}: {last[0]}; is "
            "there room on the disk and in memory?"
        )
