"""The speedups that the first paper measured, for comparison with ours.

Lerat, Mahmoudi, Mahmoudi: Distributed Deep Learning, From Single-Node to Multi-Node Architecture,
preprint, January 2022, tables 1 to 3. Its machines and batch sizes are not ours, its model and
hybrid parallelism ran on GPUs, and its distributed runs had several nodes: its numbers give
orientation, not a target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.spec.extensions import LAUNCHERS, STRATEGIES

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


PAPER_ROWS = (
    _row("CPU, one process", 1, 4, 6.15),
    _row("CPU, many processes", 1, 5.76, 15.57),
    _row("GPU, data parallel", 1, 1.57, 1.25),
    _row("GPU, model parallel", 2, 6.74, 8.01),
    _row("GPU, data and model", 2, 2.84, 3.85),
    _row("MPI, CPU", 3, 12.11, 26.62),
    _row("MPI, GPU", 3, 4.13, 11.79),
    _row("Spark, CPU", 3, 1.14, 0.53),
)

_BY_TECHNOLOGY = {row.technology: row for row in PAPER_ROWS}


def paper_row(row: Row) -> PaperRow | None:
    """Return the paper's row that a configuration corresponds to; None where there is none.

    The descriptors name the rows. On one node without a launcher that spans nodes it is the local
    strategy's; the paper distributed its best local strategy only, many processes.
    """
    if row.local_strategy not in STRATEGIES or row.launcher not in LAUNCHERS:
        return None
    strategy, launcher = STRATEGIES.get(row.local_strategy), LAUNCHERS.get(row.launcher)
    if launcher.spans_nodes:
        names = launcher.paper_rows if strategy.distributed_in_paper else {}
    else:
        names = strategy.paper_rows if row.nodes == 1 else {}
    technology = names.get(row.device)
    return None if technology is None else _BY_TECHNOLOGY[technology]


def paper_speedup(row: Row) -> float | None:
    """Return the paper's speedup for the corresponding configuration."""
    found = paper_row(row)
    return None if found is None else found.speedups.get(row.workload)
