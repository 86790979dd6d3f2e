"""A process table in memory, and a /proc of files, both with numbers that tests choose; and real
processes with a runtime folder of their own."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from paceline.telemetry.procfs import ContextSwitches, IoBytes, ProcessStat
from paceline.telemetry.runtime import RUNTIME_VARIABLE, Runtime, runtime_of
from paceline.telemetry.sidecar import SidecarOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tests.unit.telemetry.real_watches import Sleeper


@dataclass
class FakeProcesses:
    """Implements ProcessSource; 100 ticks a second, as Linux."""

    ticks_per_s: int = 100
    table: dict[int, ProcessStat] = field(default_factory=dict)
    switches: dict[int, dict[int, ContextSwitches]] = field(default_factory=dict)
    pss: dict[int, int] = field(default_factory=dict)
    io: dict[int, IoBytes] = field(default_factory=dict)
    files: dict[int, int] = field(default_factory=dict)
    clock_ticks: int = 0  # since boot; what starts later is younger than a watch that begins now
    denied: set[int] = field(default_factory=set)
    newest: int | None = None
    listings: int = 0
    reads: list[int] = field(default_factory=list)
    let_go_of: set[int] = field(default_factory=set)
    before_stat: Callable[[int], None] | None = None  # what happens just before a process is read

    def add(self, pid: int, ppid: int, **changes: int | bool) -> None:
        stat = ProcessStat(
            pid=pid,
            ppid=ppid,
            session=1,
            start_ticks=pid,
            ended=False,
            own_ticks=0,
            children_ticks=0,
            threads=1,
            rss_bytes=1000,
        )
        self.table[pid] = stat._replace(**changes)  # type: ignore[arg-type]

    def change(self, pid: int, **changes: int | bool) -> None:
        self.table[pid] = self.table[pid]._replace(**changes)  # type: ignore[arg-type]

    def reap(self, pid: int, by: int | None) -> None:
        """`pid` ends and `by` (None: a process outside the table) has waited for it; its children
        go to init."""
        ended = self.table.pop(pid)
        if by is not None:
            taken = self.table[by].children_ticks + ended.own_ticks + ended.children_ticks
            self.change(by, children_ticks=taken)
        for other in list(self.table.values()):
            if other.ppid == pid:
                self.change(other.pid, ppid=1)

    def now_ticks(self) -> int:
        return self.clock_ticks

    def newest_pid(self) -> int | None:
        return self.newest

    def pids(self) -> set[int]:
        self.listings += 1
        return set(self.table)

    def let_go(self, pids: Iterable[int]) -> None:
        self.let_go_of |= set(pids)

    def stat(self, pid: int, *, again: bool = False) -> ProcessStat | None:
        self.reads.append(pid)
        if self.before_stat is not None:
            self.before_stat(pid)
        if pid in self.denied:
            raise PermissionError(13, "denied", str(pid))
        return self.table.get(pid)

    def thread_switches(self, pid: int) -> dict[int, ContextSwitches]:
        return self.switches.get(pid, {})

    def pss_bytes(self, pid: int) -> int | None:
        if pid in self.denied:
            raise PermissionError(13, "denied", str(pid))
        return self.pss.get(pid)

    def io_bytes(self, pid: int) -> IoBytes | None:
        if pid in self.denied:
            raise PermissionError(13, "denied", str(pid))
        return self.io.get(pid, IoBytes(0, 0)) if pid in self.table else None

    def open_files(self, pid: int) -> int | None:
        if pid in self.denied:
            raise PermissionError(13, "denied", str(pid))
        return self.files.get(pid)


@pytest.fixture
def processes() -> FakeProcesses:
    return FakeProcesses()


@dataclass(frozen=True)
class FakeProc:
    """Writes files in the kernel's own format below `root`."""

    root: Path

    def add(self, pid: int, stat: str, switches: dict[int, tuple[int, int]] | None = None) -> None:
        folder = self.root / str(pid)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(stat)
        for thread, (voluntary, involuntary) in (switches or {}).items():
            (folder / "task" / str(thread)).mkdir(parents=True)
            (folder / "task" / str(thread) / "status").write_text(
                f"Name:\tpython\nThreads:\t2\nvoluntary_ctxt_switches:\t{voluntary}\n"
                f"nonvoluntary_ctxt_switches:\t{involuntary}\n"
            )


@pytest.fixture
def fake_proc(tmp_path: Path) -> FakeProc:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1 kB\n")
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A runtime folder of the test's own; no sampler is left in it."""
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path / "runtime"))
    found = runtime_of()
    yield found
    state = found.state()
    if state is not None:
        os.kill(state.process.pid, signal.SIGKILL)
        pytest.fail("a sampler was left behind")


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    """Starts processes that do nothing for long; ends them after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "300"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=10)


@pytest.fixture
def options(tmp_path: Path, sleeper: Sleeper, runtime: Runtime) -> SidecarOptions:
    assert runtime.state() is None
    return SidecarOptions(
        listen_port=None,
        interval_s=0.1,
        pids=(sleeper().pid,),
        out=tmp_path / "a" / "trace.jsonl",
        state=tmp_path / "a" / "sidecar.json",
        max_lifetime_s=60.0,  # whatever a test gets wrong, nothing stays behind
    )
