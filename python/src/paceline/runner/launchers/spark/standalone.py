"""Daemons of Spark's standalone cluster manager: a master, and a worker on each node.

slurm_job.py starts the worker on one node of a Slurm job by srun:

    python -m paceline.runner.launchers.spark.standalone MASTER INTERFACE CORES

It runs until its standard input ends, which srun passes on from slurm_job.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.base.errors import EnvironmentLacks, ExitCode, TimedOut, UsageError
from paceline.base.host.locks import own_folder
from paceline.base.host.processes import end_processes, guarded
from paceline.base.host.spark import find_java, find_spark, homes
from paceline.collectives.host import interface_address, wait_until
from paceline.runner.job import run_guarded

_DEPLOY = "org.apache.spark.deploy"
_LOG_CHARACTERS = 2000
_POLL_S = 0.1
# Of the program: Slurm sends SIGKILL later, KillWait is 30 s by default.
_END_S = 10.0
_INPUT_POLL_S = 0.5
_PREFIX = "paceline-spark-worker-"
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


def main() -> int:
    """Run a worker until standard input or the worker ends."""
    if len(sys.argv) != 4:
        raise UsageError("expected MASTER INTERFACE CORES, as slurm_job gives them")
    master, interface, cores = sys.argv[1:]
    address = interface_address(interface)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.TERMINATED))
    # When a job is cancelled, srun sends SIGKILL at once; the next worker removes the folder.
    with own_folder(_PREFIX) as folder:
        options = ("--cores", cores, "--work-dir", folder, master)
        argv = daemon_command("worker", address, *options)
        worker = subprocess.Popen(
            guarded(argv), env=_worker_environment(address, folder), stdin=subprocess.DEVNULL
        )
        try:
            while worker.poll() is None:
                if select.select([0], [], [], _INPUT_POLL_S)[0] and not os.read(0, 1):
                    return ExitCode.OK
            raise EnvironmentLacks(f"Spark's worker ended with {worker.returncode}")
        finally:
            end_processes([worker], _END_S)


def _worker_environment(address: str, folder: Path) -> dict[str, str]:
    """Return the variables without Slurm's, with which mpirun in a task would start a job step."""
    every = daemon_environment(address)
    kept = {k: v for k, v in every.items() if not k.startswith("SLURM_")}
    return {**kept, "SPARK_LOCAL_DIRS": str(folder), "TMPDIR": str(folder)}


if __name__ == "__main__":
    sys.exit(run_guarded(main))
