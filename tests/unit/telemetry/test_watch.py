"""One watch with real processes: what it writes, and how it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.unit.telemetry.real_watches import (
    Sleeper,
    end_reason,
    samples_of,
    started,
    trace_of,
    wait_until,
)

import paceline
from paceline.records.files import JsonlWriter
from paceline.telemetry.runtime import Runtime
from paceline.telemetry.sidecar import SidecarOptions, run_sidecar


def test_trace_begins_with_a_header_and_goes_on_with_samples(options: SidecarOptions) -> None:
    with started(options):
        wait_until(lambda: len(trace_of(options)) >= 4)
    header, *samples = trace_of(options)
    assert list(header) == [
        "schema",
        "version",
        "host",
        "boot_id",
        "run",
        "cores",
        "cgroup_cpu_limit",
        "cgroup_memory_limit_bytes",
        "interval_s",
        "started_unix_s",
    ]
    assert (header["schema"], header["host"]) == (1, socket.gethostname())
    assert (header["version"], header["run"]) == (paceline.__version__, "a")
    assert header["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (header["cores"], header["interval_s"]) == (os.cpu_count(), 0.1)
    assert header["started_unix_s"] == pytest.approx(time.time(), abs=60)
    assert samples[0]["cpu_user_percent"] is None
    assert {row["run_processes"] for row in samples} == {1}
    assert all(row["ram_total_bytes"] == psutil.virtual_memory().total for row in samples)


def test_next_watch_goes_on_after_a_torn_row(options: SidecarOptions) -> None:
    assert options.out is not None
    with JsonlWriter(options.out) as trace:
        trace.write({"whole": 1})
    with options.out.open("ab") as file:
        file.write(b'{"torn":')
    run_sidecar(replace(options, max_lifetime_s=0.05))
    first, header, *samples = trace_of(options)
    assert first == {"whole": 1}
    assert header["schema"] == 1
    assert len(samples) >= 1


def test_stop_takes_a_last_sample_at_once_and_writes_the_last_values(
    options: SidecarOptions, tmp_path: Path
) -> None:
    slow = replace(options, interval_s=10.0, textfile_dir=tmp_path / "text", run="r")
    with started(slow):
        wait_until(lambda: len(samples_of(slow)) >= 1)
        before = len(samples_of(slow))
    assert len(samples_of(slow)) in (before + 1, before + 2)  # a beat may have come between
    assert samples_of(slow)[-1]["run_pss_bytes"] is not None
    assert end_reason(slow) == "asked"
    final = (tmp_path / "a" / "final.prom").read_text()
    assert f'paceline_run_processes{{host="{socket.gethostname()}",run="r"}} 1' in final
    assert [path.read_text() for path in (tmp_path / "text").iterdir()] == [final]


def test_it_ends_when_what_it_watches_ends_and_tells_what_that_held_last(
    options: SidecarOptions, sleeper: Sleeper, tmp_path: Path
) -> None:
    second = sleeper()
    both = replace(options, pids=(*options.pids, second.pid), interval_s=10.0)
    with started(both) as handle:
        os.kill(options.pids[0], signal.SIGKILL)
        second.kill()
        # `second` stays a zombie meanwhile: its parent, this test, has not waited for it
        assert handle.wait(20)
        wait_until(lambda: end_reason(both) == "watched processes ended")
    *before, last = samples_of(both)
    assert (last["run_processes"], last["run_threads"], last["run_rss_bytes"]) == (0, 0, 0)
    final = (tmp_path / "a" / "final.prom").read_text()
    at = f'{{host="{socket.gethostname()}",run="a"}}'
    for name, key in (("threads", "run_threads"), ("resident_memory_bytes", "run_rss_bytes")):
        (held,) = re.findall(rf"^paceline_run_{name}{re.escape(at)} (\d+)", final, re.MULTILINE)
        assert int(held) == before[-1][key] > 0
    assert f"paceline_run_processes{at} 0" in final


def test_it_stays_while_a_descendant_of_an_ended_root_lives(options: SidecarOptions) -> None:
    script = "sleep 300 & echo $!; read line"
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as root:
        assert root.stdout is not None
        orphan = int(root.stdout.readline())
        try:
            watching = replace(options, pids=(root.pid,))
            with started(watching):
                wait_until(lambda: len(samples_of(watching)) >= 1)
                assert samples_of(watching)[-1]["run_processes"] == 2
                root.kill()
                root.wait(timeout=10)
                wait_until(lambda: samples_of(watching)[-1]["run_processes"] == 1)
                seen = len(trace_of(watching))
                wait_until(lambda: len(trace_of(watching)) >= seen + 3)
                assert end_reason(watching) is None
                os.kill(orphan, signal.SIGKILL)
                wait_until(lambda: end_reason(watching) == "watched processes ended")
        finally:
            root.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)


def test_host_alone_is_watched_until_the_one_who_asked_is_gone(
    options: SidecarOptions, runtime: Runtime
) -> None:
    program = (
        "import json, sys; from pathlib import Path;"
        "from paceline.telemetry import *;"
        "start_sidecar(SidecarOptions(out=Path(sys.argv[1]), interval_s=0.1, ends_with_caller=True"
        ")); print('begun', flush=True); sys.stdin.read()"
    )
    alone = replace(options, pids=())
    with subprocess.Popen(
        [sys.executable, "-c", program, str(options.out)],
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parent.parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as asker:
        try:
            assert asker.stdout is not None
            assert asker.stdout.readline() == "begun\n"
            wait_until(lambda: len(samples_of(alone)) >= 3)
            assert samples_of(alone)[-1]["run_processes"] == 0
        finally:
            asker.kill()
    wait_until(lambda: end_reason(alone) == "watched processes ended")
    wait_until(lambda: not runtime.is_locked())


def test_full_disk_ends_a_watch_with_what_was_written_intact(options: SidecarOptions) -> None:
    limited = replace(options, out=Path("/dev/full"))
    run_sidecar(limited)
    assert end_reason(limited) == "trace not writable"
