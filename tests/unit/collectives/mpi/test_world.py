"""Ranks meet before they import what takes long."""

import subprocess
import sys

PROGRAM = """
import sys
import paceline.runner.launchers.mpi.rank
import paceline.collectives.mpi.world
print(*(name for name in ("torch", "pyarrow", "petastorm") if name in sys.modules))
"""


def test_ranks_join_their_job_before_they_import_torch():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.split() == []
