"""One watch of a host's sampler: its rows, from its first to its last."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import paceline
from paceline.errors import DataError
from paceline.host.cgroups import read_limits
from paceline.records.files import JsonlWriter, read_json, write_json, write_text
from paceline.records.layout import HostFiles
from paceline.records.rows import SCHEMA, HostSample, RankSample, TraceGap
from paceline.records.typed import typed
from paceline.telemetry.accounts import IoAccount, SwitchAccount, read_deep
from paceline.telemetry.cadence import HostShares, next_beat
from paceline.telemetry.cgroup_usage import CgroupReader
from paceline.telemetry.held import LastAlive, run_outlived
from paceline.telemetry.process_ids import ProcessId, boot_id
from paceline.telemetry.processes import ProcessTree, TreeAccount
from paceline.telemetry.progress import TrainingTail
from paceline.telemetry.rank_finder import RankFinder
from paceline.telemetry.ranks import Ranks, last_rows
from paceline.telemetry.runtime import put
from paceline.telemetry.textfile import final_text, write_textfile
from paceline.telemetry.ticks import TrainingProgress, WatchTick
from paceline.telemetry.traces import cut_unfinished_row, last_row, rows_of_the_end
from paceline.telemetry.watches import beside

if TYPE_CHECKING:
    from paceline.telemetry.accounts import Figures
    from paceline.telemetry.host import HostReading
    from paceline.telemetry.processes import ProcessTable
    from paceline.telemetry.watches import WatchRequest

EndReason = Literal["asked", "watched processes ended", "lifetime reached", "trace not writable"]

# Whoever scrapes reads the ranks' rows; if nobody does, this leaves little for the last reading.
_TRAINING_EVERY_S = 30.0
_DEEP_EVERY_ROWS = 10
_DIED = "the sidecar died and was started again"
_log = logging.getLogger("paceline.sidecar")


class WatchRefusedError(Exception):
    """A watch that cannot begin; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """What the sampler hands to each watch at one moment."""

    unix_s: float
    monotonic_s: float
    host: HostReading
    sampler_cpu_s: float
    sampler_rss_bytes: int
    missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Where the sampler serves metrics, as the watches tell it."""

    listen: str | None = None
    port: int | None = None
    scheme: str = "http"
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class Account:
    """What a sampler that takes over has to know of a watch."""

    tree: TreeAccount = field(default_factory=TreeAccount)
    io_added: list[int] = field(default_factory=lambda: [0, 0])
    restarts: int = 0
    started_unix_s: float = 0.0


class Watch:
    """One run on this host, or the host alone. Raises WatchRefusedError.

    A watch that a dead sampler left behind goes on where it stopped, behind a TraceGap.
    """

    def __init__(
        self, request: WatchRequest, account: Path, table: ProcessTable, figures: Figures, host: str
    ) -> None:
        self.request = request
        self.host = host
        self._figures = figures
        self._account_path = account
        before = _account_of(account)
        self._account = before or Account(started_unix_s=time.time())
        self.has_processes = bool(request.processes) and not request.keeps_only()
        live = [process.pid for process in request.processes if process.is_alive()]
        roots = live if self.has_processes else []
        self._tree = ProcessTree(table, roots, account=self._account.tree)
        if before is None and not self.any_alive():
            self._tree.drop()
            raise WatchRefusedError("none of the processes to watch is running")
        self._trace_path = Path(request.trace) if request.trace else None
        try:
            self._open_traces()
        except OSError as error:
            self._tree.drop()
            raise WatchRefusedError(f"the trace cannot be written: {error}") from error
        self._begin(resumed=before is not None, table=table)

    def _begin(self, *, resumed: bool, table: ProcessTable) -> None:
        request, figures = self.request, self._figures
        row = _last_sample(self._trace_path) if resumed else None
        ranks = _last_ranks(self._ranks_path) if resumed else {}
        self._last_unix_s = row.unix_s if row else None
        self._last_alive: LastAlive[HostSample] = LastAlive()
        if row is not None:
            self._note_alive(row, deep=row.run_open_files is not None)
        self._switches = SwitchAccount(
            figures,
            voluntary=(row.run_voluntary_context_switches or 0) if row else 0,
            involuntary=(row.run_involuntary_context_switches or 0) if row else 0,
        )
        self._io = IoAccount(
            figures,
            self._tree.was_there_at_first,
            added=self._account.io_added if resumed else None,
        )
        root = Path(request.trial_root) if request.trial_root else None
        self._ranks = None
        self._tail = None
        if root is not None:
            finder = RankFinder(root, self.host)
            self._ranks = Ranks(finder, table, figures, self._tree, ranks)
            self._tail = TrainingTail(RankFinder(root, self.host))
        self._next_training_s = float("-inf")
        pid = request.processes[0].pid if request.processes else "self"
        self._cgroup = CgroupReader(pid)
        self._shares = HostShares()
        self._last_cpu: tuple[float, float] | None = None
        self._cpu_floor_s = row.run_cpu_seconds if row else 0.0
        self._resumed = resumed
        self.wants_deep = True
        self._rows_since_deep = 0
        self.latest: WatchTick | None = None
        self.lost = False
        self.next_beat_s = float("-inf")

    @property
    def restarts(self) -> int:
        return self._account.restarts

    def any_alive(self) -> bool:
        """Whether what it watches is still there."""
        owner = self.request.owner
        if owner is not None and not owner.is_alive():
            return False
        if self.has_processes:
            return self._tree.any_alive()
        roots = self.request.processes
        return not roots or any(process.is_alive() for process in roots)

    def announce(self, served: Served, reason: EndReason | None = None) -> None:
        """Write the state file: who samples, where it serves, and how it ended."""
        if self.request.state is None:
            return
        itself = ProcessId.of(os.getpid())
        document = {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "start_ticks": itself.start_ticks if itself else None,
            "host": self.host,
            "listen": served.listen,
            "port": served.port,
            "scheme": served.scheme,
            "endpoint_error": served.error,
            "interval_s": self.request.interval_s,
            "started_unix_s": self._account.started_unix_s,
            "restarts": self._account.restarts,
            "ended_unix_s": time.time() if reason else None,
            "ended": reason,
        }
        try:
            write_json(Path(self.request.state), document)
        except OSError as error:
            _log.warning("%s: %s: sampling goes on", self.request.state, error)

    def look(self, monotonic_s: float) -> None:
        """Find ranks; before the walk of the table."""
        if self._ranks is not None:
            self._ranks.look(monotonic_s)

    def pass_over(self, reading: HostReading) -> None:
        """A tick that is another watch's."""
        self._shares.pass_over(reading)

    def sample(self, tick: Tick, *, deep: bool, final: bool = False) -> WatchTick:
        """Write the rows of one tick. `lost` is set where the trace cannot be written."""
        self.next_beat_s = next_beat(tick.monotonic_s, self.request.interval_s)
        sample = self._sampled(tick, deep=deep)
        ranks = self._ranks.sample(tick.unix_s, tick.monotonic_s, deep=deep) if self._ranks else []
        self._note_alive(sample, deep=deep)
        self._write(sample, ranks)
        if self._tree.changed:
            self._save()
        if self._tail is not None and (final or self._training_is_due(tick)):
            self._tail.read(to_the_end=final)
        self.latest = WatchTick(
            run=self.request.run,
            facts=self.request.facts,
            launched_unix_s=self._account.started_unix_s,
            sample=sample,
            ranks=self._ranks.latest if self._ranks else (),
            training=self._training,
        )
        return self.latest

    def finish(self, served: Served, reason: EndReason) -> None:
        """Write the last values and the reason, and let go of everything."""
        if self.latest is not None and self._trace_path is not None and not self.lost:
            self._write_final(self._outlived(self.latest), self._trace_path)
        self.announce(served, reason)
        self.close()

    def close(self) -> None:
        """Let go of everything, with the trace as it is."""
        for trace in (self._trace, self._rank_trace):
            if trace is not None:
                trace.close()
        if self._ranks is not None:
            self._ranks.drop()
        self._tree.drop()

    def _sampled(self, tick: Tick, *, deep: bool) -> HostSample:
        tree = self._tree.read()
        io = self._io.read(self._tree.members)
        costly = None
        if deep:
            self._switches.read(self._tree.live_pids)
            costly = read_deep(self._figures, self._tree.live_pids)
        self._count_deep(deep=deep)
        # What ended unseen while no sampler lived is lost; no sum falls because of it.
        cpu_s = max(tree.cpu_seconds, self._cpu_floor_s)
        fields = self._shares.take(tick.host)
        fields["cgroup"] = self._cgroup.read(deep) if self.has_processes else None
        return HostSample(
            unix_s=tick.unix_s,
            **fields,
            run_processes=tree.processes,
            run_cpu_seconds=cpu_s,
            run_cpu_percent=self._cpu_percent(tick.monotonic_s, cpu_s),
            run_rss_bytes=tree.rss_bytes,
            run_pss_bytes=costly.pss_bytes if costly else None,
            run_threads=tree.threads,
            run_voluntary_context_switches=self._switches.voluntary,
            run_involuntary_context_switches=self._switches.involuntary,
            run_read_bytes=io.read if io else None,
            run_written_bytes=io.written if io else None,
            run_open_files=costly.open_files if costly else None,
            sidecar_cpu_seconds=tick.sampler_cpu_s,
            sidecar_rss_bytes=tick.sampler_rss_bytes,
            sidecar_missed_ticks=tick.missed,
        )

    def _note_alive(self, sample: HostSample, *, deep: bool) -> None:
        if sample.run_rss_bytes:  # a process that is ending has given its memory back already
            self._last_alive.note(sample, deep=deep)

    def _outlived(self, tick: WatchTick) -> WatchTick:
        """The last sample is taken when processes are gone: what they held is in earlier ones."""
        return dataclasses.replace(
            tick,
            sample=run_outlived(tick.sample, self._last_alive),
            ranks=self._ranks.outlived if self._ranks else (),
        )

    def _count_deep(self, *, deep: bool) -> None:
        self._rows_since_deep = 0 if deep else self._rows_since_deep + 1
        self.wants_deep = self._rows_since_deep >= _DEEP_EVERY_ROWS - 1

    def _cpu_percent(self, monotonic_s: float, cpu_s: float) -> float | None:
        last, self._last_cpu = self._last_cpu, (monotonic_s, cpu_s)
        if last is None or monotonic_s <= last[0]:
            return None
        return round(100.0 * (cpu_s - last[1]) / (monotonic_s - last[0]), 3)

    def _training(self) -> tuple[TrainingProgress, ...]:
        return () if self._tail is None else self._tail.read()

    def _training_is_due(self, tick: Tick) -> bool:
        if tick.monotonic_s < self._next_training_s:
            return False
        self._next_training_s = tick.monotonic_s + _TRAINING_EVERY_S
        return True

    def _open_traces(self) -> None:
        self._trace: JsonlWriter | None = None
        self._rank_trace: JsonlWriter | None = None
        self._ranks_path: Path | None = None
        if self._trace_path is None:
            return
        cut_unfinished_row(self._trace_path)
        self._trace = JsonlWriter(self._trace_path)
        if self.request.trial_root is not None:
            usual = HostFiles(self._trace_path.parent).ranks
            self._ranks_path = beside(self._trace_path, usual)
            cut_unfinished_row(self._ranks_path)

    def _write(self, sample: HostSample, ranks: list[RankSample]) -> None:
        try:
            if self._trace is not None:
                self._write_first_rows(sample)
                self._trace.write(sample)
            if ranks and self._ranks_path is not None:
                self._rank_trace = self._rank_trace or JsonlWriter(self._ranks_path)
                self._rank_trace.write_all(ranks)
        except OSError as error:
            # What was written so far stays readable; a row after a torn one would not.
            _log.error("%s: %s: the watch ends", self._trace_path, error)
            self.lost = True

    def _write_first_rows(self, sample: HostSample) -> None:
        if self.latest is not None or self._trace is None:
            return
        if not self._resumed:
            self._trace.write(self._header())
            return
        self._account.restarts += 1
        self._save()
        if self._last_unix_s is None:  # it died before it wrote anything
            self._trace.write(self._header())
            return
        self._trace.write(
            TraceGap(
                gap_started_unix_s=self._last_unix_s, gap_ended_unix_s=sample.unix_s, reason=_DIED
            )
        )

    def _header(self) -> dict[str, Any]:
        processes = self.request.processes
        limits = read_limits(processes[0].pid if processes else "self")
        return {
            "schema": SCHEMA,
            "version": paceline.__version__,
            "host": self.host,
            "boot_id": boot_id(),  # hosts that are parts of one machine have the same
            "run": self.request.run,
            "cores": os.cpu_count(),
            "cgroup_cpu_limit": limits.cpus,
            "cgroup_memory_limit_bytes": limits.memory_bytes,
            "interval_s": self.request.interval_s,
            "started_unix_s": self._account.started_unix_s,
        }

    def _save(self) -> None:
        self._account.tree = self._tree.account()
        self._account.io_added = self._io.added
        try:
            put(self._account_path, self._account)
        except OSError as error:
            _log.warning("%s: %s: another sampler could not go on here", self._account_path, error)

    def _write_final(self, tick: WatchTick, trace: Path) -> None:
        try:
            usual = HostFiles(trace.parent).final_metrics
            write_text(beside(trace, usual), final_text(tick, self.host))
            if self.request.textfile_dir is not None:
                write_textfile(Path(self.request.textfile_dir), self.host, tick)
        except OSError as error:
            _log.warning("the last values of %s are not written: %s", self.request.run, error)


def _account_of(path: Path) -> Account | None:
    try:
        return typed(read_json(path), Account, path)
    except (DataError, OSError):
        return None


def _last_sample(path: Path | None) -> HostSample | None:
    row = last_row(path, "unix_s") if path else None
    return typed(row, HostSample, path) if row and path else None


def _last_ranks(path: Path | None) -> dict[int, RankSample]:
    if path is None or not path.exists():
        return {}
    return last_rows(typed(row, RankSample, path) for row in rows_of_the_end(path))
