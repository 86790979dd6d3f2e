"""Watches with real processes: from their start, over samplers that die, to every way to end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import paceline
from paceline.errors import PacelineWarning, UsageError
from paceline.records.files import JsonlWriter, read_json, read_jsonl, write_json
from paceline.telemetry.keeper import Keeper
from paceline.telemetry.process_ids import ProcessId
from paceline.telemetry.runtime import RUNTIME_VARIABLE, Runtime, SamplerState, runtime_of
from paceline.telemetry.sidecar import (
    SidecarHandle,
    SidecarOptions,
    begin_watch,
    run_sidecar,
    sidecar_is_alive,
    start_sidecar,
)
from paceline.telemetry.watches import (
    remove_request,
    request_of,
    take_refusal,
    write_request,
)

Sleeper = Callable[[], "subprocess.Popen[bytes]"]


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


def trace_of(options: SidecarOptions) -> list[dict[str, Any]]:
    assert options.out is not None
    return list(read_jsonl(options.out)) if options.out.exists() else []


def samples_of(options: SidecarOptions) -> list[dict[str, Any]]:
    return [row for row in trace_of(options) if "unix_s" in row]


def state_of(options: SidecarOptions) -> dict[str, Any]:
    assert options.state is not None
    return read_json(options.state)


def end_reason(options: SidecarOptions) -> str | None:
    reason: str | None = state_of(options)["ended"]
    return reason


def listeners(pid: int) -> list[tuple[str, int]]:
    """Addresses at which the process listens, as the kernel tells."""
    return [
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process(pid).net_connections("all")
        if connection.status == psutil.CONN_LISTEN
    ]


def answer_of(port: int | None) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        content: bytes = response.read()
    return content.decode()


def other(options: SidecarOptions, pid: int, **changes: Any) -> SidecarOptions:
    """A second watch, of another process and with another trace."""
    assert options.out is not None
    folder = options.out.parent.parent / "b"
    return replace(
        options,
        **{
            "out": folder / "trace.jsonl",
            "state": folder / "sidecar.json",
            "pids": (pid,),
            **changes,
        },
    )


def test_trace_begins_with_a_header_and_goes_on_with_samples(options: SidecarOptions) -> None:
    with started(options):
        wait_until(lambda: len(trace_of(options)) >= 4)
    header, *samples = trace_of(options)
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
        told = state_of(options)
        assert (told["pid"], told["port"], told["listen"]) == (handle.pid, handle.port, "127.0.0.1")
        assert (told["host"], told["interval_s"]) == (socket.gethostname(), 0.1)
        assert (told["ended"], told["endpoint_error"]) == (None, None)
        assert sidecar_is_alive(options.state)
    assert not sidecar_is_alive(options.state)
    told = state_of(options)
    assert told["ended"] == "asked"
    assert told["ended_unix_s"] >= told["started_unix_s"]


def test_endpoint_listens_on_loopback_only_and_tells_the_run(options: SidecarOptions) -> None:
    asked = replace(options, listen_port=0, info={"trial": "t-1", "launcher": "mpi"}, run="r")
    with started(asked) as handle:
        assert listeners(handle.pid) == [("127.0.0.1", handle.port)]
        host = socket.gethostname()
        told = answer_of(handle.port)
        assert f'paceline_run_processes{{host="{host}",run="r"}} 1.0' in told
        assert 'trial="t-1"' in told
        assert "python_info" not in told


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
            wait_until(lambda: len(trace_of(options)) >= 3)
        finally:
            handle.stop()
    assert handle.port is None
    assert (state_of(options)["listen"], state_of(options)["port"]) == (None, None)
    assert f"127.0.0.1:{port}" in state_of(options)["endpoint_error"]


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


def test_it_ends_when_what_it_watches_ends(options: SidecarOptions, sleeper: Sleeper) -> None:
    second = sleeper()
    both = replace(options, pids=(*options.pids, second.pid), interval_s=10.0)
    with started(both) as handle:
        os.kill(options.pids[0], signal.SIGKILL)
        second.kill()
        # `second` stays a zombie meanwhile: its parent, this test, has not waited for it
        assert handle.wait(20)
        wait_until(lambda: end_reason(both) == "watched processes ended")
    assert samples_of(both)[-1]["run_processes"] == 0


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


def test_it_ends_when_its_lifetime_is_over(options: SidecarOptions) -> None:
    run_sidecar(replace(options, max_lifetime_s=0.5))
    assert end_reason(options) == "lifetime reached"
    assert len(samples_of(options)) >= 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_watch_by_hand_and_leaves_the_mask_as_it_was(
    options: SidecarOptions, number: signal.Signals
) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    main = threading.get_ident()

    def signal_it() -> None:
        wait_until(lambda: len(samples_of(options)) >= 2)
        signal.pthread_kill(main, number)

    thread = threading.Thread(target=signal_it)
    thread.start()
    run_sidecar(options)
    thread.join(timeout=10)
    assert end_reason(options) == "asked"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


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


def test_sampler_that_is_killed_comes_back_once_and_marks_the_gap(
    options: SidecarOptions,
) -> None:
    asked = replace(options, listen_port=0)
    with started(asked) as handle:
        wait_until(lambda: len(samples_of(asked)) >= 3)
        os.kill(handle.pid, signal.SIGKILL)
        wait_until(lambda: state_of(asked)["pid"] != handle.pid)
        told = state_of(asked)
        assert (told["restarts"], told["port"]) == (1, handle.port)  # for whoever scrapes
        wait_until(lambda: len(samples_of(asked)) >= 6)
        assert "paceline_sidecar_restarts_total" in answer_of(handle.port)
        assert not handle.ended
        os.kill(told["pid"], signal.SIGKILL)
        with pytest.warns(PacelineWarning, match="has died again and stays away"):
            handle.wait(20)
        assert handle.ended
    rows = trace_of(asked)
    (gap,) = [number for number, row in enumerate(rows) if "gap_started_unix_s" in row]
    assert rows[gap]["gap_started_unix_s"] == rows[gap - 1]["unix_s"]
    assert rows[gap]["gap_ended_unix_s"] == rows[gap + 1]["unix_s"]
    assert [row for row in rows if "schema" in row] == rows[:1]
    assert psutil.Process(options.pids[0]).status() == psutil.STATUS_SLEEPING  # goes on


def test_counters_go_on_over_a_gap(options: SidecarOptions) -> None:
    program = "import sys\nfor _ in iter(sys.stdin.readline, ''):\n    sum(range(10**6)); print(1)"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None

        def work(times: int) -> None:
            for _ in range(times):
                worker.stdin.write("\n")  # type: ignore[union-attr]
                worker.stdin.flush()  # type: ignore[union-attr]
                worker.stdout.readline()  # type: ignore[union-attr]

        def used_s() -> float:
            times = psutil.Process(worker.pid).cpu_times()
            return times.user + times.system

        try:
            watching = replace(options, pids=(worker.pid,))
            begun_s = used_s()
            with started(watching) as handle:
                work(20)
                seen = len(samples_of(watching))
                wait_until(lambda: len(samples_of(watching)) >= seen + 2)
                os.kill(handle.pid, signal.SIGKILL)
                work(20)  # while nobody looks
                wait_until(lambda: state_of(watching)["pid"] != handle.pid)
            counted_s = [row["run_cpu_seconds"] for row in samples_of(watching)]
            assert counted_s == sorted(counted_s)
            assert counted_s[-1] == pytest.approx(used_s() - begun_s, abs=0.05)
        finally:
            worker.kill()


def test_two_watches_share_one_sampler_and_one_port_and_count_apart(
    options: SidecarOptions, sleeper: Sleeper, runtime: Runtime
) -> None:
    first = replace(options, listen_port=0, run="a")
    second = other(first, sleeper().pid, run="b")
    with started(first) as one, started(second) as two:
        assert (one.pid, one.port) == (two.pid, two.port)
        state = runtime.state()
        assert state is not None
        assert len(state.watches) == 2
        wait_until(lambda: len(samples_of(first)) >= 3 and len(samples_of(second)) >= 3)
        told = answer_of(one.port)
        assert 'run="a"} 1.0' in told
        assert 'run="b"} 1.0' in told
        assert told.count("paceline_host_cpu_cores{") == 1
        assert {row["run_processes"] for row in samples_of(first)} == {1}
        two.stop()
        assert end_reason(second) == "asked"
        seen = len(samples_of(first))
        wait_until(lambda: len(samples_of(first)) >= seen + 2)
        assert 'run="b"' not in answer_of(one.port)


def test_second_watch_is_told_that_the_first_ones_address_holds(
    options: SidecarOptions, sleeper: Sleeper
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with started(replace(options, listen_port=0, run="a")) as one:
        with pytest.warns(PacelineWarning, match=rf"already at 127.0.0.1:{one.port}, as run a"):
            two = start_sidecar(other(options, sleeper().pid, listen_port=port))
        assert two is not None
        assert two.port == one.port
        two.stop()


def test_slower_watch_beside_a_faster_one_keeps_its_own_beat(
    options: SidecarOptions, sleeper: Sleeper
) -> None:
    slow = other(options, sleeper().pid, interval_s=1.0)
    with started(options), started(slow):
        wait_until(lambda: len(samples_of(slow)) >= 4)
    fast_rows, slow_rows = samples_of(options), samples_of(slow)
    assert len(fast_rows) > 3 * len(slow_rows)
    states = [f"cpu_{name}_percent" for name in ("user", "system", "idle", "iowait", "steal")]
    for row in slow_rows[2:-1]:
        assert sum(row[state] for state in [*states, "cpu_other_percent"]) == pytest.approx(100, 1)


def test_trace_that_is_being_written_is_not_written_twice(
    options: SidecarOptions, sleeper: Sleeper
) -> None:
    with started(options):
        again = replace(options, pids=(sleeper().pid,))
        with pytest.raises(UsageError, match="is being written already"):
            begin_watch(again)
        with pytest.warns(PacelineWarning, match="is being written already"):
            assert start_sidecar(again) is None
        seen = len(trace_of(options))
        wait_until(lambda: len(trace_of(options)) >= seen + 2)


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


def test_watch_that_was_over_before_anybody_looked_has_been(
    options: SidecarOptions, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(options)
    keeper = Keeper(runtime, request)
    taken_and_over = lambda: remove_request(runtime, request.id)  # noqa: E731
    monkeypatch.setattr(keeper, "_start_sampler", taken_and_over)
    assert keeper.start(limit_s=20.0).watches == []
    assert keeper.ended.wait(timeout=20)
    keeper.stop()


def test_requests_of_dead_runs_are_cleared_away(
    options: SidecarOptions, sleeper: Sleeper, runtime: Runtime
) -> None:
    dead = sleeper()
    stale = request_of(other(options, dead.pid))
    before_boot = replace(request_of(replace(options, out=None)), id="b" * 16, boot_id="another")
    dead.kill()
    dead.wait(timeout=10)
    write_request(runtime, stale)
    write_request(runtime, before_boot)
    (runtime.watches / "torn.json").write_text('{"schema":')
    # what a dead sampler said of itself is not believed
    write_json(runtime.sampler, {"process": {"pid": 1, "start_ticks": 1}, "watches": [stale.key]})
    with started(options):
        assert len(list(runtime.watches.iterdir())) == 1
        assert take_refusal(runtime, stale) == "none of the processes to watch is running"
    assert list(runtime.watches.iterdir()) == []
    assert list(runtime.accounts.iterdir()) == []


def test_watch_whose_processes_died_with_the_sampler_gets_its_end(
    options: SidecarOptions, sleeper: Sleeper
) -> None:
    process = sleeper()
    watching = other(options, process.pid)
    with started(watching) as handle:
        wait_until(lambda: len(samples_of(watching)) >= 2)
        os.kill(handle.pid, signal.SIGSTOP)
        process.kill()
        process.wait(timeout=10)
        os.kill(handle.pid, signal.SIGKILL)
        wait_until(lambda: end_reason(watching) == "watched processes ended")
    assert samples_of(watching)[-1]["run_processes"] == 0


def test_process_that_does_not_exist_is_refused(options: SidecarOptions, sleeper: Sleeper) -> None:
    gone = sleeper()
    gone.kill()
    gone.wait(timeout=10)
    watching = replace(options, pids=(gone.pid,))
    with pytest.raises(UsageError, match=f"found none of {gone.pid}"):
        run_sidecar(watching)
    with pytest.warns(PacelineWarning, match=f"found none of {gone.pid}"):
        assert start_sidecar(watching) is None
    assert trace_of(watching) == []


def test_trace_that_cannot_be_opened_is_refused(options: SidecarOptions, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the trace cannot be written"):
        run_sidecar(replace(options, out=tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.warns(PacelineWarning, match="the trace cannot be written"):
        assert start_sidecar(replace(options, out=tmp_path / "file" / "trace.jsonl")) is None


def test_full_disk_ends_a_watch_with_what_was_written_intact(options: SidecarOptions) -> None:
    limited = replace(options, out=Path("/dev/full"))
    run_sidecar(limited)
    assert end_reason(limited) == "trace not writable"


def test_sampler_that_does_not_answer_is_ended_and_stop_may_be_repeated(
    options: SidecarOptions,
) -> None:
    with started(options) as handle:
        os.kill(handle.pid, signal.SIGSTOP)
        handle.stop(timeout_s=0.3)
        assert ProcessId.of(handle.pid) is None
        handle.stop()


def test_sampler_told_to_end_ends_every_watch_in_order(
    options: SidecarOptions, sleeper: Sleeper
) -> None:
    second = other(options, sleeper().pid)
    with started(options) as handle, started(second) as another:
        os.kill(handle.pid, signal.SIGTERM)
        assert handle.wait(20)
        assert another.wait(20)
    assert [end_reason(watch) for watch in (options, second)] == ["asked", "asked"]


def test_state_of_another_process_or_host_is_not_believed(
    options: SidecarOptions, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    with started(options):
        told = state_of(options)
        write_json(path, told)
        assert sidecar_is_alive(path)
        changes: tuple[dict[str, Any], ...] = (
            {"start_ticks": told["start_ticks"] + 1},
            {"host": "elsewhere"},
            {"ended": "asked"},
        )
        for change in changes:
            write_json(path, {**told, **change})
            assert not sidecar_is_alive(path)
    write_json(path, {})
    assert not sidecar_is_alive(path)
    assert not sidecar_is_alive(tmp_path / "none.json")


def test_sampler_has_a_session_of_its_own_and_nothing_of_the_trial(
    options: SidecarOptions, monkeypatch: pytest.MonkeyPatch, runtime: Runtime
) -> None:
    monkeypatch.setenv("PACELINE_TRIAL_TOKEN", "0123")
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(affinity)})  # as mpirun binds a rank
    try:
        with started(options) as handle:
            assert os.getsid(handle.pid) == handle.pid
            assert os.sched_getaffinity(handle.pid) >= affinity
            environment = psutil.Process(handle.pid).environ()
    finally:
        os.sched_setaffinity(0, affinity)
    assert "PACELINE_TRIAL_TOKEN" not in environment
    assert environment[RUNTIME_VARIABLE] == str(runtime.root.parent)


def test_service_discovery_lasts_as_long_as_the_last_watch_of_a_run(
    options: SidecarOptions, sleeper: Sleeper, tmp_path: Path
) -> None:
    host = socket.gethostname()
    kept = replace(
        other(options, sleeper().pid, out=None, state=None),
        listen_port=0,
        run="r",
        run_targets=tmp_path / "targets",
        targets_dirs=(tmp_path / "all",),
    )
    with started(kept) as handle:
        target = tmp_path / "targets" / f"{host}.json"
        assert json.loads(target.read_text())[0]["targets"] == [f"127.0.0.1:{handle.port}"]
        assert len(list((tmp_path / "all").iterdir())) == 1
        trial = replace(options, listen_port=0, run="r", run_targets=tmp_path / "targets")
        with started(trial) as trials:
            assert trials.port == handle.port
        assert target.exists()
        assert ProcessId.of(handle.pid) is not None
    assert not target.exists()
    assert list((tmp_path / "all").iterdir()) == []


def test_what_runs_import_is_light() -> None:
    program = (
        "import sys, {};"
        "print([m for m in sys.modules if m.partition('.')[0] in"
        " ('torch', 'numpy', 'pandas', 'pydantic', 'pyspark', 'pyarrow', 'rich', 'mpi4py'{})])"
    )

    def heavy(what: str, more: str = "") -> object:
        told = subprocess.run(
            [sys.executable, "-c", program.format(what, more)],
            env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parent.parent)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return json.loads(told.stdout.replace("'", '"'))

    assert heavy("paceline.telemetry.service, paceline.telemetry.exporter") == []
    assert heavy("paceline.telemetry", ", 'psutil', 'prometheus_client', 'ssl', 'wsgiref'") == []


def test_state_file_of_the_sampler_is_read_as_written(runtime: Runtime) -> None:
    itself = ProcessId.of(os.getpid())
    assert itself is not None
    write_json(
        runtime.sampler,
        {"process": {"pid": itself.pid, "start_ticks": itself.start_ticks}, "watches": ["x@1.0"]},
    )
    assert runtime.state() == SamplerState(process=itself, watches=["x@1.0"])
    runtime.sampler.unlink()
