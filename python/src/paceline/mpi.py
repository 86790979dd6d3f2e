"""MPI for anybody's torch: import this, then `init_process_group("mpi4py")`.

Importing it initialises MPI and registers the backend; docs/mpi-backend.md says what it can do.
"""

from __future__ import annotations

from paceline.train.collectives.mpi.transport import init_process_group

__all__ = ["init_process_group"]
