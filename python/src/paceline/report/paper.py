"""The speedups that the first paper measured, to print beside ours.

Lerat, Mahmoudi, Mahmoudi: Distributed Deep Learning, From Single-Node to Multi-Node Architecture,
preprint, January 2022, tables 1 to 3. Its machines and batch sizes are not ours, and its
distributed runs had several nodes: its numbers give orientation, not a target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.analysis.comparison import Row

SOURCE = (
    "Lerat, Mahmoudi, Mahmoudi: Distributed Deep Learning, From Single-Node to Multi-Node "
    "Architecture (2022), tables 1 to 3"
)
USE_CASES = ("complex-small", "simple-big")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """One technology of the paper: speedup over sequential by use case, None where not run."""

    technology: str
    table: int
    speedups: dict[str, float | None]


def _row(technology: str, table: int, small: float | None, big: float | None) -> PaperRow:
    speedups = dict(zip(USE_CASES, (small, big), strict=True))
    return PaperRow(technology=technology, table=table, speedups=speedups)


CPU_ONE_PROCESS = _row("CPU, one process", 1, 4, 6.15)
CPU_MANY_PROCESSES = _row("CPU, many processes", 1, 5.76, 15.57)
MPI_CPU = _row("MPI, CPU", 3, 12.11, 26.62)
SPARK_CPU = _row("Spark, CPU", 3, 1.14, 0.53)

PAPER_ROWS = (
    CPU_ONE_PROCESS,
    CPU_MANY_PROCESSES,
    _row("GPU, data parallel", 1, 1.57, 1.25),
    _row("GPU, model parallel", 2, 6.74, 8.01),
    _row("GPU, data and model", 2, 2.84, 3.85),
    MPI_CPU,
    _row("MPI, GPU", 3, 4.13, 11.79),
    SPARK_CPU,
)


def paper_row(row: Row) -> PaperRow | None:
    """The paper's line that a configuration of ours corresponds to; None where there is none."""
    if row.local_strategy == "intraop" and row.ranks == 1 and row.launcher == "local":
        return CPU_ONE_PROCESS
    if row.local_strategy == "processes":
        by_launcher = {"torchrun": CPU_MANY_PROCESSES, "mpi": MPI_CPU, "spark": SPARK_CPU}
        return by_launcher.get(row.launcher)
    return None


def paper_speedup(row: Row) -> float | None:
    """The paper's speedup for what a configuration of ours corresponds to."""
    found = paper_row(row)
    return None if found is None else found.speedups.get(row.workload)
