"""Start a benchmark's ranks with the mpirun of this environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun() -> Path:
    return Path(sys.executable).with_name("mpirun")


def environment(**extra: str) -> dict[str, str]:
    """Return an environment with one thread per rank, in which Open MPI accepts root."""
    return {**os.environ, **AS_ROOT, "OMP_NUM_THREADS": "1", **extra}


def output_of(command: Sequence[object], limit_s: float, **extra: str) -> str:
    """Standard output of a job that ends well within the limit. Raises if it does not."""
    done = subprocess.run(
        [str(word) for word in command],
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        timeout=limit_s,
        check=True,
        text=True,
    )
    return done.stdout
