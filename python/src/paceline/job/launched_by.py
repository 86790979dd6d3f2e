"""The process that a user started: the launcher, or this process itself."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from paceline.errors import EnvironmentLacks
from paceline.host.processes import command_line_of, parent_of, process_started_unix_s
from paceline.spec.extensions import LAUNCHERS

_TASK_OF_SLURM = "slurmstepd"  # the parent of what srun starts


def launching_pid() -> int:
    """Return the process that the user started: the parent if it is a launcher's program.

    If the parent is another program, such as a shell, the user started this process itself.
    """
    parent = parent_of(os.getpid())
    if parent is None:
        return os.getpid()
    words = command_line_of(parent)
    names = {word.rpartition("/")[2] for word in words[:3]}  # `python -m torch.distributed.run`
    is_launcher = any(names & launcher.programs for launcher in LAUNCHERS.all())
    return parent if is_launcher else os.getpid()


def launched_unix_s() -> float:
    """Return when that process was started."""
    started = process_started_unix_s(launching_pid())
    return time.time() if started is None else started


def check_started_once(environment: Mapping[str, str] = os.environ) -> None:
    """Raise EnvironmentLacks if srun started several copies of a command that starts all ranks.

    Each copy would run the whole trial in the same run directory.
    """
    copies = environment.get("SLURM_STEP_NUM_TASKS", "1")
    parent = parent_of(launching_pid())
    words = [] if parent is None else command_line_of(parent)
    if not (copies.isdigit() and int(copies) > 1 and words):
        return
    # A shell of `srun --pty` has these variables too, but starts the command once.
    if words[0].startswith(_TASK_OF_SLURM):
        raise EnvironmentLacks(
            f"srun started {copies} copies of this command (SLURM_STEP_NUM_TASKS), and each would "
            "run the whole trial. Start it once (srun --ntasks 1, or without srun), or use "
            'launcher "mpi", whose ranks srun --mpi=pmix starts'
        )
