"""Whole runs whose sidecar dies, whose launcher dies, and that share a host."""

import json
import os
import signal
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from tests.functional.cli_runs import slowed, small
from tests.functional.long_runs import ENDLESS, alive, running_rank
from tests.support.waiting import wait_for

from paceline.analysis.trial.host_frames import GAP_INTERVALS, gaps
from paceline.analysis.trial.reading import read_hosts
from paceline.base.host.processes import is_alive
from paceline.measure.records.documents import CheckpointFolder
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.tables import row_dicts

pytestmark = [pytest.mark.functional, pytest.mark.timeout(500)]

STARTED_WITHIN_S = 150.0
INTERVAL_S = 0.1  # of SMALL
LATE_S = 0.5  # of a reading on a busy machine
LONGER = small(max_steps=160, epochs=60, image_size=64)


def sidecar_of(out: Path) -> dict | None:
    """Return what the run's sidecar states while it runs, None while there is none."""
    for path in out.glob("trials/*/hosts/*/sidecar.json"):
        state = json.loads(path.read_text())
        if is_alive(state["pid"]):
            return state
    return None


def rows_of(out: Path, name: str) -> list[dict]:
    (host,) = out.glob("trials/*/hosts/*")
    return list(row_dicts(host / name))


def steps_of(out: Path) -> int:
    return sum(len(list(row_dicts(p / "steps.jsonl"))) for p in out.glob("trials/*/ranks/*"))


def end(process) -> None:
    if process.poll() is None:
        process.terminate()
        process.send_signal(signal.SIGCONT)  # it may be held up
        process.wait(timeout=30)


def test_killed_sidecar_is_restarted_and_the_training_is_like_any_other(paceline, tmp_path):
    spec, out, log = tmp_path / "small.toml", tmp_path / "run", tmp_path / "log.txt"
    spec.write_text(LONGER)
    process = slowed(paceline).start("run", spec, "--out", out, log=log)
    try:
        wait_for(lambda: steps_of(out) >= 3, STARTED_WITHIN_S, "training", process)
        first = wait_for(lambda: sidecar_of(out), 15, "a sidecar", process)
        killed_unix_s = time.time()
        # The run is held up, so that it cannot start another sidecar before there is a gap.
        process.send_signal(signal.SIGSTOP)
        os.kill(first["pid"], signal.SIGKILL)
        time.sleep((GAP_INTERVALS + 1) * INTERVAL_S)  # a gap is longer than GAP_INTERVALS
        process.send_signal(signal.SIGCONT)

        def second():
            found = sidecar_of(out)
            return found if found and found["pid"] != first["pid"] else None

        restarted = wait_for(second, 15, "another sidecar")
        assert (restarted["port"], restarted["restarts"]) == (first["port"], 1)
        assert process.wait(timeout=200) == 0, log.read_text()
    finally:
        end(process)
    times = [row["unix_s"] for row in rows_of(out, "trace.jsonl")]
    assert times == sorted(times)
    assert times[0] < killed_unix_s < times[-1]
    # Each row is written at once, so at most the one of the kill is missing. On a busy machine the
    # rows before it are late, too.
    before = [unix_s for unix_s in times if unix_s < killed_unix_s]
    last_unix_s = before[-1]
    usual_s = max((later - earlier for earlier, later in pairwise(before)), default=0.0)
    assert killed_unix_s - last_unix_s < 2 * INTERVAL_S + max(LATE_S, 2 * usual_s)
    [(_, files)] = RunFiles(out).trials()
    (trace,) = read_hosts(files)
    marked = [begin for begin, end in gaps(trace) if begin <= killed_unix_s <= end]
    assert marked == [last_unix_s]
    assert [row["cpu_seconds"] for row in rows_of(out, "ranks.jsonl")][-1] > 0
    (row,) = json.loads(paceline.main("compare", out, "--json").stdout)["rows"]
    assert row["equivalent"] is True
    assert sidecar_of(out) is None
    assert list(out.glob("targets/*")) == []


def test_two_runs_at_once_count_their_own_and_end_when_they_are_asked_to(paceline, tmp_path):
    outs = [tmp_path / "run-a", tmp_path / "run-b"]
    logs = [tmp_path / f"{out.name}.txt" for out in outs]
    spec = tmp_path / "endless.toml"  # a short run may end before the other one begins
    spec.write_text(ENDLESS + "[checkpoint]\nevery_steps = 1000000\n")
    processes = [
        slowed(paceline).start("run", spec, "--out", out, log=log)
        for out, log in zip(outs, logs, strict=True)
    ]
    try:
        wait_for(lambda: all(steps_of(out) for out in outs), STARTED_WITHIN_S, "both runs training")
        states = [wait_for(partial(sidecar_of, out), 15, "a sidecar") for out in outs]
        assert states[0]["pid"] != states[1]["pid"]
        targets = [json.loads(next(out.glob("targets/*")).read_text()) for out in outs]
        assert [target[0]["targets"] for target in targets] == [
            [f"127.0.0.1:{state['port']}"] for state in states
        ]
        wait_for(lambda: all(len(rows_of(out, "ranks.jsonl")) > 5 for out in outs), 60, "readings")
        second = paceline.main("run", "--resume", outs[0])
        assert second.returncode == 2
        assert "another `paceline run` is writing here" in second.stderr
        assert running_rank(outs[0], "local", 0) in alive(outs[0]), "the first run goes on"
        for process, number in zip(processes, (signal.SIGINT, signal.SIGTERM), strict=True):
            process.send_signal(number)
        codes = [process.wait(timeout=60) for process in processes]
        assert codes == [130, 143], [log.read_text() for log in logs]
    finally:
        for process in processes:
            end(process)
    for out in outs:
        samples, ranks = rows_of(out, "trace.jsonl"), rows_of(out, "ranks.jsonl")
        samples = [row for row in samples if row.get("run_processes")]
        assert max(row["run_processes"] for row in samples) <= 2  # the rank, and what it starts
        assert {row["rank"] for row in ranks} == {0}
        of_run = {row["unix_s"]: row["run_cpu_seconds"] for row in samples}
        last = [row for row in ranks if row["unix_s"] in of_run][-1]
        assert last["cpu_seconds"] == pytest.approx(of_run[last["unix_s"]], rel=0.05)
    assert not any(is_alive(state["pid"]) for state in states)
    for out, log in zip(outs, logs, strict=True):
        assert alive(out) == {}
        assert list(out.glob("trials/*/outcome.json")) == []
        assert "Traceback" not in log.read_text()
        [(_, files)] = RunFiles(out).trials()
        assert CheckpointFolder(files.checkpoints).complete(), "a last one, before the ranks ended"


def test_killed_paceline_leaves_no_process_and_no_sidecar(paceline, tmp_path):
    spec, out, log = tmp_path / "endless.toml", tmp_path / "run", tmp_path / "log.txt"
    spec.write_text(ENDLESS)
    process = paceline.start("run", spec, "--out", out, log=log)
    try:
        wait_for(lambda: steps_of(out) >= 1, STARTED_WITHIN_S, "training", process)
        wait_for(lambda: sidecar_of(out), 15, "a sidecar", process)
    finally:
        process.kill()
        process.wait(timeout=30)
    wait_for(lambda: sidecar_of(out) is None, 20, "the sidecar gone")
    wait_for(lambda: alive(out) == {}, 15, "every process gone")
    (state,) = out.glob("trials/*/hosts/*/sidecar.json")
    # all of them end at once; on a busy machine the sidecar may see that of the rank first
    reasons = {"asked", "parent ended", "watched processes ended"}
    assert json.loads(state.read_text())["ended"] in reasons
    assert (state.parent / "final.prom").exists()
    assert list(out.glob("targets/*")) == []
