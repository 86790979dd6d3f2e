"""Traces of trials as what Prometheus would have scraped: OpenMetrics text with times, from which
promtool makes blocks (https://prometheus.io/docs/prometheus/latest/storage/#backfilling-from-openmetrics-format).

Values come from the same functions as the exporter's, so names and labels are those of a scrape.
Times are the samples', on rank 0's clock. Where a trial ended, its gauges and facts get a NaN:
Prometheus would show the last value for five minutes more, into the next trial.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from paceline.analysis.reading import load_trial
from paceline.errors import DataError, EnvironmentLacks, TimedOut
from paceline.monitor.children import guarded
from paceline.monitor.training import RankHistory
from paceline.telemetry.catalogue import CATALOGUE, CPU_MODES
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

    from paceline.analysis.reading import HostTrace, TrialRecord
    from paceline.records.layout import RunFiles
    from paceline.records.rows import HostSample, RankSample, TraceGap

_MARK_AFTER_S = 0.001  # Prometheus's resolution; any next trial begins later
_LONGEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Backfilled:
    """What was imported."""

    trials: int
    samples: int
    left_out: tuple[str, ...] = ()  # trials whose files are damaged, and how


def write_openmetrics(run: RunFiles, out: Path) -> Backfilled:
    """Write all trials of `run` that have a trace into `out`, in order of time.

    A trial whose files are damaged is left out and named: the rest is still worth looking at.
    Raises OSError where `out` cannot be written.
    """
    records, left_out = _records(run)
    trials = samples = 0
    with out.open("w", encoding="utf-8") as file:
        for record in records:
            written = sum(
                _write_host(file, _label(run, host), record, host) for host in record.hosts
            )
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


def _records(run: RunFiles) -> tuple[list[TrialRecord], list[str]]:
    """Trials with a trace, by the time of its first sample."""
    found: list[tuple[float, TrialRecord]] = []
    left_out: list[str] = []
    for trial_id, files in run.trials():
        try:
            record = load_trial(files)
        except DataError as error:
            left_out.append(f"{trial_id}: {error}")
            continue
        starts = [host.samples[0].unix_s for host in record.hosts if host.samples]
        if starts:
            found.append((min(starts), record))
    return [record for _, record in sorted(found, key=lambda pair: pair[0])], left_out


def _label(run: RunFiles, trace: HostTrace) -> str:
    """As a scrape told it; traces of older versions say nothing of it."""
    told = trace.header.get("run")
    return told if isinstance(told, str) else run.root.absolute().name


def _write_host(file: TextIO, run: str, record: TrialRecord, trace: HostTrace) -> int:
    offset_s = next((r.clock_offset_s for r in record.ranks if r.host == trace.host), 0.0)
    history = _History(run, record, trace)
    cpu = _CpuSeconds(trace.header.get("cores"))
    gauges: dict[str, None] = {}
    written = 0
    last_unix_s = -math.inf
    for sample in trace.samples:
        if sample.unix_s <= last_unix_s:
            continue  # the clock was set back: Prometheus takes time in order only
        last_unix_s = sample.unix_s
        for measure in history.measures(cpu.completed(sample)):
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

    def __init__(self, run: str, record: TrialRecord, trace: HostTrace) -> None:
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
        self._gaps: list[TraceGap] = sorted(trace.gaps, key=lambda gap: gap.gap_ended_unix_s)
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
            "sidecar_restarts", sum(gap.gap_ended_unix_s <= unix_s for gap in self._gaps)
        )
        if isinstance(interval_s, int | float):
            yield self._of_host("sidecar_interval_seconds", interval_s)

    def _of_host(self, name: str, value: float, *more: str) -> Measure:
        return Measure(CATALOGUE[f"paceline_{name}"], (self._trace.host, *more), value)


class _CpuSeconds:
    """CPU time by state of traces that have only its shares (before the sidecar wrote both): the
    shares, added up over time, on all cores."""

    def __init__(self, cores: object) -> None:
        self._cores = cores if isinstance(cores, int) else None
        self._seconds = dict.fromkeys(CPU_MODES, 0.0)
        self._last_unix_s: float | None = None

    def completed(self, sample: HostSample) -> HostSample:
        """`sample` with its counters; as it is where it has them, or nothing is known."""
        if sample.cpu_seconds or self._cores is None:
            return sample
        if self._last_unix_s is not None:
            core_seconds = (sample.unix_s - self._last_unix_s) * self._cores
            for mode in CPU_MODES:
                percent: float | None = getattr(sample, f"cpu_{mode}_percent")
                self._seconds[mode] += max(0.0, percent or 0.0) / 100.0 * core_seconds
        self._last_unix_s = sample.unix_s
        return dataclasses.replace(sample, cpu_seconds=dict(self._seconds))
