"""Takes samples: reads host, processes and ranks, and writes the rows of the trace."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from paceline.base.errors import DataError
from paceline.base.host.cgroups import read_limits
from paceline.base.host.processes import STACKS_SIGNAL, answers, send
from paceline.base.version import __version__
from paceline.collectives.host import Process, boot_id
from paceline.measure.records.files import JsonlWriter, fields_of, read_json, typed
from paceline.measure.records.layout import HostFiles, TrialFiles
from paceline.measure.records.metrics import METRICS, SLOW_S
from paceline.measure.records.metrics.declared import run_facts, sidecar_facts
from paceline.measure.records.metrics.metric import Row, as_lists
from paceline.measure.records.rows import SCHEMA, RankStatus
from paceline.measure.records.virtual_clock import CPU_TIME_VARIABLE
from paceline.measure.telemetry.exporter import Snapshot
from paceline.measure.telemetry.host_reading import HostReader
from paceline.measure.telemetry.processes import ProcessTree
from paceline.measure.telemetry.request import EXPENSIVE_INTERVAL_S, SidecarRequest
from paceline.measure.telemetry.training import TrainingTail

_log = logging.getLogger("paceline.sidecar")


class RankFinder:
    """Reads a status file again only after it has changed."""

    def __init__(self, trial_root: Path, host: str) -> None:
        self.files = TrialFiles(trial_root)
        self._host = host
        self._folder = str(self.files.rank(0).root.parent)
        self._known: dict[int, tuple[tuple[int, int], RankStatus]] = {}
        self._warned: set[int] = set()

    def statuses(self) -> dict[int, RankStatus]:
        """Return the last readable status of each rank on this host."""
        for rank in self._ranks():
            self._look_at(rank)
        statuses = {rank: status for rank, (_, status) in sorted(self._known.items())}
        return {rank: it for rank, it in statuses.items() if it.host == self._host}

    def _ranks(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._folder) if name.isdigit()]  # noqa: PTH208
        except OSError:
            return []  # no rank has started yet

    def _look_at(self, rank: int) -> None:
        path = f"{self._folder}/{rank}/status.json"
        try:
            found = os.stat(path)  # noqa: PTH116  (every second, for each rank)
            version = (found.st_ino, found.st_mtime_ns)
            if rank not in self._known or self._known[rank][0] != version:
                status = typed(read_json(Path(path)), RankStatus, Path(path))
                self._known[rank] = (version, status)
        except FileNotFoundError:
            self._known.pop(rank, None)
        except (OSError, DataError) as error:
            if rank not in self._warned:
                _log.warning("rank %d: its last readable status is used: %s", rank, error)
            self._warned.add(rank)


def running_processes(statuses: Mapping[int, RankStatus]) -> dict[int, Process]:
    """Return the process of each running rank.

    A process that several ranks claim is left out: it is a Spark executor between two tasks.
    """
    running = {rank: status for rank, status in statuses.items() if status.state == "running"}
    claims = [status.pid for status in running.values()]
    return {
        rank: status.process
        for rank, status in running.items()
        if status.process is not None and claims.count(status.pid) == 1
    }


_RANKS_EVERY_S = 1.0  # time between two looks for new ranks and steps
_UNTRACED = {metric.path[0] for metric in METRICS if not metric.in_trace}
_EARLY = 0.9  # share of an interval after which a reading counts as due: ticks are not exact


class Sampler:
    """Samples one host for one trial.

    `tick` writes one row of the host and one row of each rank, and returns the values.
    """

    def __init__(self, request: SidecarRequest, host: str) -> None:
        """Raises OSError if the trace cannot be written."""
        self._request, self._host = request, host
        cpu_time = os.environ.get(CPU_TIME_VARIABLE)
        self._reader = HostReader(
            request.pids[0] if request.pids else "self",
            cpu_time=None if cpu_time is None else Path(cpu_time),
        )
        self._tree = ProcessTree(request.pids, excluded=[os.getpid()])
        self._itself = psutil.Process()
        self._finder = self._tail = None
        if request.trial_root is not None:
            self._finder = RankFinder(request.trial_root, host)
            self._tail = TrainingTail(self._finder.files, request.replicas)
        self._training: dict[int, Row] = {}
        self._answered_ns: int | None = None  # time of the last request for stacks
        self._last_read_s: dict[str, float] = {}
        self._samples = 0
        # A step of the wall clock must not change the order of the samples.
        self._unix_offset_s = time.time() - time.monotonic()
        self._trace = JsonlWriter(request.trace)
        self._rank_trace: JsonlWriter | None = None
        if request.restarts == 0:
            self._trace.write(self._header())

    def any_alive(self) -> bool:
        """Return whether a watched process is still running; True if only the host is watched."""
        return not self._request.pids or self._tree.any_alive()

    def tick(self, *, missed: int = 0, final: bool = False) -> Snapshot:
        """Take a sample and write its rows.

        missed: number of ticks so far that could not be taken in time.
        final: read what is read less often, and all step rows. Raises OSError if the trace cannot
            be written.
        """
        now_s = time.monotonic()
        unix_s = self._unix_offset_s + now_s
        self._samples += 1
        expensive = self._is_due("expensive", EXPENSIVE_INTERVAL_S, now_s) or final
        if final or self._is_due("ranks", _RANKS_EVERY_S, now_s):
            self._look_at_ranks(to_the_end=final)
        self._tree.read(expensive=expensive)
        row = self._row(unix_s, now_s, missed=missed, everything=final)
        ranks = self._rank_rows()
        self._write(row, ranks)
        return Snapshot(
            host=self._host, run=self._request.run, row=row, ranks=ranks, training=self._training
        )

    def close(self) -> None:
        """Close the trace files."""
        for trace in (self._trace, self._rank_trace):
            if trace is not None:
                trace.close()

    def _row(self, unix_s: float, now_s: float, *, missed: int, everything: bool) -> Row:
        slow = self._is_due("slow", SLOW_S, now_s) or everything
        request, used = self._request, self._itself.cpu_times()
        return {
            "unix_s": unix_s,
            **self._reader.read(slow=slow),
            **run_facts(request.facts, request.launched_unix_s),
            **{f"run_{name}": value for name, value in fields_of(self._tree.run).items()},
            **sidecar_facts(
                version=__version__,
                interval_s=request.settings.interval_s,
                restarts=request.restarts,
                samples=self._samples,
            ),
            "sidecar_missed_ticks": missed,
            "sidecar_cpu_seconds": round(used.user + used.system, 2),
            "sidecar_rss_bytes": self._itself.memory_info().rss,
        }

    def _rank_rows(self) -> dict[int, Row]:
        return {
            rank: {"rank": rank, "pid": pid, **fields_of(usage)}
            for rank, (pid, usage) in self._tree.ranks.items()
        }

    def _write(self, row: Row, ranks: dict[int, Row]) -> None:
        self._trace.write(as_lists({k: v for k, v in row.items() if k not in _UNTRACED}))
        if ranks:
            if self._rank_trace is None:
                self._rank_trace = JsonlWriter(HostFiles(self._request.trace.parent).ranks)
            self._rank_trace.write_all({"unix_s": row["unix_s"], **each} for each in ranks.values())

    def _is_due(self, what: str, every_s: float, now_s: float) -> bool:
        last_s = self._last_read_s.get(what)
        if last_s is not None and now_s - last_s < every_s * _EARLY:
            return False
        self._last_read_s[what] = now_s
        return True

    def _look_at_ranks(self, *, to_the_end: bool) -> None:
        """Find new ranks and read the progress of all."""
        if self._finder is None or self._tail is None:
            return
        statuses = self._finder.statuses()
        self._tree.set_ranks(running_processes(statuses))
        self._pass_on_request(self._finder.files, statuses)
        progress = self._tail.read(statuses, to_the_end=to_the_end)
        self._training = {rank: each.row() for rank, each in progress.items()}

    def _pass_on_request(self, files: TrialFiles, statuses: Mapping[int, RankStatus]) -> None:
        """Let running ranks write their stacks if another host has asked for them."""
        try:
            asked_ns = files.stacks_request.stat().st_mtime_ns
        except OSError:
            return  # nobody has asked
        if asked_ns == self._answered_ns:
            return
        self._answered_ns = asked_ns
        # Without the file, the rank does not handle the signal yet.
        ready = [s for rank, s in statuses.items() if files.rank(rank).stacks.exists()]
        running = [s for s in ready if s.state == "running" and s.is_alive()]
        asked = [s for s in running if answers(s.pid, STACKS_SIGNAL, files.rank(s.rank).stacks)]
        send([s.pid for s in asked], STACKS_SIGNAL)

    def _header(self) -> dict[str, Any]:
        """Return the first line of the trace: facts that do not change."""
        limits = read_limits(self._request.pids[0] if self._request.pids else "self")
        return {
            "schema": SCHEMA,
            "version": __version__,
            "host": self._host,
            "boot_id": boot_id(),  # parts of one machine that act as hosts have the same
            "run": self._request.run,
            "cores": os.cpu_count(),
            "cgroup_cpu_limit": limits.cpus,
            "cgroup_memory_limit_bytes": limits.memory_bytes,
            "interval_s": self._request.settings.interval_s,
            "expensive_interval_s": EXPENSIVE_INTERVAL_S,
            "started_unix_s": time.time(),
        }
