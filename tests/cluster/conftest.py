"""Two hosts for tests, made of network namespaces of this machine (paceline.runner.lab)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from tests.cluster.lab.labs import checked_lab

from paceline.base.host.processes import command_line_of, pids_with_token, send
from paceline.collectives.host import wait_until
from paceline.runner.lab import Lab, LabSettings
from paceline.runner.launchers import supervise

# Each host offers two ranks. The hosts share this machine's cores.
TWO_HOSTS = LabSettings(hosts=2, slots=2)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Make a lab for the tests of a module; those that take links down bring them up again."""
    with checked_lab(TWO_HOSTS) as made:
        yield made


@pytest.fixture(scope="session")
def spark_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Make one standalone Spark cluster on two hosts for all tests; they bring links up again."""
    settings = LabSettings(hosts=2, slots=2, spark=True)
    with checked_lab(settings, tmp_path_factory.mktemp("spark-lab")) as made:
        yield made


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark the processes of each trial that a test supervises; none of them is left."""
    made = f"test{os.getpid()}{time.monotonic_ns()}"
    monkeypatch.setattr(supervise.secrets, "token_hex", lambda _n: made)
    yield made
    wait_until(lambda: not pids_with_token(made), 10)
    left = {pid: command_line_of(pid) for pid in pids_with_token(made)}
    send(left, signal.SIGKILL)
    assert left == {}
