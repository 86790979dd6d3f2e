"""Samplers that are started, that die, and that do not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.unit.telemetry.real_watches import (
    Sleeper,
    answer_of,
    end_reason,
    other,
    samples_of,
    started,
    state_of,
    trace_of,
    wait_until,
)

from paceline.errors import PacelineWarning
from paceline.host.machine import host_name
from paceline.telemetry.discovery import TargetFile
from paceline.telemetry.keeper import Keeper, remove_targets
from paceline.telemetry.process_ids import ProcessId
from paceline.telemetry.runtime import RUNTIME_VARIABLE, Runtime, SamplerState, put
from paceline.telemetry.sidecar import SidecarOptions
from paceline.telemetry.watches import remove_request, request_of


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


def test_sampler_that_is_killed_comes_back_once_and_marks_the_gap(
    options: SidecarOptions, tmp_path: Path
) -> None:
    asked = replace(options, listen_port=0, run_targets=tmp_path / "targets")
    with started(asked) as handle:
        wait_until(lambda: len(samples_of(asked)) >= 3)
        os.kill(handle.pid, signal.SIGKILL)
        wait_until(lambda: state_of(asked)["pid"] != handle.pid)
        told = state_of(asked)
        assert (told["restarts"], told["port"]) == (1, handle.port)  # for whoever scrapes
        wait_until(lambda: len(samples_of(asked)) >= 6)
        assert "paceline_sidecar_restarts_total" in answer_of(handle.port)
        assert not handle.ended
        assert len(list((tmp_path / "targets").iterdir())) == 1
        os.kill(told["pid"], signal.SIGKILL)
        with pytest.warns(PacelineWarning, match="has died again and stays away"):
            handle.wait(20)
        assert handle.ended
        assert list((tmp_path / "targets").iterdir()) == []  # nobody is there to be scraped
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


def test_sampler_that_does_not_answer_is_ended_and_stop_may_be_repeated(
    options: SidecarOptions,
) -> None:
    with started(options) as handle:
        os.kill(handle.pid, signal.SIGSTOP)
        handle.stop(timeout_s=0.3)
        assert ProcessId.of(handle.pid) is None
        handle.stop()


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


def left_behind(runtime: Runtime, folder: Path) -> TargetFile:
    """The file of a sampler that died, and what it said of itself."""
    target = TargetFile.in_run(folder, host_name(), "127.0.0.1:9464")
    target.write()
    state = SamplerState(
        process=ProcessId(pid=1, start_ticks=1),
        listen="127.0.0.1",
        port=9464,
        targets=[str(target.path)],
    )
    put(runtime.sampler, state)
    return target


def test_targets_of_a_dead_sampler_are_removed_by_whoever_stops_after_it(
    runtime: Runtime, tmp_path: Path
) -> None:
    target = left_behind(runtime, tmp_path)
    lock = runtime.take_lock()  # as a sampler does that begins; it sees to the files itself
    assert lock is not None
    remove_targets(runtime)
    assert target.path.exists()
    os.close(lock)
    remove_targets(runtime)
    assert not target.path.exists()
    remove_targets(runtime)
    runtime.sampler.unlink()


def test_targets_of_a_dead_sampler_are_removed_by_the_next_one(
    options: SidecarOptions, runtime: Runtime, tmp_path: Path
) -> None:
    target = left_behind(runtime, tmp_path)
    with started(options):
        assert not target.path.exists()


def test_target_that_is_another_samplers_by_now_stays(runtime: Runtime, tmp_path: Path) -> None:
    left_behind(runtime, tmp_path)
    other = TargetFile.in_run(tmp_path, host_name(), "127.0.0.1:9999")
    other.write()
    remove_targets(runtime)
    assert other.path.exists()
    runtime.sampler.unlink()
