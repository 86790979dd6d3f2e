"""Find out which rank this process is, from the variables of the launcher that started it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.base.errors import EnvironmentLacks

# rank, number of ranks, number of ranks on this host
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),  # torchrun, and scripts in its style
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedRank:
    """A rank among the ranks of a command."""

    launcher: str
    rank: int
    ranks: int


def own_place(environment: Mapping[str, str] = os.environ) -> AttachedRank:
    """Return the place of this process; rank 0 of 1 if no launcher has given it one.

    Raises EnvironmentLacks if the ranks are on several hosts.
    """
    for rank, ranks, local_ranks in _VARIABLES:
        if rank not in environment or ranks not in environment:
            continue
        count, here = int(environment[ranks]), int(environment.get(local_ranks, environment[ranks]))
        if here != count:
            raise EnvironmentLacks(
                f"expected all ranks on this host, found {here} of {count}; use `paceline run` "
                "for several hosts"
            )
        return AttachedRank(
            launcher=_launcher(environment), rank=int(environment[rank]), ranks=count
        )
    return AttachedRank(launcher="local", rank=0, ranks=1)


def _launcher(environment: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    is_mpi = "OMPI_COMM_WORLD_SIZE" in environment or "PMI_SIZE" in environment
    return "mpi" if is_mpi else "local"
