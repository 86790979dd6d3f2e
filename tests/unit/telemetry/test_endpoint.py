"""Where a sampler with real watches listens, and how Prometheus finds it."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.telemetry.real_watches import (
    Sleeper,
    answer_of,
    listeners,
    other,
    started,
    state_of,
    trace_of,
    wait_until,
)

from paceline.errors import PacelineWarning
from paceline.telemetry.process_ids import ProcessId
from paceline.telemetry.sidecar import SidecarOptions, start_sidecar


def test_endpoint_listens_on_loopback_only_and_tells_the_run(options: SidecarOptions) -> None:
    asked = replace(options, listen_port=0, info={"trial": "t-1", "launcher": "mpi"}, run="r")
    with started(asked) as handle:
        assert listeners(handle.pid) == [("127.0.0.1", handle.port)]
        host = socket.gethostname()
        told = answer_of(handle.port)
        assert f'paceline_run_processes{{host="{host}",run="r"}} 1' in told
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
