"""What a barrier task starts for MPI: mpirun or PRRTE's daemon, with the environment of the ranks.

Whatever it starts ends with the task: the kernel sends SIGTERM when Spark kills the task's Python,
and mpirun and its daemons then end their ranks.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

import paceline
from paceline.host import exec_guarded
from paceline.job.environment import rank_environment
from paceline.launchers.mpi.launcher import root_environment
from paceline.launchers.spark.mpi.agent import DAEMON, DaemonStart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.plan.trial import Trial

# {"ranks": of this host, "executors": process ids}, for the ranks that are started here
TASKS_VARIABLE = "PACELINE_SPARK_TASKS"
# mpirun would take these for its own: of a batch job or an MPI job that Spark itself runs in.
_OF_OTHER_JOBS = ("SLURM_", "PBS_", "LSB_", "OMPI_", "PMIX_", "PRTE_", "PMI_")
_CHOICES = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")
_TERMINATION_S = 5.0


def environment_of_ranks(
    trial: Trial,
    ranks: Sequence[int],
    executors: Sequence[int],
    own: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """What mpirun, or the daemon, and the ranks that it starts on this host find set.

    This host's Python comes first on PATH, and the package is where this task has it from: it may
    be an archive that Spark has shipped, at another place on every host.
    """
    kept = {
        name: value
        for name, value in own.items()
        if name.startswith(_CHOICES) or not name.startswith(_OF_OTHER_JOBS)
    }
    package = str(Path(paceline.__file__).parents[1])
    return {
        **kept,
        **rank_environment(trial),
        **root_environment(),
        "PATH": _first(str(Path(sys.executable).parent), own.get("PATH", os.defpath)),
        "PYTHONPATH": _first(package, own.get("PYTHONPATH", "")),
        TASKS_VARIABLE: json.dumps({"ranks": list(ranks), "executors": list(executors)}),
    }


def daemon_command(
    start: DaemonStart, mpirun: Path, environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command of PRRTE's daemon on this host, and its environment.

    mpirun: of this host. The daemon beside it is taken, which may lie elsewhere than on task 0's.
    """
    own = mpirun.with_name(DAEMON)
    program = str(own) if own.is_file() else start.program
    prefix = Path(program).parent.parent
    settings = dict.fromkeys(start.variables, str(prefix))
    if "LD_LIBRARY_PATH" in settings:
        libraries = environment.get("LD_LIBRARY_PATH", "")
        settings["LD_LIBRARY_PATH"] = _first(str(prefix / "lib"), libraries)
    return [program, *start.arguments], {**environment, **settings}


def start_guarded(
    argv: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | int
) -> subprocess.Popen[bytes]:
    """Start a program that gets SIGTERM when the calling thread ends, however it ends, and that is
    killed if it does not end thereupon."""
    # Its source, since the package may be in an archive.
    guard = [sys.executable, "-I", "-S", "-c", inspect.getsource(exec_guarded)]
    return subprocess.Popen(
        [*guard, f"{os.getpid()}:{_TERMINATION_S:g}", *argv],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Spark's daemon signals its group; ours is to end in order
    )


def end_process(process: subprocess.Popen[bytes]) -> int:
    """Ask a process to end, then make it; its exit status."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=_TERMINATION_S)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait(timeout=_TERMINATION_S)


def _first(path: str, others: str) -> str:
    return os.pathsep.join(part for part in (path, others) if part)
