"""The worker of a Spark cluster on one node of a Slurm job; slurm_job.py starts it by srun.

    python -m paceline.runner.launchers.spark.slurm_worker MASTER INTERFACE CORES

It runs until its standard input ends, which srun passes on from slurm_job.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from paceline.base.errors import EnvironmentLacks, ExitCode, UsageError
from paceline.base.host.locks import own_folder
from paceline.base.host.processes import end_processes, guarded
from paceline.collectives.host import interface_address
from paceline.runner.job import run_guarded
from paceline.runner.launchers.spark.standalone import daemon_command, daemon_environment

# Slurm sends SIGKILL later: KillWait is 30 s by default.
_END_S = 10.0
_POLL_S = 0.5
_PREFIX = "paceline-spark-worker-"


def main() -> int:
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
            guarded(argv), env=_environment(address, folder), stdin=subprocess.DEVNULL
        )
        try:
            while worker.poll() is None:
                if select.select([0], [], [], _POLL_S)[0] and not os.read(0, 1):
                    return ExitCode.OK
            raise EnvironmentLacks(f"Spark's worker ended with {worker.returncode}")
        finally:
            end_processes([worker], _END_S)


def _environment(address: str, folder: Path) -> dict[str, str]:
    """Return the variables without Slurm's, with which mpirun in a task would start a job step."""
    every = daemon_environment(address)
    kept = {k: v for k, v in every.items() if not k.startswith("SLURM_")}
    return {**kept, "SPARK_LOCAL_DIRS": str(folder), "TMPDIR": str(folder)}


if __name__ == "__main__":
    sys.exit(run_guarded(main))
