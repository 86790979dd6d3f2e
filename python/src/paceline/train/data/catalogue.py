"""Cache of synthetic data sets: each is made once, at its first use.

Every plan asks for their paths, so the libraries of data sets are imported only to make one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

from paceline.base.host.locks import exclusive_lock
from paceline.base.host.machine import default_cache_dir
from paceline.plan.spec.extensions import WORKLOADS
from paceline.plan.spec.models import Experiment, WorkloadRequest
from paceline.plan.spec.values import absolute_name
from paceline.plan.spec.workloads import first_given, reads_dataset

# Part of a data set's name: increase it when a change of `synth` or `scenes` changes any byte.
_GENERATOR_VERSION = 3
_LOCK_S = 1800.0  # enough for the biggest preset on a slow machine


def dataset_path(preset: str, *, images: int, seed: int, cache_dir: Path | None = None) -> Path:
    """Return the path at which `ensure_dataset` keeps a data set, existing or not."""
    name = f"{preset}-{images}-seed{seed}-v{_GENERATOR_VERSION}"
    return (cache_dir or default_cache_dir()) / "datasets" / name


def ensure_dataset(
    preset: str,
    *,
    images: int | None = None,
    seed: int = 0,
    cache_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    lock_timeout_s: float = _LOCK_S,
) -> Path:
    """Return the data set of a preset; make it (synthesis, then ingest) if it does not exist.

    One process makes it and others wait up to `lock_timeout_s`. It appears complete or not at all.
    progress(done, total): synthesis is a third of the total, ingest the rest.
    Raises UsageError for an unknown preset, TimedOut if another process holds the lock too long,
    EnvironmentLacks if the folder cannot be written.
    """
    from paceline.train.data.dataset import open_dataset  # noqa: PLC0415
    from paceline.train.data.location import made_folder  # noqa: PLC0415

    count = WORKLOADS.get(preset).samples if images is None else images
    target = dataset_path(preset, images=count, seed=seed, cache_dir=cache_dir)
    folder = target.parent
    if target.is_dir():
        open_dataset(target)  # raises if it is damaged
        return target
    made_folder(folder, "set PACELINE_CACHE to a writable folder")
    lock = folder / f".{target.name}.lock"
    busy = (
        f"{lock}: another process has held this lock for {lock_timeout_s:.0f} s to make the data "
        "set; wait for it or end it"
    )
    with exclusive_lock(lock, lock_timeout_s, busy):
        if not target.is_dir():
            _make(target, preset, count, seed, progress)
    open_dataset(target)
    return target


def _make(
    target: Path,
    preset: str,
    images: int,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    from paceline.train.data.ingest import ingest  # noqa: PLC0415  (imports Spark)
    from paceline.train.data.synth import synthesise  # noqa: PLC0415

    folder = target.parent / f".{target.name}.images"
    shutil.rmtree(folder, ignore_errors=True)  # a killed process may have left it

    def forward(offset: int) -> Callable[[int, int], None] | None:
        if progress is None:
            return None
        return lambda done, _: progress(offset + done, 3 * images)

    try:
        synthesise(folder, preset, images, seed, forward(0))
        ingest(folder, target, seed=seed, progress=forward(images))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def expected_datasets(experiment: Experiment) -> dict[str, str]:
    """Return the path or URL of each workload's data set, which may not exist yet, by its name."""
    return {w.name: _expected_dataset(experiment, w) for w in with_dataset(experiment)}


def _expected_dataset(experiment: Experiment, workload: WorkloadRequest) -> str:
    if workload.data is not None:
        return absolute_name(workload.data)
    images = samples_of(experiment, workload)
    return str(dataset_path(workload.name, images=images, seed=experiment.seed))


def with_dataset(experiment: Experiment) -> list[WorkloadRequest]:
    """Return the workloads that read a data set."""
    return [workload for workload in experiment.workloads if reads_dataset(workload)]


def samples_of(experiment: Experiment, workload: WorkloadRequest) -> int:
    """Return the number of samples to synthesise: for training, and those that are held out."""
    held_out = first_given("held_out_samples", workload, experiment) or 0
    return (workload.samples or WORKLOADS.get(workload.name).samples) + cast("int", held_out)
