"""The processes of each rank on this host: found by the ranks' status files, summed each tick."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.records.rows import RankSample
from paceline.telemetry.accounts import IoAccount, SwitchAccount, read_deep
from paceline.telemetry.held import LastAlive, rank_outlived
from paceline.telemetry.processes import ProcessTree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from paceline.records.rows import RankStatus
    from paceline.telemetry.accounts import Figures
    from paceline.telemetry.processes import ProcessTable
    from paceline.telemetry.procfs import ProcessStat
    from paceline.telemetry.rank_finder import RankFinder

_LOOK_EVERY_S = 0.9  # a beat of a second comes a little early as often as late
_FULL_LOOK_EVERY_S = 4.5  # at the status of every rank, while all are there and live
# A status tells when its process was started by two clocks; a tick is 10 ms.
_SAME_START_S = 1.0


@dataclass(slots=True)
class _Rank:
    pid: int
    tree: ProcessTree
    switches: SwitchAccount
    io: IoAccount
    last: RankSample | None = None
    last_alive: LastAlive[RankSample] = field(default_factory=LastAlive)
    last_cpu: tuple[float, float] | None = None  # monotonic s, CPU s
    ended: bool = False


class Ranks:
    """The ranks of one trial on this host, each with its processes.

    whole: the tree of the run, which the ranks' processes join if they are not in it (executors
    that ran already). resumed: the last rows of a sampler that died, by rank.
    """

    def __init__(
        self,
        finder: RankFinder,
        table: ProcessTable,
        figures: Figures,
        whole: ProcessTree,
        resumed: Mapping[int, RankSample] | None = None,
    ) -> None:
        self._finder = finder
        self._table = table
        self._figures = figures
        self._whole = whole
        self._resumed = dict(resumed or {})
        self._ranks: dict[int, _Rank] = {}
        self._next_look_s = self._next_full_look_s = float("-inf")
        self._all_found = False

    def look(self, monotonic_s: float) -> None:
        """Find ranks that are new, or have another process now; before the walk of the table."""
        if monotonic_s < self._next_look_s:
            return
        self._next_look_s = monotonic_s + _LOOK_EVERY_S
        if monotonic_s < self._next_full_look_s and not self._is_in_flux():
            return
        self._next_full_look_s = monotonic_s + _FULL_LOOK_EVERY_S
        statuses = self._finder.statuses()
        claims = [status.pid for status in statuses.values()]
        for rank, status in statuses.items():
            known = self._ranks.get(rank)
            # An executor between two tasks, in which several ranks are, is no one's.
            if status.state != "running" or claims.count(status.pid) > 1:
                continue
            if known is not None and (known.pid == status.pid or known.tree.any_alive()):
                continue
            self._found(rank, status)
        self._all_found = bool(statuses) and all(
            rank in self._ranks and self._ranks[rank].pid == status.pid
            for rank, status in statuses.items()
        )

    def sample(self, unix_s: float, monotonic_s: float, *, deep: bool) -> list[RankSample]:
        """A row for each rank, once more after its processes have ended and then no longer."""
        rows = []
        for number, rank in sorted(self._ranks.items()):
            if rank.ended:
                continue
            row = self._row(number, rank, unix_s, monotonic_s, deep=deep)
            rank.ended = row.processes == 0
            rank.last = row
            if row.rss_bytes:  # a process that is ending has given its memory back already
                rank.last_alive.note(row, deep=deep)
            rows.append(row)
        return rows

    @property
    def latest(self) -> tuple[RankSample, ...]:
        """The last row of each rank."""
        return tuple(rank.last for _, rank in sorted(self._ranks.items()) if rank.last is not None)

    @property
    def outlived(self) -> tuple[RankSample, ...]:
        """The same, with what each rank held while it lived."""
        return tuple(
            rank_outlived(rank.last, rank.last_alive)
            for _, rank in sorted(self._ranks.items())
            if rank.last is not None
        )

    def drop(self) -> None:
        """Have them read no longer."""
        for rank in self._ranks.values():
            rank.tree.drop()

    def _is_in_flux(self) -> bool:
        """Whether ranks are coming, or have ended and may begin anew."""
        return (
            not self._all_found
            or any(rank.ended for rank in self._ranks.values())
            or self._finder.has_new_ranks()
        )

    def _found(self, rank: int, status: RankStatus) -> None:
        stat = self._believed(status)
        if stat is None:
            return
        known = self._ranks.get(rank)
        if stat.pid not in self._whole.members:
            self._whole.add_roots([stat.pid])
        if known is not None:
            known.pid, known.ended = stat.pid, False
            known.tree.add_roots([stat.pid])
            return
        before = self._resumed.pop(rank, None)
        tree = ProcessTree(self._table, [stat.pid], born_after=self._whole)
        young = not self._whole.was_there_at_first(stat)
        self._ranks[rank] = _Rank(
            pid=stat.pid,
            tree=tree,
            switches=SwitchAccount(
                self._figures,
                from_birth=young and before is None,
                voluntary=(before.voluntary_context_switches or 0) if before else 0,
                involuntary=(before.involuntary_context_switches or 0) if before else 0,
            ),
            io=IoAccount(self._figures, tree.was_there_at_first),
        )

    def _believed(self, status: RankStatus) -> ProcessStat | None:
        """The rank's process, unless it has ended and its number is another's."""
        source = self._table.source
        try:
            stat = source.stat(status.pid)
        except PermissionError:
            return None
        if stat is None or stat.ended:
            return None
        age_s = (source.now_ticks() - stat.start_ticks) / source.ticks_per_s
        started_unix_s = time.time() - age_s
        same = abs(started_unix_s - status.process_started_unix_s) < _SAME_START_S
        return stat if same else None

    def _row(
        self, number: int, rank: _Rank, unix_s: float, monotonic_s: float, *, deep: bool
    ) -> RankSample:
        tree = rank.tree.read()
        io = rank.io.read(rank.tree.members)
        costly = None
        if deep:
            rank.switches.read(rank.tree.live_pids)
            costly = read_deep(self._figures, rank.tree.live_pids)
        return RankSample(
            unix_s=unix_s,
            rank=number,
            pid=rank.pid,
            processes=tree.processes,
            cpu_seconds=tree.cpu_seconds,
            cpu_percent=_cpu_percent(rank, monotonic_s, tree.cpu_seconds),
            rss_bytes=tree.rss_bytes,
            pss_bytes=costly.pss_bytes if costly else None,
            threads=tree.threads,
            voluntary_context_switches=rank.switches.voluntary,
            involuntary_context_switches=rank.switches.involuntary,
            read_bytes=io.read if io else None,
            written_bytes=io.written if io else None,
            open_files=costly.open_files if costly else None,
        )


def _cpu_percent(rank: _Rank, monotonic_s: float, cpu_s: float) -> float | None:
    last, rank.last_cpu = rank.last_cpu, (monotonic_s, cpu_s)
    if last is None or monotonic_s <= last[0]:
        return None
    return round(100.0 * (cpu_s - last[1]) / (monotonic_s - last[0]), 3)


def last_rows(rows: Iterable[RankSample]) -> dict[int, RankSample]:
    """The last of each rank."""
    return {row.rank: row for row in rows}
