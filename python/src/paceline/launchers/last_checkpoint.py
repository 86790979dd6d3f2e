"""A last checkpoint of a trial that is about to be ended, for example by a scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.host.machine import host_name
from paceline.host.processes import is_alive, send, wait_until
from paceline.records.checkpoints import CHECKPOINT_SIGNAL, CheckpointFolder
from paceline.records.documents import read_statuses

if TYPE_CHECKING:
    from paceline.records.layout import TrialFiles

# Slurm and Kubernetes end a job 30 s after SIGTERM by default; the launcher's end takes 5 to 10 s.
LIMIT_S = 15.0


def write_last_checkpoint(files: TrialFiles, limit_s: float = LIMIT_S) -> bool:
    """Ask the ranks of this host for a checkpoint; return whether a new one is complete in time.

    Rank 0 decides after which step it is written. It has to run on this host.
    """
    folder = CheckpointFolder(files.checkpoints)
    training = [
        status
        for status in read_statuses(files)
        if status.state == "running"
        and status.host == host_name()
        and is_alive(status.pid, status.process_started_unix_s)
    ]
    # Before its first step, a rank would be ended by the signal, and has nothing to write.
    ready = [s.pid for s in training if s.rank == 0 and files.rank(0).steps.exists()]
    if not ready:
        return False
    newest = _newest_steps(folder)
    send(ready, CHECKPOINT_SIGNAL)
    return (
        wait_until(lambda: _newest_steps(folder) > newest or not is_alive(ready[0]), limit_s)
        and _newest_steps(folder) > newest
    )


def _newest_steps(folder: CheckpointFolder) -> int:
    return max((checkpoint.steps for checkpoint in folder.complete()), default=-1)
