"""Start a benchmark's ranks on the hosts of a lab, one on each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mpi_job import mpirun, output_of
from paceline.runner.lab import INTERFACE

if TYPE_CHECKING:
    from paceline.runner.lab import Lab

RANK = "--rank"  # first argument of a rank, before the job and the file of its results
_VARIABLES = {"PACELINE_INTERFACE": INTERFACE, "GLOO_SOCKET_IFNAME": INTERFACE}


def ranks_on(lab: Lab, program: str, job: dict[str, Any], limit_s: float) -> Any:
    """Run `program --rank JOB FILE` on every host; return what rank 0 has written to FILE."""
    exported = [word for name in (*_VARIABLES, "OMP_NUM_THREADS") for word in ("-x", name)]
    with TemporaryDirectory(prefix="paceline-ranks-") as folder:
        file = Path(folder, "results.json")
        command = lab.hosts[0].command(
            mpirun(), "-n", len(lab.hosts), "--hostfile", lab.hostfile, "--bind-to", "none",
            "--mca", "btl", "tcp,self", *exported, sys.executable, "-m", "mpi4py", program,
            RANK, json.dumps(job), file,
        )  # fmt: skip
        output_of(command, limit_s, **_VARIABLES)
        return json.loads(file.read_text())
