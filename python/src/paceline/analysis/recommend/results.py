"""Rows of several runs, from run directories and from files with results."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.analysis.compare import compare_run
from paceline.analysis.row import Row
from paceline.errors import DataError
from paceline.records.files import read_json, typed
from paceline.records.layout import RunFiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The rows of one run."""

    source: str  # run directory or file
    origin: str  # date, version and machine, where they are stated
    rows: tuple[Row, ...]
    link: str | None = None  # speed of the link between the nodes, where it is stated
    flags: tuple[str, ...] = ()  # doubts about the run, for example other load on the machine


def read_results(path: Path) -> Iterator[Results]:
    """Yield the results of a run directory, or of each run in a file.

    A file is the output of `paceline compare --json`, or the result of a benchmark that contains
    such output as `comparison`, or several `runs` with `rows` and the `speed` of the link.
    Raises DataError if there are no rows; NotComparable if no trial of a run has finished.
    """
    if path.is_dir():
        found = compare_run(RunFiles(path), require_baseline=False)
        yield Results(
            source=str(path),
            origin=_origin(found.manifest),
            rows=found.rows,
            flags=found.flags,
        )
        return
    document = read_json(path)
    origin = _origin(document)
    for part in document.get("runs") or [document.get("comparison", document)]:
        run = typed(part, _Part, path)
        if not run.rows:
            raise DataError(f"{path}: expected rows of `paceline compare --json`, found none")
        yield Results(
            source=str(path), origin=origin, rows=run.rows, link=run.speed, flags=run.flags
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    rows: tuple[Row, ...]
    speed: str | None = None
    flags: tuple[str, ...] = ()


def _origin(facts: Mapping[str, Any]) -> str:
    """Describe a run by the facts of its manifest, or of the file of a benchmark."""
    date, created_unix_s = facts.get("date"), facts.get("created_unix_s")
    if created_unix_s is not None:
        date = dt.datetime.fromtimestamp(created_unix_s, tz=dt.UTC).date().isoformat()
    version = (facts.get("versions") or {}).get("paceline")
    machine = (facts.get("host") or {}).get("cpu_model")
    stated = [date, version and f"version {version}", machine, facts.get("note")]
    return ", ".join(str(each) for each in stated if each)
