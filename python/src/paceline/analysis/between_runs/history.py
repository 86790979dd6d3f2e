"""Runs below a directory by time, and where the same spec on the same machine changed its speed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.analysis.between_runs.differences import (
    comparable_spec,
    machine_identity,
    machine_name,
)
from paceline.analysis.between_runs.speeds import Speeds, read_speeds
from paceline.analysis.between_runs.two_runs import PairedRow, compare_runs
from paceline.analysis.statistics.intervals import Interval
from paceline.errors import DataError, PacelineWarning
from paceline.records.layout import RunFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfRun:
    """The fastest equivalent configuration of a workload."""

    workload: str
    configuration: str
    samples_per_s: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOfHistory:
    """One run, and its difference from the previous run of the same spec on the same machine."""

    path: str
    name: str
    created_unix_s: float | None
    commit: str | None
    has_local_changes: bool  # of the repository, uncommitted
    machine: str
    best: tuple[BestOfRun, ...]  # one for each workload that has any
    previous: str | None  # path of the run that it is compared with
    faster: tuple[PairedRow, ...]
    slower: tuple[PairedRow, ...]


def read_history(root: Path) -> list[RunOfHistory]:
    """Return the runs below `root` in order of time; warn of those that cannot be read."""
    speeds = dict(_readable(root))
    ordered = sorted(speeds, key=lambda path: speeds[path].manifest.get("created_unix_s") or 0.0)
    latest: dict[Hashable, Path] = {}
    found = []
    for path in ordered:
        kind = _kind(speeds[path].manifest)
        previous = latest.get(kind)
        found.append(_run(path, speeds[path], previous, speeds))
        if speeds[path].rates:
            latest[kind] = path
    return found


def _readable(root: Path) -> Iterator[tuple[Path, Speeds]]:
    for run in find_runs(root):
        try:
            yield run.root, read_speeds(run)
        except DataError as error:
            warnings.warn(f"left out: {error}", PacelineWarning, stacklevel=2)


def find_runs(root: Path) -> Iterator[RunFiles]:
    """Yield the run directories below `root`, and `root` itself if it is one.

    Searches that belong to a run are not listed apart.
    """
    for folder, folders, _ in os.walk(root):
        run = RunFiles(Path(folder))
        if run.manifest.exists():
            folders.clear()
            yield run
        folders.sort()


def _kind(manifest: Mapping[str, Any]) -> Hashable:
    spec = comparable_spec(manifest)
    return machine_identity(manifest), tuple(sorted(spec.items()))


def _run(
    path: Path, speeds: Speeds, previous: Path | None, others: Mapping[Path, Speeds]
) -> RunOfHistory:
    manifest = speeds.manifest
    git = manifest.get("git") or {}
    change = None if previous is None else compare_runs(others[previous], speeds)
    return RunOfHistory(
        path=str(path),
        name=str(manifest.get("name", path.name)),
        created_unix_s=manifest.get("created_unix_s"),
        commit=git.get("commit"),
        has_local_changes=bool(git.get("has_local_changes")),
        machine=machine_name(manifest),
        best=tuple(_best(speeds)),
        previous=None if previous is None else str(previous),
        faster=() if change is None else tuple(change.faster),
        slower=() if change is None else tuple(change.slower),
    )


def _best(speeds: Speeds) -> Iterator[BestOfRun]:
    for workload in speeds.workloads:
        rates = speeds.of_workload(workload)
        equivalent = [name for name in rates.repeats if speeds.equivalent[name]]
        best = rates.fastest(equivalent).leader if equivalent else None
        interval = None if best is None else rates.rate(best)
        if best is not None and interval is not None:
            yield BestOfRun(workload=workload, configuration=best, samples_per_s=interval)
