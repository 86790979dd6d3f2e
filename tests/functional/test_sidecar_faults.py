"""Whole runs whose sampler dies, whose launcher dies, and that share a host."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.functional.cli_runs import SMALL, Cli

from paceline.records.tables import row_dicts

pytestmark = [pytest.mark.functional, pytest.mark.timeout(500)]

STARTED_WITHIN_S = 150.0
LONGER = (
    SMALL.replace("max_steps = 20", "max_steps = 90")
    .replace("epochs = 8", "epochs = 30")
    .replace("image_size = 128", "image_size = 64")
)
ENDLESS = SMALL.replace("max_steps = 20", "max_steps = 100000").replace(
    "epochs = 8", "epochs = 100000"
)


@pytest.fixture
def paceline(paceline: Cli, tmp_path: Path) -> Cli:
    """With a runtime folder of its own: what is killed here is no other test's sampler."""
    own = {"PACELINE_RUNTIME_DIR": str(tmp_path / "runtime")}
    return replace(paceline, environment={**paceline.environment, **own})


def wait_for(condition, limit_s, what, *runs):
    """What `condition` finds at last; it is an error if one of `runs` ends before."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        assert all(run.poll() is None for run in runs), f"{what}: a run has ended before"
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {limit_s:.0f} s")


def sampler_of(tmp_path: Path):
    """(process id, port, watches) of the host's sampler, None while there is none."""
    for path in tmp_path.glob("runtime/*/sampler.json"):
        try:
            told = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            continue
        if is_running(told["process"]["pid"]):
            return told["process"]["pid"], told["port"], told["watches"]
    return None


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def left_in(tmp_path: Path) -> list[Path]:
    """Requests and accounts that are still in the runtime folder."""
    return [
        path for kind in ("watches", "accounts") for path in tmp_path.glob(f"runtime/*/{kind}/*")
    ]


def rows_of(out: Path, name: str) -> list[dict]:
    (host,) = out.glob("trials/*/hosts/*")
    return list(row_dicts(host / name))


def steps_of(out: Path) -> int:
    return sum(len(list(row_dicts(p / "steps.jsonl"))) for p in out.glob("trials/*/ranks/*"))


def end(process) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait(timeout=30)


def test_killed_sampler_leaves_a_gap_and_a_training_like_any_other(paceline, tmp_path):
    spec, out, log = tmp_path / "small.toml", tmp_path / "run", tmp_path / "log.txt"
    spec.write_text(LONGER)
    process = paceline.start("run", spec, "--out", out, log=log)
    try:
        wait_for(lambda: steps_of(out) >= 3, STARTED_WITHIN_S, "training", process)
        pid, port, _ = sampler_of(tmp_path)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: (sampler_of(tmp_path) or (pid,))[0] != pid, 15, "another sampler")
        assert sampler_of(tmp_path)[1] == port
        assert process.wait(timeout=200) == 0, log.read_text()
    finally:
        end(process)
    trace = rows_of(out, "trace.jsonl")
    (gap,) = [number for number, row in enumerate(trace) if "gap_started_unix_s" in row]
    assert trace[gap]["gap_started_unix_s"] == trace[gap - 1]["unix_s"]
    assert trace[gap]["gap_ended_unix_s"] == trace[gap + 1]["unix_s"]
    used_s = [row["run_cpu_seconds"] for row in trace if "run_cpu_seconds" in row]
    assert used_s == sorted(used_s)
    assert [row["cpu_seconds"] for row in rows_of(out, "ranks.jsonl")][-1] > 0.5 * used_s[-1]
    (state,) = out.glob("trials/*/hosts/*/sidecar.json")
    assert json.loads(state.read_text())["restarts"] == 1
    (row,) = json.loads(paceline.main("compare", out, "--json").stdout)["rows"]
    assert row["equivalent"] is True
    assert sampler_of(tmp_path) is None
    assert left_in(tmp_path) == []
    assert list(out.glob("targets/*")) == []


def test_two_runs_at_once_share_a_sampler_and_count_each_its_own(paceline, tmp_path):
    outs = [tmp_path / "run-a", tmp_path / "run-b"]
    spec = tmp_path / "small.toml"
    spec.write_text(LONGER)
    processes = [
        paceline.start("run", spec, "--out", out, log=tmp_path / f"{out.name}.txt") for out in outs
    ]
    try:
        wait_for(lambda: all(steps_of(out) for out in outs), STARTED_WITHIN_S, "both runs training")
        pid, port, watches = sampler_of(tmp_path)
        assert len(watches) == 4  # each run's own, and its trial's
        targets = [json.loads(next(out.glob("targets/*")).read_text()) for out in outs]
        assert [target[0]["targets"] for target in targets] == [[f"127.0.0.1:{port}"]] * 2
        codes = [process.wait(timeout=200) for process in processes]
        assert codes == [0, 0], [(tmp_path / f"{out.name}.txt").read_text() for out in outs]
    finally:
        for process in processes:
            end(process)
    for out in outs:
        samples = [row for row in rows_of(out, "trace.jsonl") if "unix_s" in row]
        ranks = rows_of(out, "ranks.jsonl")
        assert max(row["run_processes"] for row in samples) <= 2  # the rank, and what it starts
        assert {row["rank"] for row in ranks} == {0}
        assert ranks[-1]["cpu_seconds"] == pytest.approx(samples[-1]["run_cpu_seconds"], rel=0.05)
    assert not is_running(pid)
    assert left_in(tmp_path) == []


def test_killed_paceline_leaves_no_sampler_and_no_request(paceline, tmp_path):
    spec, out, log = tmp_path / "endless.toml", tmp_path / "run", tmp_path / "log.txt"
    spec.write_text(ENDLESS)
    process = paceline.start("run", spec, "--out", out, log=log)
    try:
        wait_for(lambda: steps_of(out) >= 1, STARTED_WITHIN_S, "training", process)
        assert sampler_of(tmp_path) is not None
    finally:
        process.kill()
        process.wait(timeout=30)
    wait_for(lambda: sampler_of(tmp_path) is None, 20, "the sampler gone")
    assert left_in(tmp_path) == []
    (state,) = out.glob("trials/*/hosts/*/sidecar.json")
    assert json.loads(state.read_text())["ended"] == "watched processes ended"
    assert (state.parent / "final.prom").exists()
    assert list(out.glob("targets/*")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_runtime_folder_of_another_user_costs_the_trace_and_nothing_else(paceline, tmp_path):
    spec, out = tmp_path / "small.toml", tmp_path / "run"
    spec.write_text(SMALL)
    (tmp_path / "runtime").mkdir(mode=0o700)
    os.chown(tmp_path / "runtime", 12345, 12345)
    result = paceline("run", spec, "--out", out)
    assert result.returncode == 0, result.stderr
    assert "belongs to user 12345" in result.stderr
    assert list(out.glob("trials/*/hosts/*/trace.*")) == []
    assert sampler_of(tmp_path) is None
