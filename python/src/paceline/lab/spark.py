"""A Spark standalone cluster on the hosts of a lab: a master on the first, a worker on each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks, TimedOut
from paceline.host.java import find_java
from paceline.host.processes import wait_until
from paceline.host.spark import find_spark
from paceline.lab.record import SPARK_PORT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.lab.record import Host, LabRecord

START_S = 90.0
_DEPLOY = "org.apache.spark.deploy"
# Log messages of daemons that are ready (Master.scala, Worker.scala of Spark 3.5).
_MASTER_READY = "New state: ALIVE"
_WORKER_READY = "Successfully registered with master"
_LOG_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Daemon:
    """A master or a worker, with its log file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ready: str

    def is_ready(self) -> bool:
        """Check its log. Raises EnvironmentLacks if the daemon has ended."""
        if self.process.poll() is not None:
            raise EnvironmentLacks(
                f"Spark's {self.name} ended with {self.process.returncode}:\n{self._end_of_log()}"
            )
        return self.ready in self._text()

    def not_ready(self) -> TimedOut:
        return TimedOut(
            f"Spark's {self.name} was not ready within {START_S:g} s:\n{self._end_of_log()}"
        )

    def _text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _end_of_log(self) -> str:
        return f"{self._text()[-_LOG_CHARACTERS:]}\n(the whole log: {self.log})"


def start(record: LabRecord, begun: list[subprocess.Popen[bytes]]) -> None:
    """Start the cluster and return when all workers are registered.

    Each process is added to `begun` as soon as it is started. Raises EnvironmentLacks with the end
    of the log if a daemon ends, and TimedOut after START_S.
    """
    deadline = time.monotonic() + START_S
    first = record.hosts[0]
    master = _start(
        record, first, "master", _MASTER_READY,
        f"{_DEPLOY}.master.Master", "--port", SPARK_PORT,
    )  # fmt: skip
    begun.append(master.process)
    _wait([master], deadline)  # a worker that finds no master retries only after seconds
    slots = record.settings.slots_per_host()
    workers = []
    for host in record.hosts:
        name = f"worker-{host.number}"
        worker = _start(
            record, host, name, _WORKER_READY,
            f"{_DEPLOY}.worker.Worker", "--cores", slots, "--memory", f"{slots + 1}g",
            "--work-dir", Path(record.logs, name), record.spark_master,
        )  # fmt: skip
        begun.append(worker.process)
        workers.append(worker)
    _wait(workers, deadline)


def _start(record: LabRecord, host: Host, name: str, ready: str, *words: object) -> Daemon:
    home = find_spark().path
    where = ("--host", host.address, "--webui-port", 0)
    kind, *options = words
    log = Path(record.logs, f"{name}.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            host.command(home / "bin" / "spark-class", kind, *where, *options),
            env=_environment(home),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a lab that stays must survive its terminal
        )
    return Daemon(name, process, log, ready)


def _environment(home: Path) -> dict[str, str]:
    """Return our variables without those of trials and ranks, which executors would inherit."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "OMP_"))}
    return {
        **kept,
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(find_java().path.resolve().parent.parent),
        "PYSPARK_PYTHON": sys.executable,
    }


def _wait(daemons: Iterable[Daemon], deadline: float) -> None:
    for daemon in daemons:
        if not wait_until(daemon.is_ready, deadline - time.monotonic(), poll_s=0.1):
            raise daemon.not_ready()
