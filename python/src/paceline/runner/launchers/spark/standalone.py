"""Daemons of Spark's standalone cluster manager: a master, and a worker on each node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.base.errors import EnvironmentLacks, TimedOut
from paceline.base.host.spark import find_java, find_spark, homes
from paceline.collectives.host import wait_until

_DEPLOY = "org.apache.spark.deploy"
_LOG_CHARACTERS = 2000
_POLL_S = 0.1
# Log messages of daemons that are ready (Master.scala, Worker.scala of Spark 3.5).
_READY = {"master": "New state: ALIVE", "worker": "Successfully registered with master"}
_CLASSES = {"master": f"{_DEPLOY}.master.Master", "worker": f"{_DEPLOY}.worker.Worker"}

Kind = Literal["master", "worker"]


@dataclass(frozen=True, slots=True)
class Daemon:
    """A master or a worker, with its log file."""

    kind: Kind
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def is_ready(self) -> bool:
        """Check its log. Raises EnvironmentLacks if the daemon has ended."""
        if self.process.poll() is not None:
            raise EnvironmentLacks(
                f"Spark's {self.name} ended with {self.process.returncode}:\n{self._end_of_log()}"
            )
        return _READY[self.kind] in self.text()

    def not_ready(self, limit_s: float) -> TimedOut:
        return TimedOut(
            f"Spark's {self.name} was not ready within {limit_s:g} s:\n{self._end_of_log()}"
        )

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _end_of_log(self) -> str:
        return f"{self.text()[-_LOG_CHARACTERS:]}\n(the whole log: {self.log})"


def daemon_command(kind: Kind, address: str, *options: object) -> list[str]:
    """Return the command of a daemon that listens on `address`."""
    program = str(find_spark().path / "bin" / "spark-class")
    where = ["--host", address, "--webui-port", "0"]
    return [program, _CLASSES[kind], *where, *map(str, options)]


def start_daemon(
    kind: Kind, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path
) -> Daemon:
    """Start a daemon. The session is its own, so it survives a terminal."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return Daemon(kind, name, process, log)


def daemon_environment(address: str | None = None) -> dict[str, str]:
    """Return our variables without those of trials and ranks, which executors would inherit.

    address: of this host, for Spark's messages; None: Spark looks up the name of the host.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "OMP_"))}
    local = {} if address is None else {"SPARK_LOCAL_HOSTNAME": address}
    return {
        **kept,
        **local,
        **homes(find_java(), find_spark()),
        "PYSPARK_PYTHON": sys.executable,
    }


def wait_for(daemons: Iterable[Daemon], limit_s: float) -> None:
    """Return when all are ready. Raises EnvironmentLacks if one ends, TimedOut after `limit_s`."""
    deadline = time.monotonic() + limit_s
    for daemon in daemons:
        if not wait_until(daemon.is_ready, deadline - time.monotonic(), poll_s=_POLL_S):
            raise daemon.not_ready(limit_s)
