"""SIGKILL of any process of a run at a random time, many times.

Whatever was killed: the exit code is right, nothing is left after 15 s, finished trials are intact,
and `--resume` completes the run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from tests.functional.cli_runs import Cli, small, trial
from tests.soak.marked import MarkedCommand

from paceline.base.errors import ExitCode
from paceline.base.host.processes import command_line_of
from paceline.collectives.host import wait_until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

GONE_WITHIN_S = 15.0
ENDS_WITHIN_S = 180.0  # a run whose sidecar was killed goes on to its end
QUICK = small(image_size=64)
SPECS = {
    "mpi": QUICK + trial("mpi", "mpi"),
    "spark": QUICK + trial("spark", "gloo"),
}
# The first of these texts in a command line tells the role. The command lines of mpirun and
# spark-submit contain those of what they start.
ROLES = {
    "exec_guarded.py": "command that starts",
    "cleaner.py": "cleaner",
    "paceline.measure.telemetry.sidecar": "sidecar",
    "--exit-first": "paceline run",
    "prterun": "mpirun",
    "mpirun": "mpirun",
    "SparkSubmit": "JVM of Spark",
    "-version": "check before the first trial",
    "pyspark.daemon": "Python of Spark's tasks",
    "spark-jobs/train.py": "driver of Spark",
    "mpi-jobs/train.py": "rank",
    "paceline.runner.launchers.local": "rank",
}
TRIES = 4  # to kill before the run has ended


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that gets one line for each kill."""
    return tmp_path_factory.getbasetemp() / "random_kills.jsonl"


@pytest.fixture(scope="module")
def usual_s() -> dict[str, float]:
    """Return the time of an undisturbed run by launcher, once it is known."""
    return {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each launcher and repetition."""
    first = metafunc.config.getoption("--soak-seed")
    seeds = range(first, first + metafunc.config.getoption("--soak-count"))
    metafunc.parametrize(("launcher", "seed"), [(name, seed) for name in SPECS for seed in seeds])


def test_killed_process(
    launcher: str,
    seed: int,
    paceline: Cli,
    tiny_dataset: Path,
    tmp_path: Path,
    usual_s: dict[str, float],
    results: Path,
) -> None:
    chosen = random.Random(f"{launcher} {seed}")
    spec, out = tmp_path / "small.toml", tmp_path / "run"
    spec.write_text(SPECS[launcher].replace("samples = 48", f'data = "{tiny_dataset}"'))
    argv = paceline.argv("run", spec, "--out", out, "--exit-first")
    if launcher not in usual_s:
        usual_s[launcher] = time_of_undisturbed_run(argv, paceline, tmp_path, out)
    for _ in range(TRIES):
        shutil.rmtree(out, ignore_errors=True)
        started_s = time.monotonic()
        command = MarkedCommand(argv, paceline.environment, tmp_path)
        try:
            row = kill_and_check(command, chosen, usual_s[launcher], out)
        finally:
            command.end()
        if row is not None:
            break
        # the machine is less busy than before
        usual_s[launcher] = min(usual_s[launcher], time.monotonic() - started_s)
    else:
        raise AssertionError(f"the run ended before the kill {TRIES} times")
    assert_completes(paceline, spec, out)
    line = json.dumps({"launcher": launcher, "seed": seed, **row}, ensure_ascii=False)
    with results.open("a") as file:  # an interrupt loses nothing
        file.write(f"{line}\n")
    print(line)


def time_of_undisturbed_run(argv: list[str], paceline: Cli, folder: Path, out: Path) -> float:
    started_s = time.monotonic()
    command = MarkedCommand(argv, paceline.environment, folder)
    try:
        assert command.wait(ENDS_WITHIN_S) == 0, command.log.read_text()
        ended_s = time.monotonic()
        assert wait_until(lambda: not command.left(), GONE_WITHIN_S), command.left()
    finally:
        command.end()
    assert expected_code(out, "") == 0
    return ended_s - started_s


def kill_and_check(
    command: MarkedCommand, chosen: random.Random, usual_s: float, out: Path
) -> dict[str, object] | None:
    """Kill a process of the run and check what follows; None if the run ended before."""
    started_s = time.monotonic()
    kill_at_s = started_s + chosen.uniform(0.0, usual_s)
    command.wait(ENDS_WITHIN_S, until=lambda: time.monotonic() > kill_at_s)
    victim, role = kill_one(command, chosen)
    if victim is None:
        return None
    killed_s = time.monotonic()
    code = command.wait(ENDS_WITHIN_S)
    ended_s = time.monotonic() - killed_s
    gone = wait_until(lambda: not command.left(), GONE_WITHIN_S, poll_s=0.2)
    row = {
        "victim": role, "at_s": round(killed_s - started_s, 2), "exit_code": code,
        "ended_s": round(ended_s, 2), "gone_s": round(time.monotonic() - killed_s, 2),
    }  # fmt: skip
    log = command.log.read_text()
    assert gone, (row, command.left(), log)
    if victim == command.process.pid:
        assert code == -signal.SIGKILL, (row, log)
    else:
        assert code == expected_code(out, log), (row, log)
        assert code == 0 or ended_s <= GONE_WITHIN_S, (row, log)
    assert "Traceback" not in log, (row, log)
    return row


def kill_one(command: MarkedCommand, chosen: random.Random) -> tuple[int | None, str]:
    """Kill one of the command's processes; return its pid and its role."""
    pids = sorted(command.look())
    chosen.shuffle(pids)
    for pid in pids:
        words = " ".join(command_line_of(pid))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has ended meanwhile
        return pid, role_of(words)
    return None, "none"


def role_of(words: str) -> str:
    """Return what a process of a run is for, from its command line."""
    return next((role for mark, role in ROLES.items() if mark in words), words[-40:])


def expected_code(out: Path, log: str) -> int:
    """Return 0 if all trials ended well, otherwise the code of the first that did not.

    A check before the first trial that was killed is reported as one, with 3.
    """
    outcomes = [json.loads(path.read_text()) for path in out.glob("trials/*/outcome.json")]
    failed = [outcome["exit_code"] for outcome in outcomes if outcome["status"] != "ok"]
    assert set(failed) <= {5}, outcomes
    if not outcomes and f"ended with {-signal.SIGKILL:d}" in log:
        return ExitCode.ENVIRONMENT
    if not failed:
        assert len(outcomes) == 2, outcomes
    return failed[0] if failed else 0


def assert_completes(paceline: Cli, spec: Path, out: Path) -> None:
    """Check that the same command completes the run and leaves finished trials as they are."""
    before = {
        path: path.read_bytes()
        for path in out.glob("trials/*/outcome.json")
        if json.loads(path.read_text())["status"] == "ok"
    }
    began = (out / "manifest.json").exists()
    result = paceline("run", *(["--resume", out] if began else [spec, "--out", out]))
    assert result.returncode == 0, result.stderr
    assert {path: path.read_bytes() for path in before} == before
    rows = json.loads(paceline.main("compare", out, "--json").stdout)["rows"]
    assert [(row["failed"], row["equivalent"]) for row in rows] == [(None, True)] * 2
