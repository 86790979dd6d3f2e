"""Export to OpenMetrics: text with timestamps, from which promtool makes blocks of Prometheus
(https://prometheus.io/docs/prometheus/latest/storage/#backfilling-from-openmetrics-format).

Series come from the same declarations as those of the metrics endpoint. Times are those of the
samples, on the clock of rank 0. At the end of a trial its gauges and facts get a NaN: otherwise
Prometheus would show the last value for five more minutes, into the next trial.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from paceline.analysis.trial.host_frames import GAP_INTERVALS
from paceline.analysis.trial.reading import read_trial
from paceline.base.errors import DataError
from paceline.measure.records.documents import read_status
from paceline.measure.records.files import check_types, document, read_json, replacing
from paceline.measure.records.layout import HostFiles, RankFiles, RunFiles, TrialFiles
from paceline.measure.records.metrics import METRICS
from paceline.measure.records.metrics.declared import facts_of, run_facts, sidecar_facts
from paceline.measure.records.metrics.metric import Row
from paceline.measure.records.rows import CommunicationRow, Outcome, RankEnvironment, StepRow
from paceline.measure.records.tables import (
    HOST_SAMPLES,
    RANK_SAMPLES,
    checked_dicts,
    read_header,
    read_table,
)
from paceline.measure.telemetry.exporter import Snapshot, families
from paceline.measure.telemetry.training import TrainingProgress
from paceline.plan.trials.trial import Trial
from paceline.show.export.run_data import RunData

_MARK_AFTER_S = 0.001  # Prometheus's resolution; the next trial begins later


@dataclass(frozen=True, slots=True)
class Written:
    """Content of a file."""

    trials: int
    samples: int
    left_out: tuple[str, ...] = ()  # trials whose files are damaged, with the reason


def write_run(run: RunData, out: Path, trial: str | None) -> list[Path]:
    """Write `run.om`, or `ID.om` for one trial. Raises DataError if a file is damaged."""
    path = out / f"{trial or 'run'}.om"
    run.chosen(trial)  # refuses an unknown trial
    written = write_openmetrics(run.files, path, trial)
    if written.left_out:
        raise DataError("; ".join(written.left_out))
    return [path]


def write_openmetrics(run: RunFiles, out: Path, trial: str | None = None) -> Written:
    """Write all trials of `run` that have a trace into `out`, in order of time.

    trial: only the trial with this id.
    A trial whose files are damaged is left out and named. Raises OSError if `out` cannot be
    written.
    """
    found, left_out = _traces(run, trial)
    trials: set[str] = set()
    samples = 0
    with replacing(out) as file:  # it may be a link
        for trace in found:
            written = trace.write(file)
            samples += written
            if written:
                trials.add(trace.trial_id)
        file.write("# EOF\n")
    return Written(len(trials), samples, tuple(left_out))


def _traces(run: RunFiles, only: str | None) -> tuple[list[_HostTrace], list[str]]:
    """Return all traces by the time of their first sample, and the damaged trials."""
    found: list[_HostTrace] = []
    left_out: list[str] = []
    for trial_id, files in run.trials():
        if only not in (None, trial_id):
            continue
        try:
            trial = read_trial(files)
            traces = [_HostTrace(run, trial, files, host) for host, _ in files.hosts()]
        except DataError as error:
            left_out.append(f"{trial_id}: {error}")
            continue
        found += [trace for trace in traces if trace.samples]
    return sorted(found, key=lambda trace: trace.samples[0]["unix_s"]), left_out


class _HostTrace:
    """One trial on one host, sample by sample. Raises DataError if a file is damaged."""

    def __init__(self, run: RunFiles, trial: Trial, files: TrialFiles, host: str) -> None:
        self.trial_id, self._host = trial.id, host
        own = files.host(host)
        self._header: Mapping[str, Any] = read_header(own.trace)
        self.samples = checked_dicts(own.trace, HOST_SAMPLES)
        self._run = self._header.get("run") or run.root.absolute().name
        self._ranks = _by_time(own)
        outcome = document(files.outcome, Outcome)
        started_unix_s = self.samples[0]["unix_s"] if self.samples else math.nan
        launched_unix_s = started_unix_s if outcome is None else outcome.launched_unix_s
        self._facts = run_facts(facts_of(trial), launched_unix_s)
        self._interval_s = self._header.get("interval_s") or math.nan
        self._restarts = _restarts(own.sidecar) if own.sidecar.exists() else 0
        self._offset_s = 0.0
        self._training: list[RankHistory] = []
        for rank, rank_files in files.ranks():
            status = read_status(rank_files)
            environment = document(rank_files.environment, RankEnvironment)
            known = environment or status
            if known is None or known.host != host:
                continue
            if environment is not None and not self._training:
                self._offset_s = environment.clock_offset_s
            failed = status is not None and status.state == "failed"
            self._training.append(
                RankHistory(rank, rank_files, trial.placement.replicas, failed=failed)
            )

    def write(self, file: TextIO) -> int:
        """Write all samples; return their number."""
        gauges: dict[str, None] = {}
        written = 0
        last_unix_s = -math.inf
        gaps = 0
        for number, row in enumerate(self.samples, start=1):
            if row["unix_s"] <= last_unix_s:
                continue  # the clock was set back: Prometheus accepts increasing times only
            gaps += row["unix_s"] - last_unix_s > GAP_INTERVALS * self._interval_s and number > 1
            last_unix_s = row["unix_s"]
            restarts = min(gaps, self._restarts)
            for family in families(METRICS, self._snapshot(row, number, restarts)):
                for sample in family.samples:
                    name = _series_name(sample.name, sample.labels)
                    time_s = last_unix_s + self._offset_s
                    file.write(f"{name} {float(sample.value)!r} {time_s:.3f}\n")
                    written += 1
                    if family.type in ("gauge", "info"):
                        gauges[name] = None
        # Also for a running trial: it may end before it is scraped. If not, scrapes continue.
        for name in gauges:
            file.write(f"{name} NaN {last_unix_s + self._offset_s + _MARK_AFTER_S:.3f}\n")
        return written

    def _snapshot(self, row: Row, number: int, restarts: int) -> Snapshot:
        """Return what a scrape right after the sample would have shown."""
        unix_s: float = row["unix_s"]
        of_sidecar = sidecar_facts(
            version=self._header.get("version"),
            interval_s=self._interval_s,
            restarts=restarts,
            samples=number,
        )
        return Snapshot(
            host=self._host,
            run=self._run,
            row={**row, **self._facts, **of_sidecar},
            ranks=self._ranks.get(unix_s, {}),
            training={history.rank: history.until(unix_s) for history in self._training},
        )


def _by_time(files: HostFiles) -> dict[float, dict[int, Row]]:
    found: dict[float, dict[int, Row]] = {}
    for row in checked_dicts(files.ranks, RANK_SAMPLES):
        found.setdefault(row["unix_s"], {})[row["rank"]] = row
    return found


def _restarts(sidecar: Path) -> int:
    """Return how often the sidecar was started again. Raises DataError if its state is damaged."""
    found: int = check_types(read_json(sidecar), {"restarts": (int,)}, str(sidecar)).get(
        "restarts", 0
    )
    return found


def _series_name(name: str, labels: Mapping[str, str]) -> str:
    text = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
    return f"{name}{{{text}}}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class RankHistory:
    """Adds up the steps and operations of a rank in the order in which they ended.

    Raises DataError if a file is damaged.
    """

    def __init__(self, rank: int, files: RankFiles, replicas: int, *, failed: bool) -> None:
        self._replicas, self._failed = replicas, failed
        steps = read_table(files.steps, StepRow)
        operations = read_table(files.communication, CommunicationRow)
        rows = [*steps.iter_rows(named=True), *operations.iter_rows(named=True)]
        self._rows = sorted(rows, key=_ended_unix_s)
        self._done = 0
        self._progress = TrainingProgress()
        self.rank = rank

    def until(self, unix_s: float) -> Row:
        """Return the values of the training metrics at `unix_s`, on the rank's own clock.

        Times must not decrease.
        """
        while self._done < len(self._rows) and _ended_unix_s(self._rows[self._done]) <= unix_s:
            row = self._rows[self._done]
            if "step_s" in row:
                self._progress.add_step(row, self._replicas)
            else:
                self._progress.add_operation(row)
            self._done += 1
        # A rank that failed is shown as failed from its last row on.
        self._progress.failed = self._failed and self._done == len(self._rows)
        return self._progress.row()


def _ended_unix_s(row: Mapping[str, Any]) -> float:
    """Return when a step or an operation ended."""
    ended: float = row["started_unix_s"] + row["step_s"] if "step_s" in row else row["ended_unix_s"]
    return ended
