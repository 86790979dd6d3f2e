"""The process trees under watch: who belongs to them, and CPU time that is neither lost nor counted
twice when processes come and go between ticks.

The account rests on how Linux books CPU time: when a parent waits for a child, the child's own time
and that of *its* waited-for children are added to the parent's `children_ticks` in the same step in
which the child vanishes. So the sum of own + children ticks over all live watched processes stays
right when children, seen or never seen, end under a watched parent. What it would lose are ended
processes that no watched process waited for (a root; a daemon that init reaped; children of a
parent that ignores SIGCHLD): their last seen time is added to `_unreaped_ticks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.telemetry.procfs import ProcessSource, ProcessStat

# A strange process that took over the number of another strange process between two ticks is
# looked at no later than this many ticks after.
_FORGET_STRANGERS_TICKS = 10
_MAX_PASSES = 5


class TreeReading(NamedTuple):
    """Sums over the live watched processes; `cpu_seconds` counts from the first walk."""

    processes: int
    threads: int
    rss_bytes: int
    cpu_seconds: float


class ProcessTree:
    """Watches `root_pids` and everything that descends from them, except `excluded_pids`.

    A process once seen in a tree stays watched when it is handed to init. One whose parent ended
    before a tick could see both is still found if it is in a session that a watched process leads.
    """

    def __init__(
        self,
        source: ProcessSource,
        root_pids: Iterable[int],
        excluded_pids: Iterable[int] = (),
    ) -> None:
        self._source = source
        self._excluded = frozenset(excluded_pids)
        self._strangers: set[int] = set()
        self._walks = 0
        self._unreaped_ticks = 0
        self._baseline_ticks: int | None = None
        roots = (self._stat(pid) for pid in set(root_pids) - self._excluded)
        # Parents before children, here and ever after: see _reread.
        self._watched = {
            stat.pid: stat
            for stat in sorted((r for r in roots if r is not None), key=lambda r: r.start_ticks)
        }
        self._sessions = {s.session for s in self._watched.values() if s.session == s.pid}

    @property
    def live_pids(self) -> list[int]:
        """Watched processes that have not ended, as of the last walk."""
        return [stat.pid for stat in self._watched.values() if not stat.ended]

    def any_alive(self) -> bool:
        """Whether a process known from the last walk still lives; cheap, changes nothing."""
        for known in self._watched.values():
            stat = self._stat(known.pid, known)
            if stat is not None and stat.start_ticks == known.start_ticks and not stat.ended:
                return True
        return False

    def walk(self) -> TreeReading:
        """Read every watched process, take in new descendants, settle the CPU account."""
        before = self._watched
        now = self._reread(before)
        self._unreaped_ticks += unreaped_ticks(before, now)
        self._adopt(now)
        self._watched = now
        sessions_in_use = {stat.session for stat in now.values()}
        self._sessions &= sessions_in_use  # afterwards the number may name another session

        total_ticks = sum(s.total_ticks for s in now.values()) + self._unreaped_ticks
        if self._baseline_ticks is None:
            self._baseline_ticks = total_ticks
        live = [stat for stat in now.values() if not stat.ended]
        return TreeReading(
            processes=len(live),
            threads=sum(stat.threads for stat in live),
            rss_bytes=sum(stat.rss_bytes for stat in live),
            cpu_seconds=(total_ticks - self._baseline_ticks) / self._source.ticks_per_s,
        )

    def _reread(self, before: dict[int, ProcessStat]) -> dict[int, ProcessStat]:
        """Read `before` anew, parents first, until no process vanishes within a pass.

        In such a pass, whoever is gone was gone before its parent was read, so the parent's
        `children_ticks` include it; and whoever ends meanwhile ends after its parent was read, so
        they do not. Without this the time of a whole process could count twice, or drop out.
        """
        expected = before
        for _ in range(_MAX_PASSES):
            now = {}
            for pid, known in expected.items():
                stat = self._stat(pid, known)
                if stat is not None and stat.start_ticks == known.start_ticks:
                    now[pid] = stat
            if len(now) == len(expected):
                return now
            expected = now
        return expected

    def _stat(self, pid: int, known: ProcessStat | None = None) -> ProcessStat | None:
        try:
            return self._source.stat(pid)
        except PermissionError:
            return known

    def _adopt(self, now: dict[int, ProcessStat]) -> None:
        """Add descendants of `now` that are not in it yet; one listing of all processes a tick.

        A stranger never becomes a descendant (init or a subreaper above us may take our orphans,
        we never take others'), so only process numbers not seen before are looked at.
        """
        pids = self._source.pids()
        if self._walks % _FORGET_STRANGERS_TICKS == 0:
            self._strangers.clear()
        self._walks += 1
        self._strangers &= pids
        fresh_pids = pids - now.keys() - self._strangers - self._excluded
        fresh = [stat for pid in fresh_pids if (stat := self._stat(pid)) is not None]
        pending = sorted(fresh, key=lambda stat: (stat.start_ticks, stat.pid))
        while pending:
            rest = []
            for stat in pending:
                if stat.ppid in now or stat.session in self._sessions:
                    now[stat.pid] = stat
                    if stat.session == stat.pid:
                        self._sessions.add(stat.pid)
                else:
                    rest.append(stat)
            if len(rest) == len(pending):
                break
            pending = rest
        self._strangers |= fresh_pids - now.keys()


def unreaped_ticks(before: dict[int, ProcessStat], now: dict[int, ProcessStat]) -> int:
    """CPU time last seen in processes of `before` that ended, and that no one in `now` took over.

    Each ended process is set against the nearest ancestor still there. Where that ancestor's
    `children_ticks` grew by less than its ended descendants had, the difference went elsewhere.
    A lower bound where some were waited for and some were not; never counts anything twice.
    """
    ended_ticks: dict[int | None, int] = {}
    for pid, stat in before.items():
        if pid in now:
            continue
        ancestor = stat.ppid
        for _ in before:  # bounds the climb
            if ancestor not in before or ancestor in now:
                break
            ancestor = before[ancestor].ppid
        heir = ancestor if ancestor in now else None
        ended_ticks[heir] = ended_ticks.get(heir, 0) + stat.total_ticks
    unreaped = 0
    for heir, ticks in ended_ticks.items():
        taken_over = 0 if heir is None else now[heir].children_ticks - before[heir].children_ticks
        unreaped += max(0, ticks - taken_over)
    return unreaped


class SwitchAccount:
    """Context switches since the first reading; what ended threads had stays counted."""

    def __init__(self, source: ProcessSource) -> None:
        self._source = source
        self._last: dict[int, dict[int, tuple[int, int]]] | None = None
        self.voluntary = 0
        self.involuntary = 0

    def read(self, pids: Iterable[int]) -> None:
        """Ask every thread of `pids`; add what is new since the last time."""
        last, current = self._last, {}
        for pid in pids:
            threads: dict[int, tuple[int, int]] = dict(self._source.thread_switches(pid))
            current[pid] = threads
            if last is None:
                continue
            known = last.get(pid, {})
            for thread, (voluntary, involuntary) in threads.items():
                seen_voluntary, seen_involuntary = known.get(thread, (0, 0))
                # Lower than before: the number now names another thread.
                self.voluntary += max(0, voluntary - seen_voluntary)
                self.involuntary += max(0, involuntary - seen_involuntary)
        self._last = current
