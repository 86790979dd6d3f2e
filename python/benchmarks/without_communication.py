"""Runs a job script whose ranks do everything but send their gradients.

    mpirun -n 2 python without_communication.py [--meet] mpi-jobs/train.py --trial TRIAL_JSON

What remains of a step is the most that any transport could reach. With --meet the ranks still wait
for one another at every bucket: what is lost then is lost to ranks that are not equally fast, which
no transport can help. The ranks' weights drift apart, so the check for that at the end is off, too.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from paceline.collectives.mpi.process_group import MpiProcessGroup
from paceline.collectives.work import PendingWork


def all_reduce_nothing(group: Any, tensors: list[Any], _options: Any = None) -> PendingWork:
    work = PendingWork("nothing", group.rank(), 1.0, tensors)
    work.finish()
    return work


def only_meet(group: Any, tensors: list[Any], _options: Any = None) -> PendingWork:
    work: PendingWork = group._submit(  # noqa: SLF001  (a benchmark may)
        "allreduce", lambda: None, tensors, tensors, synchronise=True
    )
    return work


def main() -> None:
    meet = sys.argv[1] == "--meet"
    if meet:
        del sys.argv[1]
    MpiProcessGroup.allreduce = (  # type: ignore[method-assign]
        only_meet if meet else all_reduce_nothing  # type: ignore[assignment]
    )
    script, *sys.argv = sys.argv[1], *sys.argv[1:]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
