"""Staleness of recorded updates, for the terminal and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.analysis.labels import short_name
from paceline.report.lines_table import lines_table
from paceline.report.wording import NOT_MEASURED, number

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.row import Row

_COLUMNS = {
    "updates": "updates", "mean": "mean", "p95": "95 %", "max": "max", "lead": "lead,\nsteps",
}  # fmt: skip
_NUMBERS_WIDTH = 40
_MEANING = (
    "Staleness: updates of the same weights between their fetch and the update. Lead: over the "
    "slowest worker."
)
_CAUTION = (
    "Without a barrier the order of updates differs from run to run (except in a pipeline): these "
    "trainings are not deterministic and not equivalent."
)


def stale_updates(comparison: Comparison) -> list[dict[str, Any]]:
    """Return, for each workload with such configurations, its lines and remarks."""
    found = []
    for workload in comparison.workloads:
        rows = _rows(comparison, workload)
        if rows:
            lines = [_line(comparison, row) for row in rows]
            found.append({"workload": workload, "lines": lines, "remarks": _remarks(rows)})
    return found


def staleness_table(comparison: Comparison, workload: str, width: int) -> Table | None:
    """Return the table for the terminal; None if no update was recorded."""
    rows = _rows(comparison, workload)
    if not rows:
        return None
    lines = [_line(comparison, row) for row in rows]
    return lines_table(
        "Staleness of updates", _remarks(rows), _COLUMNS, lines, width - _NUMBERS_WIDTH
    )


def _remarks(rows: list[Row]) -> list[str]:
    """Explain the numbers; a synchronous parameter server alone needs no caution."""
    return [_MEANING, *([_CAUTION] if any(row.is_lossy for row in rows) else [])]


def _rows(comparison: Comparison, workload: str) -> list[Row]:
    return [row for row in comparison.rows_of(workload) if row.staleness is not None]


def _line(comparison: Comparison, row: Row) -> dict[str, str]:
    found = row.staleness
    assert found is not None, "only rows with updates are shown"
    return {
        "configuration": row.configuration,
        "name": short_name(row, comparison.rows),
        "updates": str(found.updates),
        "mean": number(found.mean),
        "p95": number(found.p95),
        "max": str(found.max),
        "lead": NOT_MEASURED if found.lead_steps_max is None else str(found.lead_steps_max),
    }
