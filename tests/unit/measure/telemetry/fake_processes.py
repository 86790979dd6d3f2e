"""A process table in memory, with numbers that tests choose."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from paceline.collectives.host import Stat
from paceline.measure.telemetry import processes


@dataclass
class Entry:
    """One process."""

    pid: int
    ppid: int
    cpu_s: float = 0.0
    children_cpu_s: float = 0.0
    threads: int = 1
    rss_bytes: int = 1000
    pss_bytes: int = 900
    files: int = 3
    io: tuple[int, int] | None = (0, 0)  # None: not readable
    is_zombie: bool = False
    started_ticks: int = field(default_factory=itertools.count().__next__)
    switches: dict[int, tuple[int, int]] = field(default_factory=dict)


class Table:
    """Processes by their ids."""

    def __init__(self) -> None:
        self.now: dict[int, Entry] = {}
        self.looked_at: list[int] = []

    def add(self, pid: int, ppid: int, **values: Any) -> Entry:
        self.now[pid] = Entry(pid, ppid, **values)
        return self.now[pid]

    def end(self, pid: int, *, reaped: bool = True) -> None:
        """End a process; its parent gets its times if it waits for it."""
        ended = self.now.pop(pid)
        parent = self.now.get(ended.ppid)
        if reaped and parent is not None:
            parent.children_cpu_s += ended.cpu_s + ended.children_cpu_s
            if parent.io is not None and ended.io is not None:
                parent.io = (parent.io[0] + ended.io[0], parent.io[1] + ended.io[1])
        for child in self.now.values():
            if child.ppid == pid:
                child.ppid = 1

    def process(self, pid: int) -> FakeProcess:
        if pid not in self.now:
            raise psutil.NoSuchProcess(pid)
        return FakeProcess(self, self.now[pid])

    def stat(self, pid: int) -> Stat | None:
        self.looked_at.append(pid)
        entry = self.now.get(pid)
        if entry is None:
            return None
        return Stat(
            is_running=not entry.is_zombie,
            parent=entry.ppid,
            start_ticks=entry.started_ticks,
            cpu_s=entry.cpu_s + entry.children_cpu_s,
            threads=entry.threads,
            rss_bytes=entry.rss_bytes,
        )


class FakeProcess:
    """The part of psutil.Process that the tree uses."""

    def __init__(self, table: Table, entry: Entry) -> None:
        self._table, self._entry, self.pid = table, entry, entry.pid

    def _live(self) -> Entry:
        if self._table.now.get(self.pid) is not self._entry:
            raise psutil.NoSuchProcess(self.pid)
        return self._entry

    def memory_full_info(self) -> SimpleNamespace:
        return SimpleNamespace(pss=self._live().pss_bytes)

    def num_fds(self) -> int:
        return self._live().files


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    found = Table()
    fake = SimpleNamespace(
        Process=found.process,
        pids=lambda: list(found.now),
        NoSuchProcess=psutil.NoSuchProcess,
        AccessDenied=psutil.AccessDenied,
    )
    monkeypatch.setattr(processes, "psutil", fake)
    monkeypatch.setattr(processes, "read_stat", found.stat)
    monkeypatch.setattr(processes, "read_process_io", lambda pid: found.now[pid].io)
    monkeypatch.setattr(
        processes, "read_thread_switches", lambda pid: dict(found.now[pid].switches)
    )
    return found
