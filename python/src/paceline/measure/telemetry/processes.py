"""Processes of a run on this host, and what they use.

One pass per tick reads every process of the run. Counters grow by the increase since the last
pass, so they never decrease when a process ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest

import psutil

from paceline.collectives.host import Process, Stat, read_stat
from paceline.measure.telemetry.host_reading import read_process_io, read_thread_switches


@dataclass(slots=True, kw_only=True)
class ProcessUsage:
    """Sums over the processes of a run or of a rank; the names are columns of the trace.

    Gauges are of the last pass; counters grow from the first one. None: not read in this pass, or
    not readable.
    """

    processes: int = 0
    threads: int = 0
    rss_bytes: int = 0
    cpu_seconds: float = 0.0
    read_bytes: int | None = None
    written_bytes: int | None = None
    pss_bytes: int | None = None
    open_files: int | None = None
    voluntary_context_switches: int | None = None
    involuntary_context_switches: int | None = None


@dataclass(slots=True)
class _Counter:
    """One counter of a process that includes its children once it has waited for them.

    `owed` is what ended descendants had already added themselves: as much of the next increase is
    theirs and must not count again.
    """

    last: float
    owed: float = 0.0

    def increase(self, now: float) -> float:
        grown = max(0.0, now - self.last)
        self.last = max(now, self.last)
        paid = min(self.owed, grown)
        self.owed -= paid
        return grown - paid


@dataclass(frozen=True, slots=True)
class _Reading:
    """Figures of one process at one moment; None: not read, or not readable."""

    stat: Stat
    io: tuple[int, int] | None
    pss_bytes: int | None = None
    open_files: int | None = None
    switches: dict[int, tuple[int, int]] | None = None

    @property
    def counters(self) -> list[float]:
        """CPU seconds, bytes read, bytes written."""
        return [self.stat.cpu_s, *(self.io or (0, 0))]


def _nothing() -> list[float]:
    """Return counters at zero: CPU seconds, bytes read, bytes written, both context switches."""
    return [0.0] * 5


@dataclass(slots=True)
class _Watched:
    """One process."""

    found: Stat  # when it was found
    counters: list[_Counter]  # CPU seconds, bytes read, bytes written
    switches: dict[int, tuple[int, int]] = field(default_factory=dict)  # by thread, when last read
    grown: list[float] = field(default_factory=_nothing)  # since it is watched
    rank: int | None = None


@dataclass(slots=True)
class _Group:
    """Totals of the run or of a rank."""

    usage: ProcessUsage = field(default_factory=ProcessUsage)
    grown: list[float] = field(default_factory=_nothing)
    was_alive: bool = False


class ProcessTree:
    """Root processes and their descendants, each of which may belong to a rank."""

    def __init__(self, roots: Iterable[int], excluded: Iterable[int] = ()) -> None:
        """excluded: processes that are left out with all of their descendants (the sidecar)."""
        self._excluded = set(excluded)
        self._watched: dict[int, _Watched] = {}
        self._others: set[int] = set()
        self._run = _Group()
        self._ranks: dict[int, _Group] = {}
        self._rank_pids: dict[int, int] = {}
        self._io_is_readable = False
        for pid in roots:
            self._add(pid, is_new=False)
        self._adopt(are_new=False)

    def any_alive(self) -> bool:
        """Return whether a watched process is still running."""
        return any(_is_alive(pid, watched) for pid, watched in self._watched.items())

    def set_ranks(self, processes: Mapping[int, Process]) -> None:
        """Say which process each rank is.

        A rank's process may be outside the tree (a Spark executor that ran before); it is watched
        from then on. Its descendants belong to the rank too.
        """
        self._adopt(are_new=True)
        for rank, process in processes.items():
            pid = process.pid
            if self._rank_pids.get(rank) == pid and pid in self._watched:
                continue
            if pid not in self._watched:
                self._add(pid, is_new=False)
                self._adopt(are_new=False)
            watched = self._watched.get(pid)
            if watched is None:
                continue
            if watched.found.start_ticks != process.start_ticks:
                continue  # the rank has ended, and its process id was given to another process
            self._rank_pids[rank] = pid
            self._assign(watched, rank)
            for child_pid in self._descendants_of(pid):
                self._assign(self._watched[child_pid], rank)

    def read(self, *, expensive: bool) -> None:
        """Read all processes once; with `expensive`, also PSS, open files and context switches."""
        self._adopt(are_new=True)
        for group in (self._run, *self._ranks.values()):
            _start_pass(group)
        found: dict[int, _Reading] = {}
        for pid, watched in self._watched.items():
            reading = _read(pid, watched, expensive=expensive)
            if reading is not None:
                found[pid] = reading
        # First this: a parent's counters may include a child that has ended since the last pass.
        self._forget_ended(found.keys())
        for pid, reading in found.items():
            self._count(self._watched[pid], reading)
        for group in (self._run, *self._ranks.values()):
            self._finish_pass(group, expensive=expensive)

    @property
    def run(self) -> ProcessUsage:
        """Sums over all processes as of the last pass."""
        return self._run.usage

    @property
    def ranks(self) -> dict[int, tuple[int, ProcessUsage]]:
        """(process id, sums) of each rank that has a process, or had one in the pass before."""
        return {
            rank: (self._rank_pids[rank], group.usage)
            for rank, group in sorted(self._ranks.items())
            if group.usage.processes or group.was_alive
        }

    def _adopt(self, *, are_new: bool) -> None:
        """Find new processes by one listing of process ids; only new ones are looked at.

        A process of somebody else never becomes a descendant of ours, so each is looked at once.
        """
        pids = set(psutil.pids())
        self._others &= pids
        parents: dict[int, int] = {}
        for pid in pids - self._others - self._watched.keys() - self._excluded:
            stat = read_stat(pid)
            if stat is not None:
                parents[pid] = stat.parent
        while True:
            found = [pid for pid, parent in parents.items() if parent in self._watched]
            if not found:
                break
            for pid in found:
                self._add(pid, is_new=are_new)
                watched, parent = self._watched.get(pid), self._watched[parents.pop(pid)]
                if watched is not None and parent.rank is not None:
                    self._assign(watched, parent.rank)
        self._others |= parents.keys()

    def _add(self, pid: int, *, is_new: bool) -> None:
        """Watch a process. is_new: it started after watching began, so all that it used counts."""
        if pid in self._watched or pid in self._excluded:
            return
        found = read_stat(pid)
        if found is None:
            return
        try:
            start = _Reading(found, read_process_io(pid)).counters
        except ProcessLookupError:
            return
        counters = [_Counter(0.0 if is_new else value) for value in start]
        self._watched[pid] = _Watched(found, counters)
        if not is_new:
            self._watched[pid].switches = read_thread_switches(pid)
            self._others.clear()  # processes seen before may descend from this one

    def _assign(self, watched: _Watched, rank: int) -> None:
        """Give a process to a rank, with all that it used since it is watched."""
        group = self._ranks.setdefault(rank, _Group())
        if watched.rank is None:
            group.grown = _added(group.grown, watched.grown)
        watched.rank = rank

    def _groups_of(self, watched: _Watched) -> list[_Group]:
        return [self._run] if watched.rank is None else [self._run, self._ranks[watched.rank]]

    def _count(self, watched: _Watched, now: _Reading) -> None:
        """Add a reading of a process to the run and to its rank."""
        self._io_is_readable |= now.io is not None
        counted = zip(watched.counters, now.counters, strict=True)
        grown = [counter.increase(value) for counter, value in counted]
        if now.switches is not None:
            before, watched.switches = watched.switches, now.switches
            grown += _switches_since(before, now.switches)
        watched.grown = _added(watched.grown, grown)
        for group in self._groups_of(watched):
            group.grown = _added(group.grown, grown)
            usage = group.usage
            if now.stat.is_running:
                usage.processes += 1
                usage.threads += now.stat.threads
                usage.rss_bytes += now.stat.rss_bytes
            if now.pss_bytes is not None and now.open_files is not None:
                usage.pss_bytes = (usage.pss_bytes or 0) + now.pss_bytes
                usage.open_files = (usage.open_files or 0) + now.open_files

    def _forget_ended(self, alive: Collection[int]) -> None:
        """Drop ended processes; the nearest live ancestor owes what they had added."""
        for pid, watched in self._watched.items():
            parent = watched.found.parent
            heir = None if pid in alive else self._nearest_live_ancestor(parent, alive)
            if heir is not None:
                for counter, mine in zip(heir.counters, watched.counters, strict=True):
                    counter.owed += mine.last + mine.owed
        self._watched = {pid: it for pid, it in self._watched.items() if pid in alive}

    def _nearest_live_ancestor(self, pid: int, alive: Collection[int]) -> _Watched | None:
        for _ in self._watched:  # bounds the climb
            ancestor = self._watched.get(pid)
            if ancestor is None or pid in alive:
                return ancestor
            pid = ancestor.found.parent
        return None

    def _descendants_of(self, pid: int) -> list[int]:
        found = [pid]
        for parent in found:
            found += [child for child, it in self._watched.items() if it.found.parent == parent]
        return found[1:]

    def _finish_pass(self, group: _Group, *, expensive: bool) -> None:
        usage = group.usage
        usage.cpu_seconds = round(group.grown[0], 2)
        if self._io_is_readable:
            usage.read_bytes, usage.written_bytes = int(group.grown[1]), int(group.grown[2])
        if expensive:
            voluntary, involuntary = map(int, group.grown[3:])
            usage.voluntary_context_switches = voluntary
            usage.involuntary_context_switches = involuntary


def _start_pass(group: _Group) -> None:
    group.was_alive = group.usage.processes > 0
    group.usage = ProcessUsage()


def _read(pid: int, watched: _Watched, *, expensive: bool) -> _Reading | None:
    """Read one process; None if it has ended, also if its id belongs to another process now."""
    stat = read_stat(pid)
    if stat is None or stat.start_ticks != watched.found.start_ticks:
        return None
    pss_bytes = open_files = None
    try:
        io = read_process_io(pid)
        if not expensive or not stat.is_running:
            return _Reading(stat, io)
        with suppress(psutil.AccessDenied):  # a process of another user
            process = psutil.Process(pid)
            pss_bytes, open_files = process.memory_full_info().pss, process.num_fds()
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
    return _Reading(stat, io, pss_bytes, open_files, read_thread_switches(pid))


def _switches_since(
    before: dict[int, tuple[int, int]], now: dict[int, tuple[int, int]]
) -> list[float]:
    """Return the increase of both kinds; threads that ended since then are no longer known."""
    return [
        float(sum(max(0, counts[k] - before.get(tid, (0, 0))[k]) for tid, counts in now.items()))
        for k in (0, 1)
    ]


def _added(one: list[float], other: list[float]) -> list[float]:
    """Add, where `other` may lack the context switches at the end."""
    return [a + b for a, b in zip_longest(one, other, fillvalue=0.0)]


def _is_alive(pid: int, watched: _Watched) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.is_running and stat.start_ticks == watched.found.start_ticks
