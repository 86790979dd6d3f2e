"""A Spark standalone cluster on the hosts of a lab: a master on the first, a worker on each."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from paceline.runner.lab.record import SPARK_PORT, Host, LabRecord
from paceline.runner.launchers.spark.standalone import (
    Daemon,
    Kind,
    daemon_command,
    daemon_environment,
    start_daemon,
    wait_for,
)

START_S = 90.0


def start(record: LabRecord, begun: list[subprocess.Popen[bytes]]) -> None:
    """Start the cluster and return when all workers are registered.

    Each process is added to `begun` as soon as it is started. Raises EnvironmentLacks with the end
    of the log if a daemon ends, and TimedOut after START_S.
    """
    deadline = time.monotonic() + START_S
    master = _start(record, record.hosts[0], "master", "master", "--port", SPARK_PORT)
    begun.append(master.process)
    wait_for([master], START_S)  # a worker that finds no master retries only after seconds
    workers = []
    for host in record.hosts:
        worker = start_worker(record, host)
        begun.append(worker.process)
        workers.append(worker)
    wait_for(workers, deadline - time.monotonic())


def start_worker(record: LabRecord, host: Host) -> Daemon:
    """Start the worker of a host; return at once."""
    slots, name = record.settings.slots_per_host(), f"worker-{host.number}"
    return _start(
        record, host, "worker", name,
        "--cores", slots, "--memory", f"{slots + 1}g",
        "--work-dir", Path(record.logs, name), record.spark_master,
    )  # fmt: skip


def _start(record: LabRecord, host: Host, kind: Kind, name: str, *options: object) -> Daemon:
    command = host.command(*daemon_command(kind, host.address, *options))
    return start_daemon(kind, name, command, daemon_environment(), Path(record.logs, f"{name}.log"))
