"""`paceline monitor` on a run directory, ended in any case."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.functional.prometheus_api import Prometheus
from tests.support.commands import start_command
from tests.support.listeners import free_address

from paceline.base.host.processes import end_processes

READY_LIMIT_S = 90.0
END_LIMIT_S = 30.0
needs_prometheus = pytest.mark.needs("prometheus")


class Monitor:
    """A running `paceline monitor`; what it said so far is in `log`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def address(self, of: str) -> str:
        """Where `of` (Prometheus, Grafana) answers, once it was said."""
        deadline = time.monotonic() + READY_LIMIT_S
        while True:
            found = re.search(rf"{of}: (http://[0-9.]+:\d+)", self.log)
            if found:
                return found[1]
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.1)

    def api(self) -> Prometheus:
        """Return the API once Prometheus is ready."""
        api = Prometheus(self.address("Prometheus"))
        deadline = time.monotonic() + READY_LIMIT_S
        while not api.is_ready():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.1)
        return api

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(timeout=END_LIMIT_S)


@contextmanager
def monitored(
    run_dir: Path, *arguments: str, path: str | None = None, log: Path | None = None
) -> Iterator[Monitor]:
    """Start it on free ports of the loopback interface. path: instead of PATH."""
    log = log or run_dir.parent / "monitor.log"
    environment = {**os.environ, "NO_COLOR": "1"}
    if path is not None:
        environment["PATH"] = path
    argv = [sys.executable, "-m", "paceline.cli", "monitor", str(run_dir)]
    argv += ["--listen", free_address(), "--grafana-listen", free_address(), *arguments]
    process = start_command(argv, log, env=environment, start_new_session=True)
    try:
        yield Monitor(process, log)
    finally:
        end_processes([process], END_LIMIT_S)  # its children follow: the kernel ends them


def children_of(pid: int) -> set[int]:
    """Processes that `pid` started."""
    return {child.pid for child in psutil.Process(pid).children()}
