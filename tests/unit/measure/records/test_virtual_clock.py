"""The clock of a host that takes turns."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paceline.base.errors import DataError, EnvironmentLacks
from paceline.measure.records import virtual_clock
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.virtual_clock import (
    SLICES_VARIABLE,
    RecordedSlices,
    Slice,
    VirtualClock,
    are_together,
    convert_trial,
    keep_slices,
    line,
    overlap_ns,
    run_in_turns,
    run_together,
    run_together_again,
    together_file,
    waiting_file,
)

MS = 1_000_000


def clock(*slices_ms: tuple[int, int]) -> VirtualClock:
    return VirtualClock(
        [Slice(start * MS, end * MS) for start, end in slices_ms],
        slices_ms[0][0] * MS if slices_ms else 0,
    )


def recorded(rounds: int, *, offset_ns: int = 0) -> RecordedSlices:
    """Return slices of 10 ms of two hosts, without a pause between them."""
    rows = tuple(
        (turn % 2, Slice(turn * 10 * MS, (turn + 1) * 10 * MS)) for turn in range(2 * rounds)
    )
    return RecordedSlices(offset_ns, ("lab-0", "lab-1"), 2, 10, rows)


@pytest.mark.parametrize(
    ("moment_ms", "ran_ms"),
    [(0, 0), (4, 4), (10, 10), (15, 10), (20, 10), (25, 15), (30, 20), (39, 20), (45, 25)],
)
def test_clock_stands_still_while_the_host_is_frozen(moment_ms, ran_ms):
    found = clock((0, 10), (20, 30), (40, 50)).unix_s(moment_ms / 1000)
    assert found == pytest.approx(ran_ms / 1000, abs=1e-9)


def test_times_that_follow_one_another_count_what_the_host_ran():
    host = clock((0, 10), (20, 30), (40, 50))
    assert host.lengths_s(0.005, [0.010, 0.015, 0.015]) == pytest.approx([0.005, 0.010, 0.005])
    assert host.rounds(0.005, 0.040) == 2


def test_host_has_not_run_before_its_slice_of_the_first_round():
    assert recorded(2).clocks()["lab-1"].unix_s(0.004) == 0.0


@pytest.mark.parametrize("moment_s", [0.099, 0.161])
def test_times_without_turns_have_no_time_of_the_host(moment_s):
    with pytest.raises(DataError, match="between the first and the last slice"):
        clock((100, 110), (120, 130), (140, 150)).unix_s(moment_s)


def test_frozen_time_after_the_last_slice_belongs_to_the_record():
    assert clock((0, 10), (20, 30)).unix_s(0.035) == pytest.approx(0.020, abs=1e-9)


def test_no_slice_means_no_time_of_the_host():
    with pytest.raises(DataError):
        clock().unix_s(0.0)


def test_slices_in_disorder_are_refused():
    with pytest.raises(DataError, match="in order"):
        clock((0, 10), (5, 20))


def test_file_is_read_for_each_host_without_its_unfinished_line(tmp_path):
    path = tmp_path / "slices"
    path.write_text(recorded(2, offset_ns=1000).text + "1 31")
    found = RecordedSlices.read(path)
    assert found == recorded(2, offset_ns=1000)
    assert found.clocks()["lab-1"].slices == [
        Slice(10 * MS + 1000, 20 * MS + 1000),
        Slice(30 * MS + 1000, 40 * MS + 1000),
    ]
    assert overlap_ns(found.clocks().values()) == 0
    assert found.until_unix_s() == pytest.approx(0.030 + 1e-6)


@pytest.mark.parametrize("read_bytes", [1, 100, 10_000])
def test_only_the_end_of_a_file_is_read(tmp_path, monkeypatch, read_bytes):
    monkeypatch.setattr(virtual_clock, "_READ_BYTES", read_bytes)
    path, every = tmp_path / "slices", recorded(100, offset_ns=1000)
    path.write_text(every.text)
    assert RecordedSlices.read(path) == every
    found = RecordedSlices.read(path, 1.9 + 1e-6)
    assert found.rows == every.rows[-len(found.rows) :]
    assert found.rows[0][1].start_ns < 1900 * MS
    assert (len(found.rows) < 100) is (read_bytes < 10_000)


@pytest.mark.parametrize(
    "text",
    ["", "\n", "something\n", "slices unix_offset_ns=1 hosts=a cores=1 slice_ms=1\n0 x y\n"],
)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "slices"
    path.write_text(text)
    with pytest.raises(DataError, match="expected the slices of a lab"):
        RecordedSlices.read(path)


def test_overlap_of_hosts_is_counted():
    assert overlap_ns([clock((0, 10), (20, 30)), clock((8, 22))]) == 4 * MS
    # until 50 all ran at once
    assert overlap_ns([clock((0, 50), (51, 60)), clock((0, 49), (60, 70))]) == 0


def test_hosts_run_at_once_until_a_training_begins_or_the_process_ends(monkeypatch, tmp_path):
    slices = tmp_path / "slices"
    run_in_turns()  # nothing outside of a lab
    run_together()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(SLICES_VARIABLE, str(slices))
    run_together()
    assert are_together(slices)
    run_in_turns()
    run_in_turns()  # of the next rank
    assert not are_together(slices)
    run_together_again()
    run_together_again()  # of the next rank
    assert are_together(slices)
    run_in_turns()
    program = "from paceline.measure.records.virtual_clock import run_together as r; r()"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert set(tmp_path.iterdir()) == {together_file(slices), waiting_file(slices)}
    assert not are_together(slices)


def test_trial_keeps_whole_rounds_until_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(virtual_clock, "_BEFORE_S", 0.0)
    monkeypatch.setattr(virtual_clock, "_RECORDED_S", 0.0)
    source, files = tmp_path / "lab", TrialFiles(tmp_path)
    source.write_text(recorded(10).text)
    keep_slices(source, files, 0.035, 0.1)
    kept = RecordedSlices.read(files.slices)
    assert kept.rows == recorded(10).rows[2:]
    assert {each.origin_ns for each in kept.clocks().values()} == {20 * MS}
    with pytest.raises(EnvironmentLacks, match="make the lab again"):
        keep_slices(source, files, 0.035, 0.25)


def jsonl(*rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


STEP = {"step": 1, "started_unix_s": 0.005, "step_s": 0.8, "forward_s": 0.4, "comm_s": 0.4}
CPU = {"voluntary_context_switches": 3}


@pytest.fixture
def trial(tmp_path):
    """Return the folder of a trial with one rank on lab-1."""
    for path, text in {
        "trial.json": json.dumps({"training": {"warmup_steps": 1}}),
        "ranks/0/status.json": json.dumps({"host": "lab-1", "process_started_unix_s": 0.015}),
        "ranks/0/environment.json": json.dumps({"clock_offset_s": 9.0, "clock_error_s": 9.0}),
        "ranks/0/steps.jsonl": jsonl(
            {**STEP, "step": 0, "step_s": 0.01, "forward_s": None, "comm_s": 0.01},
            {**STEP, "comm_ready_unix_s": None, "loss_sum": 3.5},
        ),
        "ranks/0/checkpoints.jsonl": jsonl({"started_unix_s": 0.02, "blocked_s": 0.04}),
        "hosts/lab-1/trace.jsonl": jsonl(
            {"interval_s": 2.0, "expensive_interval_s": 10.0, "started_unix_s": 0.01, "cores": 64},
            {"unix_s": 0.2, "cpu_seconds": {"user": 0.15}, "run_cpu_seconds": 0.1, **CPU},
            {"unix_s": 0.4, "cpu_seconds": {"user": 0.25}, "run_threads": 4},
        ),
        "hosts/lab-1/ranks.jsonl": jsonl({"unix_s": 0.2, "rank": 0, "cpu_seconds": 0.1, **CPU}),
        "failures.jsonl": jsonl({"detected_unix_s": 0.025, "failed_rank": 1}),
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return TrialFiles(tmp_path)


def rows(path):
    return [json.loads(each) for each in path.read_text().splitlines()]


def test_trial_has_the_times_of_its_hosts(trial):
    convert_trial(trial, recorded(100).clocks(), "lab-0")
    rank, host = trial.rank(0), trial.host("lab-1")
    step = rows(rank.steps)[1]
    assert step["started_unix_s"] == pytest.approx(0.0)
    assert (step["step_s"], step["forward_s"], step["comm_s"]) == pytest.approx((0.4, 0.2, 0.2))
    assert (step["loss_sum"], step["comm_ready_unix_s"]) == (3.5, None)
    assert json.loads(rank.status.read_text())["process_started_unix_s"] == pytest.approx(0.005)
    environment = json.loads(rank.environment.read_text())
    assert environment == {"clock_offset_s": 0.0, "clock_error_s": pytest.approx(0.01)}
    assert rows(rank.checkpoints)[0]["blocked_s"] == pytest.approx(0.02)
    assert rows(trial.failures)[0] == {"detected_unix_s": pytest.approx(0.015), "failed_rank": 1}
    header, first, second = rows(host.trace)
    assert (header["interval_s"], header["expensive_interval_s"], header["cores"]) == (1, 5, 2)
    assert "voluntary_context_switches" not in {**first, **rows(host.ranks)[0]}
    assert (first["run_cpu_seconds"], second["run_threads"]) == (0.1, 4)
    spent = [second["cpu_seconds"][mode] - first["cpu_seconds"][mode] for mode in ("user", "idle")]
    assert spent == pytest.approx([0.1, 0.1])  # two cores in 0.1 s


def test_short_steps_are_refused_with_advice(trial):
    trial.rank(0).steps.write_text(jsonl({**STEP, "step_s": 0.38}))
    with pytest.raises(
        DataError, match=r"0\.38 s has 19 rounds of slices, expected at least 20 .*"
    ):
        convert_trial(trial, recorded(100).clocks(), "lab-0")


def test_rank_of_another_host_is_refused(trial):
    trial.rank(0).status.write_text('{"host": "other"}')
    with pytest.raises(DataError, match="expected a host that takes turns, found 'other'"):
        convert_trial(trial, recorded(100).clocks(), "lab-0")


def test_line_of_a_slice():
    assert line(1, Slice(2, 3)) == "1 2 3\n"
