"""The speedups that the first paper measured, to print beside ours.

Lerat, Mahmoudi, Mahmoudi: Distributed Deep Learning, From Single-Node to Multi-Node Architecture,
preprint, January 2022, tables 1 to 3. Its machines and batch sizes are not ours, its model and
hybrid parallelism ran on GPUs, and its distributed runs had several nodes: its numbers give
orientation, not a target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.analysis.row import Row

SOURCE = (
    "Lerat, Mahmoudi, Mahmoudi: Distributed Deep Learning, From Single-Node to Multi-Node "
    "Architecture (2022), tables 1 to 3"
)
USE_CASES = ("complex-small", "simple-big")
TABLES = {
    1: "data parallelism on one node",
    2: "model and hybrid parallelism on one node (the paper's on GPUs)",
    3: "distributed",
}


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
GPU_DATA = _row("GPU, data parallel", 1, 1.57, 1.25)
GPU_MODEL = _row("GPU, model parallel", 2, 6.74, 8.01)
GPU_DATA_AND_MODEL = _row("GPU, data and model", 2, 2.84, 3.85)
MPI_CPU = _row("MPI, CPU", 3, 12.11, 26.62)
MPI_GPU = _row("MPI, GPU", 3, 4.13, 11.79)
SPARK_CPU = _row("Spark, CPU", 3, 1.14, 0.53)

PAPER_ROWS = (
    CPU_ONE_PROCESS,
    CPU_MANY_PROCESSES,
    GPU_DATA,
    GPU_MODEL,
    GPU_DATA_AND_MODEL,
    MPI_CPU,
    MPI_GPU,
    SPARK_CPU,
)

# by strategy and device; the paper has model parallelism on GPUs only: ours on cores stands there
_ON_ONE_NODE = {
    ("threads", "cpu"): CPU_ONE_PROCESS,
    ("processes", "cpu"): CPU_MANY_PROCESSES,
    ("threads", "cuda"): GPU_DATA,
    ("processes", "cuda"): GPU_DATA,
    ("pipeline", "cpu"): GPU_MODEL,
    ("pipeline", "cuda"): GPU_MODEL,
    ("hybrid", "cpu"): GPU_DATA_AND_MODEL,
    ("hybrid", "cuda"): GPU_DATA_AND_MODEL,
}
# the paper distributed its best local strategy, many processes
_DISTRIBUTED = {("mpi", "cpu"): MPI_CPU, ("mpi", "cuda"): MPI_GPU, ("spark", "cpu"): SPARK_CPU}


def paper_row(row: Row) -> PaperRow | None:
    """The paper's line that a configuration of ours corresponds to; None where there is none.

    The paper's single process has threads of its own that share a batch out: our `threads`. Our
    `intraop`, the framework's own threads, has no line there.
    """
    if row.launcher in ("local", "torchrun"):
        return _ON_ONE_NODE.get((row.local_strategy, row.device)) if row.nodes == 1 else None
    if row.local_strategy == "processes":
        return _DISTRIBUTED.get((row.launcher, row.device))
    return None


def paper_speedup(row: Row) -> float | None:
    """The paper's speedup for what a configuration of ours corresponds to."""
    found = paper_row(row)
    return None if found is None else found.speedups.get(row.workload)
