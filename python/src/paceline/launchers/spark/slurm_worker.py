"""The worker of a Spark cluster on one node of a Slurm job; slurm_job.py starts it by srun.

    python -m paceline.launchers.spark.slurm_worker MASTER INTERFACE CORES

It runs until its standard input ends, which srun passes on from slurm_job.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks, ExitCode, UsageError
from paceline.host.processes import end_processes, guarded
from paceline.job import run_guarded
from paceline.job.rendezvous import interface_address
from paceline.launchers.spark.standalone import daemon_command, daemon_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

# Slurm sends SIGKILL later: KillWait is 30 s by default.
_END_S = 10.0
_POLL_S = 0.5
_PREFIX = f"paceline-spark-worker-{os.getuid()}-"
# A folder younger than this may not be locked yet.
_NEW_S = 60.0


def main() -> int:
    if len(sys.argv) != 4:
        raise UsageError("expected MASTER INTERFACE CORES, as slurm_job gives them")
    master, interface, cores = sys.argv[1:]
    address = interface_address(interface)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.TERMINATED))
    with _folder() as folder:
        options = ("--cores", cores, "--work-dir", folder, master)
        argv = daemon_command("worker", address, *options)
        worker = subprocess.Popen(
            guarded(argv), env=_environment(address, folder), stdin=subprocess.DEVNULL
        )
        try:
            while worker.poll() is None:
                if select.select([0], [], [], _POLL_S)[0] and not os.read(0, 1):
                    return ExitCode.OK
            raise EnvironmentLacks(f"Spark's worker ended with {worker.returncode}")
        finally:
            end_processes([worker], _END_S)


@contextmanager
def _folder() -> Iterator[str]:
    """Make a folder for the files of the worker and of its executors, and remove it at the end.

    Also remove those of cancelled jobs: when a job is cancelled, srun sends SIGKILL at once.
    """
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Another job may remove the same folder at the same time.
        with suppress(FileNotFoundError), _locked(old) as alone:
            if alone and time.time() - old.stat().st_mtime > _NEW_S:
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as made, _locked(Path(made)):
        yield made


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder; yield False if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _environment(address: str, folder: str) -> dict[str, str]:
    """Return the variables without Slurm's, with which mpirun in a task would start a job step."""
    every = daemon_environment(address)
    kept = {k: v for k, v in every.items() if not k.startswith("SLURM_")}
    return {**kept, "SPARK_LOCAL_DIRS": folder, "TMPDIR": folder}


if __name__ == "__main__":
    sys.exit(run_guarded(main))
