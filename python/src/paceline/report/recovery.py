"""The report's section on failures that the trials survived, as plain values for the template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.analysis.labels import short_name
from paceline.analysis.recovery import failure_costs

if TYPE_CHECKING:
    from paceline.analysis.comparison import Comparison

UNKNOWN = "not caused by the run"


def recovery(comparison: Comparison) -> dict[str, Any] | None:
    """Return a row for each configuration and kind of failure.

    None if no trial survived one.
    """
    costs = failure_costs(comparison)
    if not costs:
        return None
    return {
        "rows": [
            {
                "name": _name(comparison, cost.configuration),
                "kind": cost.kind or UNKNOWN,
                "cost": cost,
                "downtime_s": cost.downtime_s,
            }
            for cost in costs
        ],
    }


def _name(comparison: Comparison, configuration: str) -> str:
    return short_name(comparison.row(configuration), comparison.rows)
