"""Real sidecar processes: they sample, serve, restart once, and never outlive their run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.sidecars import port_of
from tests.support.waiting import wait_for

from paceline.base.errors import PacelineWarning, UsageError
from paceline.measure.telemetry import (
    SidecarHandle,
    SidecarRequest,
    sidecar_is_alive,
    start_sidecar,
)
from paceline.measure.telemetry.exporter import Snapshot
from paceline.measure.telemetry.sampler import Sampler
from paceline.measure.telemetry.sidecar import run_sidecar
from paceline.plan.spec.models import TelemetrySettings

LIMIT_S = 60.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as it:
        yield it
        it.kill()


def request(folder: Path, *pids: int, **settings: Any) -> SidecarRequest:
    return SidecarRequest(
        settings=TelemetrySettings(interval_s=0.1, **settings),
        run="r",
        trace=folder / "trace.jsonl",
        state=folder / "sidecar.json",
        run_targets=folder / "targets",
        pids=pids,
        max_lifetime_s=120,
    )


@contextlib.contextmanager
def running(of: SidecarRequest) -> Iterator[SidecarHandle]:
    handle = SidecarHandle(of)
    try:
        assert of.state is not None
        port_of(handle, of.state)
        yield handle
    finally:
        handle.stop(LIMIT_S)


def samples(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "trace.jsonl").read_text()
    return [row for row in map(json.loads, text.splitlines()) if "unix_s" in row]


def state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "sidecar.json").read_text())
    return found


def test_sidecar_uses_the_cores_of_the_request_alone(tmp_path, sleeper) -> None:
    cores = sorted(os.sched_getaffinity(0))
    asked = request(tmp_path, sleeper.pid).model_copy(update={"cores": (cores[-1],)})
    with running(asked):
        assert os.sched_getaffinity(state(tmp_path)["pid"]) == {cores[-1]}
    with running(request(tmp_path, sleeper.pid)):
        assert os.sched_getaffinity(state(tmp_path)["pid"]) == set(cores)


def test_sidecar_samples_serves_and_ends_in_order(tmp_path, sleeper) -> None:
    with running(request(tmp_path, sleeper.pid)) as handle:
        port = state(tmp_path)["port"]
        assert json.loads(next((tmp_path / "targets").iterdir()).read_text())[0]["targets"] == [
            f"127.0.0.1:{port}"
        ]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b'paceline_run_processes{host="' in answer.read()
        assert sidecar_is_alive(tmp_path / "sidecar.json")
        wait_for(lambda: len(samples(tmp_path)) >= 3, LIMIT_S, "three samples")
    assert not psutil.pid_exists(handle.pid)
    assert not sidecar_is_alive(tmp_path / "sidecar.json")
    assert (state(tmp_path)["ended"], state(tmp_path)["expensive_interval_s"]) == ("asked", 5.0)
    assert list((tmp_path / "targets").iterdir()) == []
    assert {row["run_processes"] for row in samples(tmp_path)} == {1}
    final = (tmp_path / "final.prom").read_text()
    assert re.search(r'^paceline_run_processes\{host="[^"]+",run="r"\} 1\.0$', final, re.MULTILINE)
    assert "paceline_host_" not in final
    handle.stop()  # a second time changes nothing


def test_sidecar_ends_with_what_it_watches(tmp_path, sleeper) -> None:
    with running(request(tmp_path, sleeper.pid, listen_port=-1)) as handle:
        sleeper.kill()
        sleeper.wait()
        wait_for(lambda: state(tmp_path)["ended"], LIMIT_S, "an end in the state")
        assert state(tmp_path)["ended"] == "watched processes ended"
        wait_for(lambda: not psutil.pid_exists(handle.pid), LIMIT_S, "the sidecar gone")
    assert state(tmp_path)["port"] is None
    assert samples(tmp_path)[-1]["run_processes"] == 0


def test_sidecar_that_dies_is_started_once_more_at_the_same_port(tmp_path, sleeper) -> None:
    with running(request(tmp_path, sleeper.pid)) as handle:
        first, port = handle.pid, state(tmp_path)["port"]
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: state(tmp_path)["restarts"] == 1, LIMIT_S, "a restart")
        assert (state(tmp_path)["pid"], state(tmp_path)["port"]) == (handle.pid, port)
        assert handle.pid != first
        before = len(samples(tmp_path))
        wait_for(lambda: len(samples(tmp_path)) > before, LIMIT_S, "another sample")
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.warns(PacelineWarning, match="died twice"):
            wait_for(lambda: not handle._thread.is_alive(), LIMIT_S, "the watching thread gone")
        assert list((tmp_path / "targets").iterdir()) == []
    times = [row["unix_s"] for row in samples(tmp_path)]
    assert times == sorted(times)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_sidecar_ends_with_the_process_that_started_it(tmp_path, sleeper, how) -> None:
    text = request(tmp_path, sleeper.pid).model_dump_json()
    program = (
        "import sys, time\n"
        "from paceline.measure.telemetry import SidecarHandle, SidecarRequest\n"
        "handle = SidecarHandle(SidecarRequest.model_validate_json(sys.argv[1]))\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, text]) as parent:
        wait_for((tmp_path / "sidecar.json").exists, LIMIT_S, "a sidecar that samples", parent)
        pid = state(tmp_path)["pid"]
        parent.send_signal(how)
    wait_for(lambda: not psutil.pid_exists(pid), LIMIT_S, "the sidecar gone")
    assert state(tmp_path)["ended"] in ("asked", "parent ended")
    assert list((tmp_path / "targets").iterdir()) == []


def test_port_that_is_taken_costs_the_metrics_and_not_the_trace(
    tmp_path, sleeper, free_port_in_use
) -> None:
    handle = start_sidecar(request(tmp_path, sleeper.pid, listen_port=free_port_in_use))
    assert handle is not None
    port_of(handle, tmp_path / "sidecar.json")
    wait_for(lambda: samples(tmp_path), LIMIT_S, "a sample")
    with pytest.warns(PacelineWarning, match=f"served no metrics: 127.0.0.1:{free_port_in_use}"):
        handle.stop(LIMIT_S)


def test_address_that_cannot_be_announced_is_not_called_missing_metrics(tmp_path, sleeper) -> None:
    (tmp_path / "targets").write_text("a file in place of the folder\n")
    handle = start_sidecar(request(tmp_path, sleeper.pid))
    assert handle is not None
    port = port_of(handle, tmp_path / "sidecar.json")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.status == 200
    with pytest.warns(PacelineWarning, match="address could not be announced to Prometheus: "):
        handle.stop(LIMIT_S)


@pytest.fixture
def free_port_in_use() -> Iterator[int]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_secret_that_others_may_read_is_warned_about_at_once(tmp_path, sleeper) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret")
    token.chmod(0o644)
    with pytest.warns(PacelineWarning, match=r"serves no metrics.*chmod 600"):
        handle = start_sidecar(request(tmp_path, sleeper.pid, bearer_token_file=str(token)))
    assert handle is not None
    assert port_of(handle, tmp_path / "sidecar.json") is None
    with pytest.warns(PacelineWarning, match="chmod 600"):
        handle.stop(LIMIT_S)


def test_variables_of_the_trial_do_not_reach_the_sidecar(tmp_path, sleeper, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_TRIAL_TOKEN", "t")
    with running(request(tmp_path, sleeper.pid, listen_port=-1)) as handle:
        assert "PACELINE_TRIAL_TOKEN" not in psutil.Process(handle.pid).environ()


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"pid": 1, "start_ticks": 5, "boot_id": "b", "host": "nowhere"}', "[]"],
)
def test_state_of_no_living_sidecar(tmp_path: Path, text: str) -> None:
    assert not sidecar_is_alive(tmp_path / "none")
    (tmp_path / "state").write_text(text)
    assert not sidecar_is_alive(tmp_path / "state")


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_command_writes_the_trace_until_its_signal_or_the_end_of_its_process(
    tmp_path, sleeper, is_interrupted
) -> None:
    argv = ["sidecar", f"--pid={sleeper.pid}", "--interval=0.1", f"--out={tmp_path / 't.jsonl'}"]
    with subprocess.Popen([sys.executable, "-m", "paceline.cli", *argv]) as command:
        trace = tmp_path / "t.jsonl"
        wait_for(
            lambda: trace.exists() and trace.read_text().count("\n") > 3, LIMIT_S, "three samples"
        )
        if is_interrupted:
            command.send_signal(signal.SIGINT)
        else:
            sleeper.communicate(b"\n", timeout=10)
        assert command.wait(timeout=LIMIT_S) == 0


def test_command_without_a_living_process_is_refused(tmp_path, sleeper) -> None:
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(UsageError, match="expected a running process"):
        run_sidecar(request(tmp_path, sleeper.pid))
    (tmp_path / "folder").mkdir()
    unwritable = request(tmp_path).model_copy(update={"trace": tmp_path / "folder"})
    with pytest.raises(UsageError, match="cannot be written"):
        run_sidecar(unwritable)


def test_reading_without_a_free_file_is_a_missed_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick, calls = Sampler.tick, iter(range(1000))

    def seldom(sampler: Sampler, **given: Any) -> Snapshot:
        if next(calls) in (1, 2):
            raise OSError(errno.EMFILE, "Too many open files", "/proc/stat")
        return tick(sampler, **given)

    monkeypatch.setattr(Sampler, "tick", seldom)
    run_sidecar(request(tmp_path).model_copy(update={"max_lifetime_s": 2.0}))
    state = json.loads((tmp_path / "sidecar.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert state["ended"] == "lifetime reached"
    assert rows[-1]["sidecar_missed_ticks"] >= 2
