"""Reading /proc, against files in the kernel's format and exact numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from paceline.telemetry import procfs
from paceline.telemetry.procfs import ContextSwitches, ProcessStat, ProcFs

if TYPE_CHECKING:
    from tests.unit.telemetry.conftest import FakeProc

# Fields 1..24 and on of proc(5); the command name is as hostile as it may be.
STAT = (
    "4242 (a) S 1 (b) R 17 4242 4000 34816 -1 4194560 1000 2000 3 4 "
    "111 22 3333 444 20 0 7 0 987654 1000000 250 18446744073709551615 1 1 0\n"
)


def test_stat_of_a_process_with_brackets_in_its_name(fake_proc: FakeProc) -> None:
    fake_proc.add(4242, STAT)
    source = ProcFs(str(fake_proc.root), ticks_per_s=100, page_bytes=4096)
    # "(a) S 1 (b)" is the name: the last bracket ends it
    assert source.stat(4242) == ProcessStat(
        pid=4242,
        ppid=17,
        session=4000,
        start_ticks=987654,
        ended=False,
        own_ticks=133,
        children_ticks=3777,
        threads=7,
        rss_bytes=1_024_000,
    )


@pytest.mark.parametrize(
    ("state", "threads", "ended"),
    [("Z", 1, True), ("Z", 0, True), ("X", 0, True), ("Z", 3, False), ("R", 1, False)],
)
def test_zombie_has_ended_unless_other_threads_of_it_run(
    fake_proc: FakeProc, state: str, threads: int, ended: bool
) -> None:
    fake_proc.add(5, f"5 (x) {state} 1 5 5 0 -1 0 0 0 0 0 1 1 0 0 20 0 {threads} 0 9 0 0 0 0 0 0\n")
    stat = ProcFs(str(fake_proc.root)).stat(5)
    assert stat is not None
    assert stat.ended is ended


def test_pids_are_the_numbered_folders_only(fake_proc: FakeProc) -> None:
    fake_proc.add(1, STAT)
    fake_proc.add(4242, STAT)
    assert ProcFs(str(fake_proc.root)).pids() == {1, 4242}


@pytest.mark.parametrize(
    ("loadavg", "newest"),
    [("0.10 0.05 0.01 1/234 5678\n", 5678), ("0.10 0.05 0.01\n", None), (None, None)],
)
def test_newest_number_is_the_kernels_last_word(
    loadavg: str | None, newest: int | None, fake_proc: FakeProc
) -> None:
    if loadavg is not None:
        (fake_proc.root / "loadavg").write_text(loadavg)
    assert ProcFs(str(fake_proc.root)).newest_pid() == newest


def test_newest_number_rises_with_a_new_process() -> None:
    source = ProcFs()
    before = source.newest_pid()
    if before is None:
        pytest.skip("this /proc/loadavg does not tell")
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    assert source.newest_pid() != before


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_process_that_is_asked_for_again_tells_the_same_until_it_is_gone() -> None:
    source = ProcFs()
    before = open_descriptors()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        first = source.stat(child.pid, again=True)
        assert first is not None
        assert source.stat(child.pid, again=True) is not None
        assert source.io_bytes(child.pid) is not None
        assert len(open_descriptors() - before) == 2, "stat and io stay open"
    finally:
        child.kill()
        child.wait()
    assert source.stat(child.pid, again=True) is None
    assert open_descriptors() == before


def test_what_is_not_asked_for_any_more_is_closed(fake_proc: FakeProc) -> None:
    fake_proc.add(4242, STAT)
    before = open_descriptors()
    source = ProcFs(str(fake_proc.root), ticks_per_s=100, page_bytes=4096)
    source.stat(4242, again=True)
    assert open_descriptors() != before
    source.let_go([4242, 4243])
    assert open_descriptors() == before


def test_only_so_many_files_are_kept_open(
    fake_proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "_MOST_KEPT", 1)
    for pid in (4242, 4243):
        fake_proc.add(pid, STAT)
    source = ProcFs(str(fake_proc.root), ticks_per_s=100, page_bytes=4096)
    source.stat(4242, again=True)
    before = open_descriptors()
    assert source.stat(4243, again=True) is not None
    assert open_descriptors() == before
    source.let_go([4242])


def test_switches_are_told_for_every_thread(fake_proc: FakeProc) -> None:
    fake_proc.add(7, STAT, {7: (10, 1), 8: (200, 30)})
    assert ProcFs(str(fake_proc.root)).thread_switches(7) == {
        7: ContextSwitches(10, 1),
        8: ContextSwitches(200, 30),
    }


def test_pss_is_in_bytes(fake_proc: FakeProc) -> None:
    fake_proc.add(7, STAT)
    (fake_proc.root / "7" / "smaps_rollup").write_text(
        "55d0-7ffd ---p 00000000 00:00 0 [rollup]\nRss:  2048 kB\nPss:  1500 kB\nPss_Anon: 7 kB\n"
    )
    assert ProcFs(str(fake_proc.root)).pss_bytes(7) == 1_536_000


def test_vanished_process_reads_as_gone(fake_proc: FakeProc) -> None:
    source = ProcFs(str(fake_proc.root))
    assert source.stat(99) is None
    assert source.pss_bytes(99) is None
    assert source.thread_switches(99) == {}


def test_emptied_stat_reads_as_gone(fake_proc: FakeProc) -> None:
    fake_proc.add(99, "")
    assert ProcFs(str(fake_proc.root)).stat(99) is None


def test_this_process_on_the_real_proc() -> None:
    stat = ProcFs().stat(os.getpid())
    assert stat is not None
    assert (stat.pid, stat.ppid) == (os.getpid(), os.getppid())
    assert stat.session == os.getsid(0)
    times = os.times()
    assert stat.own_ticks / 100 == pytest.approx(times.user + times.system, abs=0.2)
    assert stat.rss_bytes > 5_000_000
    assert stat.threads >= 1
    assert os.getpid() in ProcFs().pids()


def test_bytes_from_and_to_storage(fake_proc: FakeProc) -> None:
    fake_proc.add(7, STAT)
    (fake_proc.root / "7" / "io").write_text(
        "rchar: 1\nwchar: 2\nsyscr: 3\nsyscw: 4\nread_bytes: 4096\nwrite_bytes: 8192\n"
        "cancelled_write_bytes: 5\n"
    )
    assert ProcFs(str(fake_proc.root)).io_bytes(7) == (4096, 8192)
    assert ProcFs(str(fake_proc.root)).io_bytes(99) is None


def test_open_files_are_counted(fake_proc: FakeProc) -> None:
    fake_proc.add(7, STAT)
    for number in range(3):
        (fake_proc.root / "7" / "fd" / str(number)).mkdir(parents=True)
    assert ProcFs(str(fake_proc.root)).open_files(7) == 3
    assert ProcFs(str(fake_proc.root)).open_files(99) is None


def test_clock_of_processes_is_that_of_their_starts() -> None:
    source = ProcFs()
    stat = source.stat(os.getpid())
    assert stat is not None
    assert 0 <= source.now_ticks() - stat.start_ticks < 24 * 3600 * source.ticks_per_s
