"""Counters of process trees that are not CPU time: context switches, bytes from and to storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paceline.telemetry.processes import heir_of
from paceline.telemetry.procfs import IoBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paceline.telemetry.procfs import ContextSwitches, ProcessSource, ProcessStat

_T = TypeVar("_T")


class Figures:
    """What processes say at one tick, asked once for all trees that they are in."""

    def __init__(self, source: ProcessSource) -> None:
        self._source = source
        self._told: dict[tuple[str, int], object] = {}

    def next_tick(self) -> None:
        """Forget what was told."""
        self._told.clear()

    def thread_switches(self, pid: int) -> dict[int, ContextSwitches]:
        return self._once("switches", pid, self._source.thread_switches)

    def pss_bytes(self, pid: int) -> int | None:
        """Raises PermissionError where the process is there but may not be read."""
        return self._once("pss", pid, self._source.pss_bytes)

    def io_bytes(self, pid: int) -> IoBytes | None:
        """Raises PermissionError where the process is there but may not be read."""
        return self._once("io", pid, self._source.io_bytes)

    def open_files(self, pid: int) -> int | None:
        """Raises PermissionError where the process is there but may not be read."""
        return self._once("files", pid, self._source.open_files)

    def _once(self, what: str, pid: int, ask: Callable[[int], _T]) -> _T:
        key = (what, pid)
        if key not in self._told:
            try:
                self._told[key] = ask(pid)
            except PermissionError as error:
                self._told[key] = error
        told: Any = self._told[key]
        if isinstance(told, PermissionError):
            raise told
        answer: _T = told  # the key says what was asked
        return answer


class DeepReading(NamedTuple):
    """What is costly to read: page tables are walked, every thread has a file."""

    pss_bytes: int | None
    open_files: int | None


def read_deep(figures: Figures, pids: Iterable[int]) -> DeepReading:
    """Sums over live processes; None where one of them may not be read."""
    live = list(pids)
    return DeepReading(
        _sum_of(figures.pss_bytes, live),
        _sum_of(figures.open_files, live),
    )


def _sum_of(ask: Callable[[int], int | None], pids: list[int]) -> int | None:
    try:
        told = [size for pid in pids if (size := ask(pid)) is not None]
    except PermissionError:
        return None
    return sum(told) if told or not pids else None


class SwitchAccount:
    """Context switches since the first reading; what ended threads had stays counted.

    from_birth: the processes are younger than the watch, so all of theirs count.
    """

    def __init__(
        self,
        figures: Figures | ProcessSource,
        *,
        from_birth: bool = False,
        voluntary: int = 0,
        involuntary: int = 0,
    ) -> None:
        self._figures = figures
        self._last: Mapping[int, Mapping[int, tuple[int, int]]] | None = {} if from_birth else None
        self.voluntary = voluntary
        self.involuntary = involuntary

    def read(self, pids: Iterable[int]) -> None:
        """Ask every thread of `pids`; add what is new since the last time."""
        last, current = self._last, {}
        for pid in pids:
            threads: dict[int, tuple[int, int]] = dict(self._figures.thread_switches(pid))
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


class IoAccount:
    """Bytes from and to storage since the first reading, ended children's included.

    A process's own bytes and those of children that it waited for are told as one sum. So what an
    ended process had is taken to be in the nearest ancestor that is still in the tree; without
    one, what was last seen of it stays counted. No sum ever falls.
    """

    def __init__(
        self,
        figures: Figures,
        is_older: Callable[[ProcessStat], bool] = lambda _stat: True,
        *,
        added: Sequence[int] | None = None,
    ) -> None:
        """is_older: whether what a process had when it was first read is not the watch's.
        added: that of an account which this one carries on."""
        self._figures = figures
        self._is_older = is_older
        self._is_first = added is None
        self._members: dict[int, ProcessStat] = {}
        self._last: dict[int, IoBytes] = {}
        self.added = [0, 0] if added is None else list(added)  # to the sum over what lives
        self._told = IoBytes(0, 0)

    def read(self, members: Mapping[int, ProcessStat]) -> IoBytes | None:
        """Of the members of a tree as of its last reading; None where one may not be read."""
        try:
            now = {pid: self._bytes_of(pid) for pid in members}
        except PermissionError:
            return None
        self._keep_ended(self._members, members)
        if self._members or self._is_first:
            for pid, stat in members.items():
                if pid not in self._members and self._is_older(stat):
                    self._add(now[pid], -1)
        self._members, self._last = dict(members), now
        read = sum(told.read for told in now.values()) + self.added[0]
        written = sum(told.written for told in now.values()) + self.added[1]
        self._told = IoBytes(max(self._told.read, read), max(self._told.written, written))
        return self._told

    def _bytes_of(self, pid: int) -> IoBytes:
        told = self._figures.io_bytes(pid)
        # Gone since the walk: it counts as it was until the next walk finds out who has its bytes.
        return self._last.get(pid, IoBytes(0, 0)) if told is None else told

    def _keep_ended(
        self, before: Mapping[int, ProcessStat], now: Mapping[int, ProcessStat]
    ) -> None:
        for pid, stat in before.items():
            is_there = pid in now and now[pid].start_ticks == stat.start_ticks
            if not is_there and heir_of(stat, before, now) is None:
                self._add(self._last[pid], 1)

    def _add(self, told: IoBytes, sign: int) -> None:
        self.added[0] += sign * told.read
        self.added[1] += sign * told.written
