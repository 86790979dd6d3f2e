"""`python -m paceline.launchers.spark.mpi.rank`: one rank that mpirun started for a task."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks
from paceline.host.machine import host_name
from paceline.job.options import Job, check_not_alone, check_world_size, read_trial
from paceline.launchers.mpi.rank import find_nodes, run_as_rank, train_in
from paceline.launchers.spark.mpi.processes import TASKS_VARIABLE
from paceline.records.layout import RunFiles, TrialFiles

if TYPE_CHECKING:
    from paceline.transports.mpi.world import World


def main(world: World) -> int:
    """This rank's part; returns an exit code, raises PacelineError."""
    parser = argparse.ArgumentParser(prog="python -m paceline.launchers.spark.mpi.rank")
    parser.add_argument("--trial", type=Path, required=True)
    parser.add_argument("--by-hand", action="store_true")
    options = parser.parse_args()
    job = job_of_tasks(options.trial, by_hand=options.by_hand)
    check_not_alone(world.size, job.trial.placement.ranks)
    check_world_size(job.trial.placement.ranks, world.size)
    tasks = json.loads(os.environ[TASKS_VARIABLE])
    if world.rank not in tasks["ranks"]:
        raise EnvironmentLacks(
            f"rank {world.rank} is on host {host_name()}, where Spark has the tasks "
            f"{tasks['ranks']}: mpirun placed it otherwise; look for a mapping in [mpi] arguments"
        )
    end = train_in(world, job, find_nodes(world), tasks["executors"])
    return end.exit_code


def job_of_tasks(trial_file: Path, *, by_hand: bool) -> Job:
    """The job of the barrier tasks, from the trial that its driver left in the run directory."""
    files = TrialFiles(trial_file.parent)
    run = RunFiles(files.root.parent.parent) if by_hand else None
    return Job(trial=read_trial(trial_file), files=files, run=run)


if __name__ == "__main__":
    from paceline.transports.mpi.world import World  # initialises MPI

    sys.exit(run_as_rank(World(), main))
