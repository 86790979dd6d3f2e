"""Figures of the sidecar against a load whose size is known from elsewhere: within 3 %.

These are CPU time, memory, threads, context switches, bytes read and bytes written of the run, and
waiting for I/O and bytes read of the host. Networks and page faults have no load of known size
here.

What is known comes from the program that makes the load: what it asked the kernel for, and what
getrusage(2) booked. Loads run on a machine that others use too, so figures of the whole host are
held to be at least the load.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.functional.programs import known_load

from paceline.measure.records.files import read_jsonl

pytestmark = pytest.mark.functional

WITHIN = 0.03
INTERVAL_S = 0.1
LIMIT_S = 60.0
# Both sides count CPU time in ticks of 10 ms.
CPU_TICKS_S = 0.03
MEASURABLE_IOWAIT_S = 0.1

Row = dict[str, Any]


@dataclass
class WatchedLoad:
    """A load that has not begun yet, and the trace of the sidecar that watches it."""

    program: subprocess.Popen[str]
    trace: Path
    sidecar: subprocess.Popen[bytes]

    def rows(self) -> list[Row]:
        rows = read_jsonl(self.trace) if self.trace.exists() else ()
        return [row for row in rows if "unix_s" in row]

    def row_after(self, unix_s: float, expensive: bool) -> Row:
        """Return the first row after that moment; expensive: one that has expensive figures."""
        limit = time.monotonic() + LIMIT_S
        while time.monotonic() < limit:
            for row in self.rows():
                if row["unix_s"] > unix_s and not (expensive and row["run_pss_bytes"] is None):
                    return row
            assert self.program.poll() is None, "the load has ended"
            time.sleep(0.05)
        raise AssertionError(f"no such row within {LIMIT_S} s; the trace: {self.rows()[-3:]}")

    def put_on(self, *, expensive: bool = False) -> tuple[Row, dict[str, float], Row]:
        """Return a row before the load, the figures of the load, and a row with all of it."""
        before = self.row_after(0.0, expensive)
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write("go\n")
        self.program.stdin.flush()
        truth: dict[str, float] = json.loads(self.program.stdout.readline())
        return before, truth, self.row_after(truth["ended_unix_s"] + INTERVAL_S, expensive)


Watch = Callable[[str], WatchedLoad]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """Starts a load and a sidecar of its own for it; ends both after the test."""
    started: list[subprocess.Popen[Any]] = []

    def start(kind: str) -> WatchedLoad:
        program = subprocess.Popen(
            [sys.executable, "-S", known_load.__file__, kind, str(tmp_path / "load")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(program)
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        trace = tmp_path / "trace.jsonl"
        sidecar = subprocess.Popen(
            [
                *(sys.executable, "-m", "paceline.cli", "sidecar", "--limit=120"),
                *(f"--pid={program.pid}", f"--interval={INTERVAL_S}", f"--out={trace}"),
            ]
        )
        started.append(sidecar)
        return WatchedLoad(program, trace, sidecar)

    yield start
    for process in started:
        process.terminate()
    for process in started:
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=20)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def ran(before: Row, after: Row, name: str) -> float:
    grown: float = after[name] - before[name]
    return grown


def host_busy_s(row: Row) -> float:
    return sum(row["cpu_seconds"][state] for state in ("user", "system", "other"))


def test_cpu_time_of_one_core_is_what_the_kernel_booked(watch: Watch) -> None:
    load = watch("one_core")
    before, truth, after = load.put_on()
    assert truth["cpu_s"] >= 2.0
    assert ran(before, after, "run_cpu_seconds") == pytest.approx(
        truth["cpu_s"], rel=WITHIN, abs=CPU_TICKS_S
    )
    assert host_busy_s(after) - host_busy_s(before) >= truth["cpu_s"] * (1 - WITHIN) - CPU_TICKS_S
    busy_s = sum(after["core_busy_s"]) - sum(before["core_busy_s"])
    assert busy_s == pytest.approx(host_busy_s(after) - host_busy_s(before), rel=0.01, abs=0.05)


def test_a_gibibyte_is_a_gibibyte_resident_and_proportional(watch: Watch) -> None:
    before, truth, after = watch("one_gibibyte").put_on(expensive=True)
    allocated_bytes = truth["allocated_bytes"]
    assert ran(before, after, "run_rss_bytes") == pytest.approx(allocated_bytes, rel=WITHIN)
    assert ran(before, after, "run_pss_bytes") == pytest.approx(allocated_bytes, rel=WITHIN)


def test_sixty_four_threads_and_their_switches_are_counted(watch: Watch) -> None:
    before, truth, after = watch("many_threads").put_on(expensive=True)
    assert before["run_threads"] == 1
    assert after["run_threads"] == truth["threads"] == 64
    assert truth["voluntary_switches"] >= 63 * known_load.SLEEPS
    # the program's own waiting for lines adds a few
    for kind in ("voluntary", "involuntary"):
        assert ran(before, after, f"run_{kind}_context_switches") == pytest.approx(
            truth[f"{kind}_switches"], rel=WITHIN, abs=20
        ), kind


@pytest.fixture(scope="module")
def _uncached_reads(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip tests where reads cannot be seen."""
    folder = tmp_path_factory.mktemp("probe")
    probe = folder / "probe"
    known_load.prepare(str(probe), known_load.CHILD_READ_BYTES)
    before = _own_read_bytes()
    try:
        known_load.read_uncached(str(probe), known_load.CHILD_READ_BYTES)
    except OSError as error:
        pytest.skip(f"{folder}: this file system cannot read past the page cache: {error}")
    if _own_read_bytes() - before < known_load.CHILD_READ_BYTES:
        pytest.skip(f"{folder}: the kernel does not count reads from what this lies on")


def _own_read_bytes() -> int:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError as error:
        pytest.skip(f"the kernel does not count a process's I/O: {error}")
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


@pytest.mark.usefixtures("_uncached_reads")
def test_uncached_reads_from_disk_are_counted(watch: Watch) -> None:
    before, truth, after = watch("disk").put_on()
    assert truth["read_bytes"] == 64 * 2**20
    assert ran(before, after, "run_read_bytes") == pytest.approx(truth["read_bytes"], rel=WITHIN)
    if "disks" not in after:
        pytest.skip("the host's disks are not visible in this container")
    by_disk = {
        name: counters["read_bytes"] - before["disks"][name]["read_bytes"]
        for name, counters in after["disks"].items()
        if name in before["disks"]
    }
    assert max(by_disk.values()) >= truth["read_bytes"] * (1 - WITHIN)


@pytest.mark.usefixtures("_uncached_reads")
def test_writes_are_counted_and_so_is_the_waiting_for_the_disk(watch: Watch) -> None:
    before, truth, after = watch("synced_writes").put_on()
    written = ran(before, after, "run_written_bytes")
    assert written == pytest.approx(truth["written_bytes"], rel=WITHIN)
    if truth["iowait_s"] < MEASURABLE_IOWAIT_S:  # the kernel books it only while a core is idle
        pytest.skip("no core was idle while the load waited for the disk")
    waited_s = after["cpu_seconds"]["iowait"] - before["cpu_seconds"]["iowait"]
    assert waited_s >= truth["iowait_s"] * (1 - WITHIN)
    assert waited_s <= (after["unix_s"] - before["unix_s"]) * len(after["core_busy_s"])


@pytest.mark.usefixtures("_uncached_reads")
def test_children_that_come_and_go_between_samples_are_counted_once(watch: Watch) -> None:
    before, truth, after = watch("children").put_on()
    assert after["run_processes"] == 1
    assert truth["cpu_s"] >= known_load.CHILDREN * 0.05
    assert ran(before, after, "run_cpu_seconds") == pytest.approx(
        truth["cpu_s"], rel=WITHIN, abs=CPU_TICKS_S
    )
    assert ran(before, after, "run_read_bytes") == pytest.approx(
        truth["read_bytes"], rel=WITHIN, abs=2**20
    )
