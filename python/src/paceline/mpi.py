"""MPI back end for any torch program: import this, then call `init_process_group("mpi4py")`.

`collectives.mpi.start` has the implementation, docs/reference/back-ends.md the features.
"""

from paceline.collectives.mpi.start import Options

__all__ = ["Options"]
