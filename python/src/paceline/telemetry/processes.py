"""The processes under watch, read once a tick for all who watch, and the CPU time of their trees.

The account rests on how Linux books CPU time: when a parent waits for a child, the child's own time
and that of *its* waited-for children are added to the parent's `children_ticks` in the same step in
which the child vanishes. So the sum of own + children ticks over all live watched processes stays
right when children, seen or never seen, end under a watched parent. What it would lose are ended
processes that no watched process waited for (a root; a daemon that init reaped; children of a
parent that ignores SIGCHLD): their last seen time is added to the tree's `unreaped_ticks`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from paceline.telemetry.procfs import ProcessStat

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from paceline.telemetry.procfs import ProcessSource

# A strange process that took over the number of another strange process between two ticks, or one
# that had its number but was not listed yet, is looked at no later than this many ticks after.
_FORGET_STRANGERS_TICKS = 10
_NEVER = -1  # no process has this number
_MAX_PASSES = 5


class TreeReading(NamedTuple):
    """Sums over the live processes of a tree; `cpu_seconds` counts from its first reading."""

    processes: int
    threads: int
    rss_bytes: int
    cpu_seconds: float


class ProcessTable:
    """All processes that some tree has, except those of `excluded` and what descends from them.

    `now` has them as of the last walk, parents before children.
    """

    def __init__(self, source: ProcessSource, excluded: Iterable[int] = ()) -> None:
        self.source = source
        self.excluded = set(excluded)
        self.now: dict[int, ProcessStat] = {}
        self.fresh: list[ProcessStat] = []  # those that the last walk has taken in
        self.walks = 0
        self._trees: list[ProcessTree] = []
        self._strangers: set[int] = set()
        self._newest: int | None = _NEVER  # when all processes were listed

    def add(self, tree: ProcessTree, roots: Iterable[int]) -> None:
        """Have `tree` and its `roots` read from now on; a root that has ended is passed over."""
        if tree not in self._trees:
            self._trees.append(tree)
        new = set(roots) - self.excluded - self.now.keys()
        found = {pid: stat for pid in new if (stat := self._stat(pid)) is not None}
        if found:
            self.now = _parents_first({**self.now, **found})
        self._forget_strangers()  # what was none of ours may descend from the new roots

    def drop(self, tree: ProcessTree) -> None:
        """Read no longer what `tree` alone has."""
        self._trees.remove(tree)
        wanted = {pid for other in self._trees for pid in other.members}
        self.source.let_go(self.now.keys() - wanted)
        self.now = {pid: stat for pid, stat in self.now.items() if pid in wanted}
        self._forget_strangers()

    def walk(self) -> None:
        """Read every process of a tree, and take in new descendants."""
        self.walks += 1
        known = self.now
        now = self._reread(known)
        old = set(now)
        self._adopt(now)
        self.now = now
        self.fresh = [stat for pid, stat in now.items() if pid not in old]

    def is_alive(self, known: ProcessStat) -> bool:
        """Whether that very process lives, asked now."""
        stat = self._stat(known.pid, known)
        return stat is not None and stat.start_ticks == known.start_ticks and not stat.ended

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
                stat = self._stat(pid, known, again=True)
                if stat is not None and stat.start_ticks == known.start_ticks:
                    now[pid] = stat
            if len(now) == len(expected):
                return now
            expected = now
        return expected

    def _stat(
        self, pid: int, known: ProcessStat | None = None, *, again: bool = False
    ) -> ProcessStat | None:
        try:
            return self.source.stat(pid, again=again)
        except PermissionError:
            return known

    def _adopt(self, now: dict[int, ProcessStat]) -> None:
        """Add descendants of `now` that are not in it yet; one listing of all processes a tick,
        and none while no process was added anywhere.

        A stranger never becomes a descendant (init or a subreaper above us may take our orphans,
        we never take others'), so only process numbers not seen before are looked at.
        """
        if self.walks % _FORGET_STRANGERS_TICKS == 0:
            self._forget_strangers()
        newest = self.source.newest_pid()  # before the listing: what comes after it is found next
        if newest is not None and newest == self._newest:
            return
        self._newest = newest
        pids = self.source.pids()
        self._strangers &= pids
        fresh_pids = pids - now.keys() - self._strangers - self.excluded
        fresh = [stat for pid in fresh_pids if (stat := self._stat(pid)) is not None]
        sessions = set().union(*(tree.sessions for tree in self._trees))
        for stat in descendants(fresh, now, sessions):
            now[stat.pid] = stat
        self._strangers |= fresh_pids - now.keys()

    def _forget_strangers(self) -> None:
        self._strangers.clear()
        self._newest = _NEVER


@dataclass(kw_only=True, slots=True)
class TreeAccount:
    """What a tree must not forget: kept by the sampler for the case that it dies."""

    began_ticks: int | None = None  # when it was first read, since boot
    baseline_ticks: int = 0  # of the processes that were there by then
    unreaped_ticks: int = 0
    first_ticks: dict[str, int] = field(default_factory=dict)  # theirs, by PID:START
    sessions: list[int] = field(default_factory=list)
    members: list[list[int | bool]] = field(default_factory=list)  # ProcessStat


class ProcessTree:
    """`roots` and everything that descends from them, out of what `table` reads.

    A process once seen in a tree stays in it when it is handed to init. One whose parent ended
    before a tick could see both is still found if it is in a session that a process of the tree
    leads. born_after: the tree that this one is part of; what was not yet there at its first
    reading counts from its birth. account: where a sampler that died had come to.
    """

    def __init__(
        self,
        table: ProcessTable,
        roots: Iterable[int],
        *,
        born_after: ProcessTree | None = None,
        account: TreeAccount | None = None,
    ) -> None:
        self._table = table
        self._account = account or TreeAccount()
        self._born_after = born_after
        self._complete_at = -1  # the walk by which it had looked at all that the table has
        self.changed = True  # whether members came or went in the last reading
        kept = [ProcessStat(*member) for member in self._account.members]  # type: ignore[arg-type]
        self.members = {stat.pid: stat for stat in kept}
        self.sessions = set(self._account.sessions)
        table.add(self, [stat.pid for stat in kept if table.is_alive(stat)])
        self.add_roots(roots)

    @property
    def live_pids(self) -> list[int]:
        """Its processes that have not ended, as of the last reading."""
        return [stat.pid for stat in self.members.values() if not stat.ended]

    def account(self) -> TreeAccount:
        """Where it has come to."""
        return dataclasses.replace(
            self._account,
            sessions=sorted(self.sessions),
            members=[list(stat) for stat in self.members.values()],
        )

    def add_roots(self, pids: Iterable[int]) -> None:
        """Take these in, too, with what descends from them."""
        roots = list(pids)
        self._table.add(self, roots)
        for pid in roots:
            if pid in self._table.now and pid not in self.members:
                self._take(self.members, self._table.now[pid])
                self._complete_at = -1

    def any_alive(self) -> bool:
        """Whether a process known from the last reading still lives; cheap, changes nothing."""
        return any(self._table.is_alive(known) for known in self.members.values())

    def drop(self) -> None:
        """Have it read no longer."""
        self._table.drop(self)

    def read(self) -> TreeReading:
        """Settle the CPU account after a walk of the table."""
        before, table = self.members, self._table.now
        now = {
            pid: table[pid]
            for pid, known in before.items()
            if pid in table and table[pid].start_ticks == known.start_ticks
        }
        ended = len(before) - len(now)
        self._account.unreaped_ticks += unreaped_ticks(before, now)
        looks_at_all = self._complete_at < 0
        taken = self._take_fresh(now)
        self.changed = bool(ended or taken) or looks_at_all
        self.members = _in_order_of(table, now) if self.changed else now
        # afterwards the number may name another session
        self.sessions &= {stat.session for stat in now.values()}
        if self._account.began_ticks is None:
            self._begin(now)
        total_ticks = sum(stat.total_ticks for stat in now.values())
        live = [stat for stat in now.values() if not stat.ended]
        used_ticks = total_ticks + self._account.unreaped_ticks - self._account.baseline_ticks
        return TreeReading(
            processes=len(live),
            threads=sum(stat.threads for stat in live),
            rss_bytes=sum(stat.rss_bytes for stat in live),
            cpu_seconds=used_ticks / self._table.source.ticks_per_s,
        )

    def was_there_at_first(self, stat: ProcessStat) -> bool:
        """Whether the process was there already when the tree was first read."""
        return _key(stat) in self._account.first_ticks

    @property
    def first_ticks(self) -> dict[str, int]:
        """What processes had used that were there at the first reading."""
        return self._account.first_ticks

    @property
    def began_ticks(self) -> int | None:
        return self._account.began_ticks

    def _take_fresh(self, now: dict[int, ProcessStat]) -> int:
        candidates: Iterable[ProcessStat] = self._table.fresh
        walks, self._complete_at = self._complete_at, self._table.walks
        if walks < 0 or walks < self._table.walks - 1:  # it has missed some
            candidates = [stat for pid, stat in self._table.now.items() if pid not in now]
        taken = descendants(candidates, now, self.sessions)
        return sum(1 for stat in taken if self._take(now, stat))

    def _take(self, members: dict[int, ProcessStat], stat: ProcessStat) -> bool:
        members[stat.pid] = stat
        if stat.session == stat.pid:
            self.sessions.add(stat.pid)
        if self._account.began_ticks is not None and stat.start_ticks < self._account.began_ticks:
            self._leave_out_the_past(stat)  # an older process under a root that came later
        return True

    def _begin(self, now: dict[int, ProcessStat]) -> None:
        whole = self._born_after
        if whole is None or whole.began_ticks is None:
            self._account.began_ticks = self._table.source.now_ticks()
            self._account.baseline_ticks += self._account.unreaped_ticks
            for stat in now.values():
                self._leave_out_the_past(stat)
            return
        self._account.began_ticks = whole.began_ticks
        for stat in now.values():
            self._leave_out_the_past(stat, whole.first_ticks.get(_key(stat), 0))

    def _leave_out_the_past(self, stat: ProcessStat, ticks: int | None = None) -> None:
        past_ticks = stat.total_ticks if ticks is None else ticks
        if ticks == 0 or _key(stat) in self._account.first_ticks:
            return
        self._account.first_ticks[_key(stat)] = past_ticks
        self._account.baseline_ticks += past_ticks


def descendants(
    candidates: Iterable[ProcessStat],
    members: Mapping[int, ProcessStat],
    sessions: set[int],
) -> Iterator[ProcessStat]:
    """Those of `candidates` that descend from `members`, or are in one of `sessions`, in an order
    in which parents come first. Whoever is told must be added to `members` before the next."""
    pending = sorted(candidates, key=lambda stat: (stat.start_ticks, stat.pid))
    led: set[int] = set()  # sessions of those that are told here
    while pending:
        rest = []
        for stat in pending:
            if stat.pid in members:
                continue
            if stat.ppid in members or stat.session in sessions or stat.session in led:
                if stat.session == stat.pid:
                    led.add(stat.pid)
                yield stat
            else:
                rest.append(stat)
        if len(rest) == len(pending):
            return
        pending = rest


def _parents_first(processes: dict[int, ProcessStat]) -> dict[int, ProcessStat]:
    tops = {pid: stat for pid, stat in processes.items() if stat.ppid not in processes}
    ordered = dict(tops)
    for stat in descendants(processes.values(), ordered, set()):
        ordered[stat.pid] = stat
    return ordered


def _in_order_of(
    table: Mapping[int, ProcessStat], members: Mapping[int, ProcessStat]
) -> dict[int, ProcessStat]:
    return {pid: members[pid] for pid in table if pid in members}


def _key(stat: ProcessStat) -> str:
    return f"{stat.pid}:{stat.start_ticks}"


def unreaped_ticks(before: dict[int, ProcessStat], now: dict[int, ProcessStat]) -> int:
    """CPU time last seen in processes of `before` that ended, and that no one in `now` took over.

    Each ended process is set against the nearest ancestor still there. Where that ancestor's
    `children_ticks` grew by less than its ended descendants had, the difference went elsewhere.
    A lower bound where some were waited for and some were not; never counts anything twice.
    """
    ended_ticks: dict[int | None, int] = {}
    for pid, stat in before.items():
        if pid not in now:
            heir = heir_of(stat, before, now)
            ended_ticks[heir] = ended_ticks.get(heir, 0) + stat.total_ticks
    unreaped = 0
    for heir, ticks in ended_ticks.items():
        taken_over = 0 if heir is None else now[heir].children_ticks - before[heir].children_ticks
        unreaped += max(0, ticks - taken_over)
    return unreaped


def heir_of(
    ended: ProcessStat, before: Mapping[int, ProcessStat], now: Mapping[int, ProcessStat]
) -> int | None:
    """The nearest ancestor of an ended process that is still there; None if none is."""
    ancestor = ended.ppid
    for _ in before:  # bounds the climb
        if ancestor not in before or ancestor in now:
            break
        ancestor = before[ancestor].ppid
    return ancestor if ancestor in now and ancestor in before else None
