"""One sampler and several watches of real processes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.telemetry.real_watches import (
    Sleeper,
    answer_of,
    end_reason,
    other,
    samples_of,
    started,
    trace_of,
    wait_until,
)

import paceline
from paceline.records.files import write_json
from paceline.telemetry.runtime import Runtime
from paceline.telemetry.sidecar import SidecarOptions
from paceline.telemetry.watches import request_of, take_refusal, write_request


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
        assert 'run="a"} 1' in told
        assert 'run="b"} 1' in told
        assert told.count("paceline_host_cpu_cores{") == 1
        assert {row["run_processes"] for row in samples_of(first)} == {1}
        two.stop()
        assert end_reason(second) == "asked"
        seen = len(samples_of(first))
        wait_until(lambda: len(samples_of(first)) >= seen + 2)
        assert 'run="b"' not in answer_of(one.port)


def test_two_runs_whose_directories_share_a_name_are_both_served(
    options: SidecarOptions, sleeper: Sleeper, tmp_path: Path
) -> None:
    shared = {"listen_port": 0, "run": "r", "targets_dirs": (tmp_path / "all",)}
    first = replace(options, **shared, run_targets=tmp_path / "one" / "r" / "targets")
    second = other(
        options, sleeper().pid, **shared, run_targets=tmp_path / "two" / "r" / "targets",
        textfile_dir=tmp_path / "text",
    )  # fmt: skip
    digest = hashlib.sha256(str(tmp_path / "two" / "r").encode()).hexdigest()
    label, host = f"r-{digest[:6]}", socket.gethostname()
    with started(first) as one, started(second):
        wait_until(lambda: len(samples_of(first)) >= 2 and len(samples_of(second)) >= 2)
        told = answer_of(one.port)
        assert f'paceline_run_processes{{host="{host}",run="r"}} 1' in told
        assert f'paceline_run_processes{{host="{host}",run="{label}"}} 1' in told
        names = {f"paceline-{host}-r.json", f"paceline-{host}-{label}.json"}
        assert {path.name for path in (tmp_path / "all").iterdir()} == names
    assert [trace_of(watch)[0]["run"] for watch in (first, second)] == ["r", label]
    (text,) = (tmp_path / "text").iterdir()
    assert text.name == f"paceline-{host}-{label}.prom"
    assert f'run="{label}"' in text.read_text()


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


def test_sampler_told_to_end_ends_every_watch_in_order(
    options: SidecarOptions, sleeper: Sleeper
) -> None:
    second = other(options, sleeper().pid)
    with started(options) as handle, started(second) as another:
        os.kill(handle.pid, signal.SIGTERM)
        assert handle.wait(20)
        assert another.wait(20)
    assert [end_reason(watch) for watch in (options, second)] == ["asked", "asked"]


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
