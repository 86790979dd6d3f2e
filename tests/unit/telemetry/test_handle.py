"""What those who ask for a watch are told of it, and what is refused."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.telemetry.real_watches import Sleeper, started, state_of, trace_of, wait_until

from paceline.errors import PacelineWarning, UsageError
from paceline.records.files import write_json
from paceline.telemetry.sidecar import (
    SidecarOptions,
    begin_watch,
    run_sidecar,
    sidecar_is_alive,
    start_sidecar,
)


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
