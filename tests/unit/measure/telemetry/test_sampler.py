"""Rows of a tick: what is in the trace, and what is read less often."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.rows import STEP, write_status
from tests.support.running import running
from tests.support.waiting import wait_for
from tests.unit.measure.telemetry.fake_processes import Table

from paceline.measure.records.files import JsonlWriter
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.metrics import METRICS
from paceline.measure.records.tables import HOST_SAMPLES, RANK_SAMPLES, frame_of
from paceline.measure.telemetry import sampler as sampler_module
from paceline.measure.telemetry.request import SidecarRequest
from paceline.measure.telemetry.sampler import Sampler
from paceline.plan.spec.models import TelemetrySettings

HOST = "node-1"
ANSWERING = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], "a"))
print("ready", flush=True)
time.sleep(60)  # the test ends it
"""


class Clock:
    """Two clocks that tests move."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.boot_unix_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.boot_unix_s + self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    fake = SimpleNamespace(time=found.time, monotonic=found.monotonic)
    monkeypatch.setattr(sampler_module, "time", fake)
    return found


def request(folder: Path, **more: Any) -> SidecarRequest:
    return SidecarRequest(
        settings=TelemetrySettings(interval_s=1.0),
        run="r",
        trace=folder / "trace.jsonl",
        trial_root=folder / "trial",
        pids=(10,),
        **more,
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def run(clock: Clock, table: Table, tmp_path: Path) -> Iterator[Sampler]:
    del clock  # the sampler must not begin before it
    table.add(10, 1)
    table.add(11, 10, cpu_s=1.0, threads=4)
    ticks = table.now[11].started_ticks
    files = TrialFiles(tmp_path / "trial")
    write_status(files, 0, host=HOST, pid=11, start_ticks=ticks, boot_id="b")
    with closing(Sampler(request(tmp_path), HOST)) as sampler:
        yield sampler


def test_trace_begins_with_the_facts_that_do_not_change(run, clock, tmp_path) -> None:
    run.tick()
    header = rows(tmp_path / "trace.jsonl")[0]
    assert header["host"] == HOST
    assert (header["interval_s"], header["expensive_interval_s"]) == (1.0, 5.0)
    assert header["cores"] == os.cpu_count()
    assert "unix_s" not in header


def test_rows_have_what_the_analysis_reads(run, clock, table, tmp_path) -> None:
    run.tick()
    table.now[11].cpu_s = 3.0
    clock.now_s += 1
    run.tick(missed=2)
    _, _, last = rows(tmp_path / "trace.jsonl")
    assert (last["unix_s"], last["run_processes"], last["run_threads"]) == (1101.0, 2, 5)
    assert (last["run_cpu_seconds"], last["sidecar_missed_ticks"]) == (2.0, 2)
    assert last["ram_total_bytes"] > last["ram_used_bytes"] > 0
    assert not [name for name in last if "percent" in name]
    first, second = rows(tmp_path / "ranks.jsonl")
    assert [first[name] for name in ("rank", "pid", "threads", "cpu_seconds")] == [0, 11, 4, 0.0]
    assert (second["unix_s"], second["cpu_seconds"]) == (1101.0, 2.0)


def test_clock_that_is_set_back_changes_no_order(run, clock, tmp_path) -> None:
    run.tick()
    clock.now_s += 1
    clock.boot_unix_s -= 10
    run.tick()
    assert [row["unix_s"] for row in rows(tmp_path / "trace.jsonl")[1:]] == [1100.0, 1101.0]


def test_rows_have_the_declared_columns_and_no_others(run, clock, tmp_path) -> None:
    run.tick()
    names = {metric.path[0] for metric in METRICS if "{" not in metric.path[0]}
    for file, expected in (("trace.jsonl", HOST_SAMPLES), ("ranks.jsonl", RANK_SAMPLES)):
        row = rows(tmp_path / file)[-1]
        assert set(expected.required) <= {name for name in row if row[name] is not None}
        assert row.keys() <= names | expected.types.keys()
        frame = frame_of([row], expected, tmp_path)
        assert {name: frame.schema[name] for name in expected.types} == expected.types


def test_expensive_figures_are_null_between_their_readings(run, clock, tmp_path) -> None:
    for _ in range(11):
        run.tick()
        clock.now_s += 1
    samples = rows(tmp_path / "trace.jsonl")[1:]
    read_at = [n for n, row in enumerate(samples) if row["run_pss_bytes"] is not None]
    assert read_at == [0, 5, 10]
    assert samples[5]["run_pss_bytes"] == 1800
    assert all("run_open_files" in row for row in samples)
    ranks = rows(tmp_path / "ranks.jsonl")
    assert [row["pss_bytes"] for row in ranks[:6]] == [900, None, None, None, None, 900]


def test_progress_is_read_each_second_and_at_the_end(run, clock, tmp_path) -> None:
    first = run.tick()
    with JsonlWriter(TrialFiles(tmp_path / "trial").rank(0).steps) as rows_of_rank:
        rows_of_rank.write(STEP)
        seen = []
        for _ in range(3):
            seen.append(run.tick().training[0]["training_steps"])
            clock.now_s += 0.5
        rows_of_rank.write(STEP)
        clock.now_s -= 0.4
        seen += [run.tick(final=final).training[0]["training_steps"] for final in (False, True)]
    assert seen == [0, 0, 1, 1, 2]
    assert first.training[0]["training_steps"] == 0, "a snapshot does not change"


def test_last_tick_reads_everything(run: Sampler, clock: Clock, tmp_path: Path) -> None:
    run.tick()
    clock.now_s += 1
    run.tick(final=True)
    assert rows(tmp_path / "trace.jsonl")[-1]["run_pss_bytes"] == 1800


def test_slow_figures_are_read_once_per_second_at_a_short_interval(
    run, clock, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(
        "paceline.measure.telemetry.host_reading.read_page_faults",
        lambda _: {"minor": 1, "major": 2},
    )
    for _ in range(21):
        run.tick()
        clock.now_s += 0.1
    samples = rows(tmp_path / "trace.jsonl")[1:]
    assert sum("minor_page_faults" in row for row in samples) == 3


def test_facts_of_the_trial_are_served_but_not_repeated_in_the_trace(table, tmp_path) -> None:
    table.add(10, 1)
    facts = {"trial": "t", "launcher": "mpi"}
    with closing(Sampler(request(tmp_path, facts=facts), HOST)) as sampler:
        snapshot = sampler.tick()
    assert snapshot.row["run"] == facts
    assert "run" not in rows(tmp_path / "trace.jsonl")[1]


def test_restarted_sidecar_appends_without_a_second_header(table: Table, tmp_path: Path) -> None:
    table.add(10, 1)
    for restarts in (0, 1):
        sampler = Sampler(request(tmp_path, restarts=restarts), HOST)
        sampler.tick()
        sampler.close()
    assert ["unix_s" in row for row in rows(tmp_path / "trace.jsonl")] == [False, True, True]


def test_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").mkdir()
    with pytest.raises(OSError, match="directory"):
        Sampler(request(tmp_path), HOST)


def test_host_alone_counts_as_alive(tmp_path: Path) -> None:
    alone = SidecarRequest(run="r", trace=tmp_path / "trace.jsonl")
    with closing(Sampler(alone, HOST)) as sampler:
        assert sampler.any_alive()


def test_each_request_for_stacks_is_passed_on_once(
    clock: Clock, table: Table, tmp_path: Path
) -> None:
    table.add(10, 1)
    files = TrialFiles(tmp_path / "trial")
    stacks = files.rank(0).stacks
    stacks.parent.mkdir(parents=True)

    def seen(count: int) -> bool:
        return stacks.read_text().count("most recent call first") == count

    with (
        running(ANSWERING, stacks) as process,
        closing(Sampler(request(tmp_path), HOST)) as sampler,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        write_status(files, 0, host=HOST, pid=process.pid)
        sampler.tick()
        for number in (1, 2):
            files.stacks_request.touch()
            for _ in range(2):
                clock.now_s += 1
                sampler.tick()
            wait_for(partial(seen, number), 10, "a stack")
        assert seen(2)
