"""A finished trial's files as typed values.

A row that its writer did not finish is passed over, and fields that this version does not know are
ignored; a field that is missing or damaged is an error that names the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from paceline.errors import DataError
from paceline.plan.trial import Trial
from paceline.records.files import read_json, read_jsonl
from paceline.records.rows import (
    CommunicationRow,
    HostSample,
    Outcome,
    RankEnvironment,
    RankSample,
    RankStatus,
    SpanRow,
    StepRow,
    TraceGap,
    TrainingResult,
)
from paceline.records.typed import document, rows, typed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paceline.records.layout import HostFiles, RankFiles, RunFiles, TrialFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank left behind."""

    rank: int
    spans: tuple[SpanRow, ...]
    steps: tuple[StepRow, ...]
    environment: RankEnvironment | None
    status: RankStatus | None

    @property
    def clock_offset_s(self) -> float:
        """Add to this rank's unix times to get rank 0's; 0 where it was not measured."""
        return 0.0 if self.environment is None else self.environment.clock_offset_s

    @property
    def clock_error_s(self) -> float:
        """How far off `clock_offset_s` may be; 0 on rank 0's own host."""
        return 0.0 if self.environment is None else self.environment.clock_error_s

    @property
    def host(self) -> str | None:
        if self.environment is not None:
            return self.environment.host
        return None if self.status is None else self.status.host

    def span(self, name: str) -> SpanRow | None:
        """The first span called `name`."""
        return next((s for s in self.spans if s.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTrace:
    """One host's sidecar trace; `header` is its first line (cores, interval, ...)."""

    host: str
    header: Mapping[str, Any]
    samples: tuple[HostSample, ...]
    ranks: tuple[RankSample, ...] = ()
    gaps: tuple[TraceGap, ...] = ()  # where the sidecar had died


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """Everything that one trial left behind."""

    trial: Trial
    files: TrialFiles
    outcome: Outcome | None
    result: TrainingResult | None
    ranks: tuple[RankRecord, ...]  # in order of rank
    hosts: tuple[HostTrace, ...]
    command: str | None

    @property
    def finished(self) -> bool:
        """Whether it ended well, so that it may be compared."""
        return self.outcome is not None and self.outcome.status == "ok"


def load_run(run: RunFiles) -> list[TrialRecord]:
    """All trials of a run, in the order in which the manifest planned them, the rest by name.

    Raises DataError if a file is damaged.
    """
    found = dict(run.trials())
    planned = load_manifest(run).get("trials", [])
    order = [i for i in planned if i in found] + [i for i in found if i not in planned]
    return [load_trial(found[trial_id]) for trial_id in order]


def load_manifest(run: RunFiles) -> dict[str, Any]:
    """The run's manifest; empty where there is none (trials that were started by hand)."""
    return read_json(run.manifest) if run.manifest.exists() else {}


def load_trial(files: TrialFiles) -> TrialRecord:
    """Read one trial. Raises DataError if a file that is there is damaged."""
    return TrialRecord(
        trial=read_trial(files),
        files=files,
        outcome=document(files.outcome, Outcome),
        result=document(files.result, TrainingResult),
        ranks=tuple(_load_rank(rank, rank_files) for rank, rank_files in files.ranks()),
        hosts=tuple(_load_host(name, host_files) for name, host_files in files.hosts()),
        command=files.command.read_text("utf-8") if files.command.exists() else None,
    )


def read_trial(files: TrialFiles) -> Trial:
    """The trial as it was planned. Raises DataError if `trial.json` is not one."""
    try:
        return Trial.model_validate_json(files.trial.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(f"{files.trial}: expected a trial of this version: {error}") from error


def read_environment(files: RankFiles) -> RankEnvironment | None:
    """What a rank really had, if it got as far as saying so."""
    return document(files.environment, RankEnvironment)


def read_communication(files: RankFiles) -> Iterator[CommunicationRow] | None:
    """A rank's operations as they ended; None where none were recorded.

    Not part of a TrialRecord: there may be very many.
    """
    path = files.communication
    if not path.exists():
        return None
    return (typed(row, CommunicationRow, path) for row in read_jsonl(path))


def read_result(files: TrialFiles) -> TrainingResult | None:
    """What rank 0 said at the end, if it got there."""
    return document(files.result, TrainingResult)


def _load_rank(rank: int, files: RankFiles) -> RankRecord:
    return RankRecord(
        rank=rank,
        spans=rows(files.spans, SpanRow),
        steps=rows(files.steps, StepRow),
        environment=read_environment(files),
        status=document(files.status, RankStatus),
    )


def _load_host(name: str, files: HostFiles) -> HostTrace:
    if not files.trace.exists():
        return HostTrace(host=name, header={}, samples=())
    header: dict[str, Any] = {}
    samples: list[HostSample] = []
    gaps: list[TraceGap] = []
    for row in read_jsonl(files.trace):
        if "unix_s" in row:
            samples.append(typed(row, HostSample, files.trace))
        elif "gap_started_unix_s" in row:
            gaps.append(typed(row, TraceGap, files.trace))
        else:
            header = row
    return HostTrace(
        host=name,
        header=header,
        samples=tuple(samples),
        ranks=rows(files.ranks, RankSample),
        gaps=tuple(gaps),
    )
