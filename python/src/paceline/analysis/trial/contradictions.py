"""Contradictions between the records of a run, which no run of Paceline's has.

Types and ranges of single values are checked when a file is read. Here values are compared with
each other, after a command has failed unexpectedly: records without a contradiction are not the
cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl

from paceline.analysis.trial.reading import (
    RankRecord,
    TrialRecord,
    load_manifest,
    load_trial,
    read_hosts,
    read_rank_samples,
)
from paceline.base.errors import DataError
from paceline.measure.records.layout import RankFiles, RunFiles, TrialFiles
from paceline.measure.records.rows import (
    CommunicationRow,
    EvaluationRow,
    SampleLogRow,
    StepRow,
    UpdateRow,
)
from paceline.measure.records.tables import read_table

_CLOCKS_S = 1.0  # by which clocks of a host and its GPUs may differ


class _Table(NamedTuple):
    """A table of a rank. key: columns of which no two rows have the same values."""

    path: Path
    kind: type
    key: tuple[str, ...] = ()
    spans: tuple[tuple[str, str], ...] = ()  # columns of times, of which the first is not later


def contradiction_in(run: RunFiles) -> str | None:
    """Return the first contradiction between the records of a run, or the first damage; None if
    there is none. It names the file."""
    try:
        return next(_of_run(run), None)
    except DataError as damage:
        return str(damage)


def _of_run(run: RunFiles) -> Iterator[str]:
    names = load_manifest(run).get("trials") or []
    if len(set(names)) < len(names):
        yield f"{run.manifest}: expected each trial once"
    for name, files in run.trials():
        record = load_trial(files)
        yield from _of_trial(name, record)
        for rank in record.ranks:
            yield from _of_rank(record, rank)
        yield from _of_hosts(files)


def _of_trial(name: str, record: TrialRecord) -> Iterator[str]:
    files, ranks = record.files, record.trial.placement.ranks
    if record.trial.id != name:
        yield f"{files.trial}: expected the id {name}, got {record.trial.id!r:.80}"
    if record.outcome is not None and record.outcome.trial_id != name:
        yield f"{files.outcome}: expected the trial {name}, got {record.outcome.trial_id!r:.80}"
    found = [rank.rank for rank in record.ranks]
    if any(rank >= ranks for rank in found):
        yield f"{files.root}: expected the ranks 0 to {ranks - 1}, found {max(found)}"
    if not record.finished:
        return
    if len(found) < ranks:
        yield f"{files.root}: expected {ranks} ranks of a finished trial, found {len(found)}"
    if record.result is None:
        yield f"{files.result}: expected the result of a finished trial, found no such file"
    elif min(record.result.steps, record.result.parameters) < 0:
        yield f"{files.result}: expected no negative count"


def _of_rank(record: TrialRecord, rank: RankRecord) -> Iterator[str]:
    files = record.files.rank(rank.rank)
    facts = rank.environment
    ranks = record.trial.placement.ranks
    if facts is not None and (facts.rank, facts.world_size) != (rank.rank, ranks):
        yield (
            f"{files.environment}: expected rank {rank.rank} of {ranks}, got {facts.rank} of "
            f"{facts.world_size}"
        )
    if rank.status is not None and rank.status.rank != rank.rank:
        yield f"{files.status}: expected rank {rank.rank}, got {rank.status.rank}"
    for span in rank.spans:
        if span.started_unix_s - span.ended_unix_s > _CLOCKS_S:
            yield f"{files.spans}: expected that {span.name} ends after its start"
    for table in _tables(files, is_continued=bool(rank.continuations)):
        frame = read_table(table.path, table.kind)
        yield from _of_table(table.path, frame, table.key, table.spans)


def _tables(files: RankFiles, *, is_continued: bool) -> Iterator[_Table]:
    yield _Table(files.steps, StepRow, ("step",))
    yield _Table(files.sample_log, SampleLogRow, ("step",))
    own = (("started_unix_s", "ended_unix_s"),)
    yield _Table(files.evaluations, EvaluationRow, ("steps", "metric"), own)
    # groups of the same name begin again after a failure
    key = () if is_continued else ("group", "sequence")
    asked = (("arrived_unix_s", "ended_unix_s"),)
    yield _Table(files.communication, CommunicationRow, key, asked)
    yield _Table(files.updates, UpdateRow)


def _of_table(
    path: Path, frame: pl.DataFrame, key: Sequence[str], spans: Sequence[tuple[str, str]]
) -> Iterator[str]:
    counts = frame.select(pl.selectors.integer())
    for name in counts.columns:
        least = counts[name].min()
        if isinstance(least, int) and least < 0:
            yield f"{path}: expected no negative {name}, got {least}"
    if key and frame.select(key).is_duplicated().any():
        yield f"{path}: expected each {' and '.join(key)} once"
    for first, last in spans:
        if (frame[first] - frame[last] > _CLOCKS_S).any():
            yield f"{path}: expected that {last} is not before {first}"


def _of_hosts(files: TrialFiles) -> Iterator[str]:
    for trace in read_hosts(files):
        path = files.host(trace.host).trace
        yield from _of_table(path, trace.samples, ("unix_s",), ())
    for _, host in files.hosts():
        yield from _of_table(host.ranks, read_rank_samples(host), ("unix_s", "rank", "pid"), ())
