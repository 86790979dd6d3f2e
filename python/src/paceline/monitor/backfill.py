"""Traces of trials as what Prometheus would have scraped: OpenMetrics text with times, from which
promtool makes blocks (https://prometheus.io/docs/prometheus/latest/storage/#backfilling-from-openmetrics-format).

Values come from the same functions as the exporter's, so names and labels are those of a scrape.
Times are the samples', on rank 0's clock. Where a trial ended, its gauges and facts get a NaN:
Prometheus would show the last value for five minutes more, into the next trial.
"""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from paceline.analysis.host_frames import gaps
from paceline.analysis.reading import load_trial, read_host
from paceline.errors import DataError, EnvironmentLacks, TimedOut
from paceline.host.processes import guarded
from paceline.monitor.training import RankHistory
from paceline.records.rows import HostSample, RankSample
from paceline.records.tables import rows
from paceline.telemetry.catalogue import CATALOGUE
from paceline.telemetry.exposition import series_name
from paceline.telemetry.facts import facts_of
from paceline.telemetry.measures import (
    Measure,
    host_values,
    rank_values,
    run_fact_values,
    run_time_values,
    run_values,
    series,
    sidecar_values,
    training_values,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from paceline.analysis.reading import TrialRecord
    from paceline.records.layout import RunFiles, TrialFiles

_MARK_AFTER_S = 0.001  # Prometheus's resolution; any next trial begins later
_LONGEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Backfilled:
    """What was imported."""

    trials: int
    samples: int
    left_out: tuple[str, ...] = ()  # trials whose files are damaged, and how


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """One host's trace as rows, in the order in which they were written."""

    host: str
    header: Mapping[str, object]
    samples: tuple[HostSample, ...]
    ranks: tuple[RankSample, ...]
    gaps: list[tuple[float, float]]  # begin and end, unix seconds


def _traces(files: TrialFiles) -> list[_Trace]:
    found = []
    for name, host_files in files.hosts():
        trace = read_host(name, host_files)
        found.append(
            _Trace(
                host=name,
                header=trace.header,
                samples=rows(host_files.trace, HostSample),
                ranks=rows(host_files.ranks, RankSample),
                gaps=gaps(trace),
            )
        )
    return [trace for trace in found if trace.samples]


def write_openmetrics(run: RunFiles, out: Path) -> Backfilled:
    """Write all trials of `run` that have a trace into `out`, in order of time.

    A trial whose files are damaged is left out and named: the rest is still worth looking at.
    Raises OSError where `out` cannot be written.
    """
    records, left_out = _records(run)
    trials = samples = 0
    with out.open("w", encoding="utf-8") as file:
        for record, traces in records:
            written = sum(_write_host(file, _label(run, host), record, host) for host in traces)
            trials += written > 0
            samples += written
        file.write("# EOF\n")
    return Backfilled(trials, samples, tuple(left_out))


def import_blocks(
    promtool: str, openmetrics: Path, storage: Path, *, limit_s: float = _LONGEST_S
) -> None:
    """Make blocks in Prometheus's storage. Raises EnvironmentLacks if promtool cannot, TimedOut
    if it takes longer than `limit_s`."""
    argv = [promtool, "tsdb", "create-blocks-from", "openmetrics", "--quiet"]
    try:
        done = subprocess.run(
            guarded([*argv, str(openmetrics), str(storage)]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TimedOut(
            f"promtool did not import {openmetrics} within {limit_s:.0f} s; without the trials that"
            " have ended: paceline monitor --no-backfill"
        ) from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise EnvironmentLacks(
            f"promtool could not import {openmetrics} into {storage}: "
            f"{said[-1] if said else f'exit status {done.returncode}'}; without the trials that "
            "have ended: paceline monitor --no-backfill"
        )


def _records(run: RunFiles) -> tuple[list[tuple[TrialRecord, list[_Trace]]], list[str]]:
    """Trials with a trace, by the time of its first sample."""
    found: list[tuple[float, TrialRecord, list[_Trace]]] = []
    left_out: list[str] = []
    for trial_id, files in run.trials():
        try:
            record, traces = load_trial(files), _traces(files)
        except DataError as error:
            left_out.append(f"{trial_id}: {error}")
            continue
        if traces:
            found.append((min(trace.samples[0].unix_s for trace in traces), record, traces))
    ordered = sorted(found, key=lambda each: each[0])
    return [(record, traces) for _, record, traces in ordered], left_out


def _label(run: RunFiles, trace: _Trace) -> str:
    """As a scrape told it; traces of older versions say nothing of it."""
    told = trace.header.get("run")
    return told if isinstance(told, str) else run.root.absolute().name


def _write_host(file: TextIO, run: str, record: TrialRecord, trace: _Trace) -> int:
    offset_s = next((r.clock_offset_s for r in record.ranks if r.host == trace.host), 0.0)
    history = _History(run, record, trace)
    gauges: dict[str, None] = {}
    written = 0
    last_unix_s = -math.inf
    for sample in trace.samples:
        if sample.unix_s <= last_unix_s:
            continue  # the clock was set back: Prometheus takes time in order only
        last_unix_s = sample.unix_s
        for measure in history.measures(sample):
            is_gauge = measure.metric.kind in ("gauge", "info")
            for each in series(measure):
                name = series_name(each)
                file.write(f"{name} {each.value!r} {sample.unix_s + offset_s:.3f}\n")
                written += 1
                if is_gauge:
                    gauges[name] = None
    # Of a running trial, too: it may end before it is scraped. If it does not, scrapes go on.
    for name in gauges:
        file.write(f"{name} NaN {last_unix_s + offset_s + _MARK_AFTER_S:.3f}\n")
    return written


class _History:
    """One trial on one host, sample by sample."""

    def __init__(self, run: str, record: TrialRecord, trace: _Trace) -> None:
        self._run, self._trace = run, trace
        self._facts = facts_of(record.trial)
        self._launched_unix_s = (
            trace.samples[0].unix_s if record.outcome is None else record.outcome.launched_unix_s
        )
        self._training = [
            RankHistory(rank, record.files.rank(rank.rank), record.trial.replicas)
            for rank in record.ranks
            if rank.host == trace.host
        ]
        self._ranks: dict[float, list[RankSample]] = {}
        for sample in trace.ranks:
            self._ranks.setdefault(sample.unix_s, []).append(sample)
        self._taken = 0

    def measures(self, sample: HostSample) -> Iterator[Measure]:
        """All that a scrape right after `sample` would have told."""
        host, run = self._trace.host, self._run
        self._taken += 1
        training = [rank.until(sample.unix_s) for rank in self._training]
        last_step_unix_s = max(
            (p.last_step_ended_unix_s for p in training if p.last_step_ended_unix_s is not None),
            default=None,
        )
        yield from host_values(host, sample)
        yield from run_fact_values(host, run, self._facts)
        yield from run_time_values(host, run, self._launched_unix_s, last_step_unix_s)
        yield from run_values(host, run, sample)
        for rank in self._ranks.get(sample.unix_s, ()):
            yield from rank_values(host, run, rank)
        for progress in training:
            yield from training_values(host, run, progress)
        yield from sidecar_values(host, sample, sample.sidecar_missed_ticks)
        yield from self._sidecar(sample.unix_s)

    def _sidecar(self, unix_s: float) -> Iterator[Measure]:
        """What stands in a trace's header, or between its rows."""
        header: Mapping[str, object] = self._trace.header
        version, interval_s = header.get("version"), header.get("interval_s")
        if isinstance(version, str):
            yield self._of_host("sidecar", 1, version)
        yield self._of_host("sidecar_watches", 1)
        yield self._of_host("sidecar_samples", self._taken)
        yield self._of_host(
            "sidecar_restarts", sum(ended <= unix_s for _, ended in self._trace.gaps)
        )
        if isinstance(interval_s, int | float):
            yield self._of_host("sidecar_interval_seconds", interval_s)

    def _of_host(self, name: str, value: float, *more: str) -> Measure:
        return Measure(CATALOGUE[f"paceline_{name}"], (self._trace.host, *more), value)
