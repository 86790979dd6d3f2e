"""Train one trial as one rank of an MPI job.

    mpirun -n 2 python mpi-jobs/train.py quickstart --only '*.mpi.gloo.*' --out RUN_DIR

An error on any rank ends the whole job, so `-m mpi4py` is not needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import paceline  # noqa: F401
except ImportError:  # unpacked from the archive: the package lies beside this script
    sys.path.insert(0, str(Path(__file__).resolve().with_name("paceline.zip")))

from paceline.runner.launchers.mpi.rank import main

if __name__ == "__main__":
    sys.exit(main())
