"""A sidecar's life, with real processes: start, beat, endpoint, and every way to its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

import paceline
from paceline.errors import PacelineWarning, UsageError
from paceline.records.files import JsonlWriter, read_json, read_jsonl, write_json
from paceline.telemetry.sampler import HostSampler
from paceline.telemetry.sidecar import (
    SidecarHandle,
    SidecarOptions,
    beats,
    cut_unfinished_row,
    run_sidecar,
    sidecar_is_alive,
    start_sidecar,
)

Sleeper = Callable[[], "subprocess.Popen[bytes]"]


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
def options(tmp_path: Path, sleeper: Sleeper) -> SidecarOptions:
    return SidecarOptions(
        listen_port=None,
        interval_s=0.1,
        pids=(sleeper().pid,),
        out=tmp_path / "trace.jsonl",
        state=tmp_path / "sidecar.json",
        max_lifetime_s=60.0,  # whatever a test gets wrong, nothing stays behind
    )


@contextlib.contextmanager
def started(options: SidecarOptions) -> Iterator[SidecarHandle]:
    handle = start_sidecar(options)
    assert handle is not None
    try:
        yield handle
    finally:
        handle.stop()


def wait_until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def rows(options: SidecarOptions) -> list[dict[str, Any]]:
    return list(read_jsonl(options.out)) if options.out.exists() else []


def state(options: SidecarOptions) -> dict[str, Any]:
    assert options.state is not None
    return read_json(options.state)


def end_reason(options: SidecarOptions) -> str | None:
    reason: str | None = state(options)["ended"]
    return reason


def listeners(pid: int) -> list[tuple[str, int]]:
    """Addresses at which the process listens, as the kernel tells."""
    return [
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process(pid).net_connections("all")
        if connection.status == psutil.CONN_LISTEN
    ]


def test_trace_begins_with_a_header_and_goes_on_with_samples(options: SidecarOptions) -> None:
    with started(options):
        wait_until(lambda: len(rows(options)) >= 4)
    header, *samples = rows(options)
    assert list(header) == [
        "schema",
        "host",
        "cores",
        "cgroup_cpu_limit",
        "cgroup_memory_limit_bytes",
        "interval_s",
        "started_unix_s",
    ]
    assert (header["schema"], header["host"]) == (1, socket.gethostname())
    assert (header["cores"], header["interval_s"]) == (os.cpu_count(), 0.1)
    assert header["started_unix_s"] == pytest.approx(time.time(), abs=60)
    assert samples[0]["cpu_user_percent"] is None
    assert {row["run_processes"] for row in samples} == {1}
    assert all(row["ram_total_bytes"] == psutil.virtual_memory().total for row in samples)


def test_state_tells_who_and_where_it_is(options: SidecarOptions) -> None:
    assert options.state is not None
    with started(replace(options, listen_port=0)) as handle:
        told = state(options)
        assert (told["pid"], told["port"], told["listen"]) == (handle.pid, handle.port, "127.0.0.1")
        assert (told["host"], told["interval_s"]) == (socket.gethostname(), 0.1)
        assert (told["ended"], told["endpoint_error"]) == (None, None)
        assert sidecar_is_alive(options.state)
    assert not sidecar_is_alive(options.state)
    told = state(options)
    assert told["ended"] == "asked"
    assert told["ended_unix_s"] >= told["started_unix_s"]


def test_endpoint_listens_on_loopback_only_and_tells_the_run(options: SidecarOptions) -> None:
    asked = replace(options, listen_port=0, info={"trial": "t-1", "launcher": "mpi"})
    with started(asked) as handle:
        assert handle.port is not None
        assert listeners(handle.pid) == [("127.0.0.1", handle.port)]
        url = f"http://127.0.0.1:{handle.port}/metrics"

        def answer() -> str:
            with urllib.request.urlopen(url, timeout=5) as response:
                content: bytes = response.read()
            return content.decode()

        wait_until(lambda: "paceline_run_processes{" in answer())
        host = socket.gethostname()
        assert f'paceline_run_info{{host="{host}",launcher="mpi",trial="t-1"}} 1.0' in answer()
        assert f'paceline_run_processes{{host="{host}"}} 1.0' in answer()
        assert "python_info" not in answer()


def test_without_a_port_nothing_listens(options: SidecarOptions) -> None:
    with started(options) as handle:
        assert handle.port is None
        assert listeners(handle.pid) == []


def test_port_in_use_is_told_and_sampling_goes_on(options: SidecarOptions) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.warns(PacelineWarning, match=rf"serves no metrics \(127.0.0.1:{port}"):
            handle = start_sidecar(replace(options, listen_port=port))
        assert handle is not None
        try:
            wait_until(lambda: len(rows(options)) >= 3)
        finally:
            handle.stop()
    assert handle.port is None
    assert (state(options)["listen"], state(options)["port"]) == (None, None)
    assert f"127.0.0.1:{port}" in state(options)["endpoint_error"]
    assert "no metrics endpoint" in options.out.with_name("sidecar.log").read_text()


def test_sigterm_takes_a_last_sample_at_once(options: SidecarOptions) -> None:
    slow = replace(options, interval_s=60.0)
    with started(slow):
        wait_until(lambda: len(rows(slow)) == 2)
    assert len(rows(slow)) == 3
    assert rows(slow)[-1]["run_pss_bytes"] is not None
    assert end_reason(slow) == "asked"


def test_sigint_ends_it_as_well(options: SidecarOptions) -> None:
    with started(options) as handle:
        os.kill(handle.pid, signal.SIGINT)
        wait_until(lambda: end_reason(options) == "asked")


def test_it_ends_when_what_it_watches_ends(options: SidecarOptions, sleeper: Sleeper) -> None:
    other = sleeper()
    both = replace(options, pids=(*options.pids, other.pid), interval_s=60.0)
    with started(both):
        os.kill(options.pids[0], signal.SIGKILL)
        other.kill()
        # `other` stays a zombie meanwhile: its parent, this test, has not waited for it
        wait_until(lambda: end_reason(both) == "watched processes ended")
    assert rows(both)[-1]["run_processes"] == 0


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
                wait_until(lambda: len(rows(watching)) >= 2)
                assert rows(watching)[-1]["run_processes"] == 2
                root.kill()
                root.wait(timeout=10)
                wait_until(lambda: rows(watching)[-1]["run_processes"] == 1)
                seen = len(rows(watching))
                wait_until(lambda: len(rows(watching)) >= seen + 3)
                assert end_reason(watching) is None
                os.kill(orphan, signal.SIGKILL)
                wait_until(lambda: end_reason(watching) == "watched processes ended")
        finally:
            root.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)


def test_it_ends_when_its_lifetime_is_over(options: SidecarOptions) -> None:
    run_sidecar(replace(options, max_lifetime_s=0.25))
    assert end_reason(options) == "lifetime reached"
    assert len(rows(options)) >= 3


def test_signals_are_as_before_after_a_run_in_this_process(options: SidecarOptions) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    run_sidecar(replace(options, max_lifetime_s=0.01))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_kill_9_leaves_a_readable_trace_and_a_state_that_is_not_believed(
    options: SidecarOptions,
) -> None:
    assert options.state is not None
    with started(options) as handle:
        wait_until(lambda: len(rows(options)) >= 3)
        os.kill(handle.pid, signal.SIGKILL)
        wait_until(lambda: not sidecar_is_alive(options.state or Path()))
        assert psutil.Process(options.pids[0]).status() == psutil.STATUS_SLEEPING  # goes on
    assert len(rows(options)) >= 3
    assert end_reason(options) is None


def test_next_sidecar_goes_on_after_a_torn_row(options: SidecarOptions) -> None:
    with JsonlWriter(options.out) as trace:
        trace.write({"whole": 1})
    with options.out.open("ab") as file:
        file.write(b'{"torn":')
    run_sidecar(replace(options, max_lifetime_s=0.01))
    first, header, *samples = rows(options)
    assert first == {"whole": 1}
    assert header["schema"] == 1
    assert len(samples) >= 1


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (b"", b""),
        (b"{}\n", b"{}\n"),
        (b"{}\n{", b"{}\n"),
        (b"torn", b""),
        (b"{}\n" + b"x" * 10000, b"{}\n"),
        (b"x" * 4095 + b"\n" + b"y" * 4096, b"x" * 4095 + b"\n"),
    ],
)
def test_only_an_unfinished_last_row_is_cut(tmp_path: Path, content: bytes, left: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    cut_unfinished_row(path)
    assert path.read_bytes() == left


def test_full_disk_ends_it_with_what_was_written_intact(
    options: SidecarOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = JsonlWriter.write

    def fails_after_three(self: JsonlWriter, row: object) -> None:
        if len(rows(options)) == 3:
            raise OSError(28, "No space left on device")
        write(self, row)

    monkeypatch.setattr(JsonlWriter, "write", fails_after_three)
    run_sidecar(options)
    assert end_reason(options) == "trace not writable"
    assert len(rows(options)) == 3


def test_sample_that_cannot_be_read_is_left_out(
    options: SidecarOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = HostSampler.sample
    calls = []

    def fails_once(self: HostSampler, *, final: bool = False) -> object:
        calls.append(final)
        if len(calls) == 1:
            raise OSError(24, "Too many open files")
        return sample(self, final=final)

    monkeypatch.setattr(HostSampler, "sample", fails_once)
    run_sidecar(replace(options, max_lifetime_s=0.5))
    assert end_reason(options) == "lifetime reached"
    assert len(calls) >= 2
    assert len(rows(options)) == len(calls)  # the header in place of the one missing


def test_process_that_does_not_exist_is_refused(options: SidecarOptions, sleeper: Sleeper) -> None:
    gone = sleeper()
    gone.kill()
    gone.wait(timeout=10)
    with pytest.raises(UsageError, match=f"found none of {gone.pid}"):
        run_sidecar(replace(options, pids=(gone.pid,)))
    assert not options.out.exists()


def test_trace_that_cannot_be_opened_is_refused(options: SidecarOptions, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a file to write the trace to"):
        run_sidecar(replace(options, out=tmp_path))


def test_sidecar_that_cannot_start_is_a_warning(options: SidecarOptions, sleeper: Sleeper) -> None:
    gone = sleeper()
    gone.kill()
    gone.wait(timeout=10)
    with pytest.warns(PacelineWarning, match=r"ended with status 2; its log is .*sidecar\.log"):
        assert start_sidecar(replace(options, pids=(gone.pid,))) is None
    log = options.out.with_name("sidecar.log").read_text()
    assert f"found none of {gone.pid}" in log
    assert "Traceback" not in log


def test_unwritable_folder_is_a_warning(options: SidecarOptions, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(PacelineWarning, match="could not start"):
        assert start_sidecar(replace(options, out=tmp_path / "file" / "trace.jsonl")) is None


def test_stop_kills_a_sidecar_that_does_not_answer_and_may_be_repeated(
    options: SidecarOptions,
) -> None:
    with started(options) as handle:
        os.kill(handle.pid, signal.SIGSTOP)
        handle.stop(timeout_s=0.2)
        assert not psutil.pid_exists(handle.pid)
        handle.stop()


def test_state_of_another_process_or_host_is_not_believed(
    options: SidecarOptions, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    with started(options):
        told = state(options)
        write_json(path, told)
        assert sidecar_is_alive(path)
        for change in ({"start_ticks": told["start_ticks"] + 1}, {"host": "elsewhere"}):
            write_json(path, {**told, **change})
            assert not sidecar_is_alive(path)
    write_json(path, {})
    assert not sidecar_is_alive(path)
    assert not sidecar_is_alive(tmp_path / "none.json")


def test_it_starts_in_a_session_of_its_own_away_from_the_ranks_core(
    options: SidecarOptions,
) -> None:
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(affinity)})  # as mpirun binds a rank
    try:
        with started(options) as handle:
            assert os.getsid(handle.pid) == handle.pid
            assert os.sched_getaffinity(handle.pid) >= affinity
    finally:
        os.sched_setaffinity(0, affinity)


def test_beats_keep_their_places_and_leave_out_missed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = iter([100.0, 102.1, 104.0, 111.0, 111.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(now_s))
    # woken late by 0.1 s, early, late by three beats, and in between
    assert list(islice(beats(100.0, 2.0), 5)) == [102.0, 104.0, 106.0, 112.0, 114.0]


def test_sidecar_imports_nothing_heavy() -> None:
    program = (
        "import sys, paceline.telemetry.sidecar, paceline.telemetry.exporter;"
        "print([m for m in sys.modules if m.partition('.')[0] in"
        " ('torch', 'numpy', 'pandas', 'pydantic', 'pyspark', 'pyarrow', 'rich', 'mpi4py')])"
    )
    told = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(told.stdout.replace("'", '"')) == []
