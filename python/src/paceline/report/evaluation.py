"""The report's section on evaluations as plain values for the template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.report.figures import metric_chart

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.analysis.comparison import Comparison
    from paceline.report.figures import Chart


def evaluations(comparison: Comparison, add: Callable[[Chart], str]) -> list[dict[str, Any]]:
    """Return figures and rows of each workload with evaluations, the ranked rows first."""
    found = []
    for workload in comparison.workloads:
        rows = [row for row in comparison.rows_of(workload) if row.metrics]
        if not rows:
            continue
        metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
        found.append(
            {
                "workload": workload,
                "target": rows[0].target,
                "metrics": metrics,
                "rows": rows,
                "charts": [add(metric_chart(comparison, workload, name)) for name in metrics],
            }
        )
    return found
