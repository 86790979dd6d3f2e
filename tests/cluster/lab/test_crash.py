"""`paceline lab up` that is killed, or asked to end, and what is left of it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.cluster.lab.labs import keeping_remains, traces_of
from tests.functional.cli_runs import Cli
from tests.support.commands import start_command

from paceline.collectives.host import wait_until
from paceline.runner.lab import Lab, LabSettings
from paceline.runner.lab.record import LabRecord, Registry

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab")]

LIMIT_S = 120
# Two processes, the second one in the background, that do not end by themselves.
ENDLESS = "echo up; (while :; do sleep 1; done) & while :; do sleep 1; done"


@contextmanager
def up(name: str, log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`lab up` that runs ENDLESS in a lab of one host; removed at the end in any case."""
    command = [sys.executable, "-m", "paceline.cli", "lab", "up", "--name", name, "--hosts", "1"]
    command += ["--exec", ENDLESS, *words]
    process = start_command(command, log)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(timeout=LIMIT_S)
        down(name)


def down(name: str) -> subprocess.CompletedProcess[str]:
    """Run `lab down` in this process, which saves the imports."""
    return Cli(dict(os.environ), Path.cwd()).main("lab", "down", "--name", name)


def record_of(name: str) -> LabRecord:
    """As soon as there is one."""
    assert wait_until(lambda: Registry().load(name) is not None, LIMIT_S, poll_s=0.001)
    record = Registry().load(name)
    assert record is not None
    return record


@pytest.fixture
def name() -> str:
    return f"crash-{secrets.token_hex(3)}"


def test_down_leaves_nothing_of_a_lab_whose_maker_was_killed(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with up(name, log) as process:  # with Spark
        record = record_of(name)
        assert wait_until(lambda: "up\n" in log.read_text(), LIMIT_S), log.read_text()
        with keeping_remains():
            process.kill()
            process.wait(timeout=LIMIT_S)
            left = traces_of(record)
            assert len([trace for trace in left if trace.startswith("process")]) >= 4
            assert f"paceline-{name}-hub" in left
            done = down(name)
        assert done.returncode == 0, done.stderr
        assert f"lab {name} is removed" in done.stderr
        assert traces_of(record) == []


@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.1])
def test_down_leaves_nothing_of_a_lab_that_was_being_made(
    after_s: float, name: str, tmp_path: Path
) -> None:
    with up(name, tmp_path / "log", "--no-spark") as process:
        record = record_of(name)
        time.sleep(after_s)  # a moment within the making
        process.kill()
        process.wait(timeout=LIMIT_S)
        assert down(name).returncode == 0
        assert traces_of(record) == []


def test_next_lab_removes_what_is_left_of_one_whose_maker_was_killed(
    name: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with up(name, log, "--no-spark") as process:
        record = record_of(name)
        assert wait_until(lambda: "up\n" in log.read_text(), LIMIT_S), log.read_text()
        process.kill()
        process.wait(timeout=LIMIT_S)
        with Lab(LabSettings(hosts=1)):
            assert traces_of(record) == []


@pytest.mark.parametrize(("asked", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_maker_that_is_asked_to_end_removes_the_lab(
    asked: signal.Signals, status: int, name: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with up(name, log, "--no-spark") as process:
        record = record_of(name)
        assert wait_until(lambda: "up\n" in log.read_text(), LIMIT_S), log.read_text()
        os.kill(process.pid, asked)
        assert process.wait(timeout=LIMIT_S) == status, log.read_text()
        assert traces_of(record) == []
