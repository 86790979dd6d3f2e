"""The report's section on failures that the trials survived, as plain values for the template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.analysis.failure_rates import failure_costs, overtakings
from paceline.analysis.labels import short_name
from paceline.report.wording import number

if TYPE_CHECKING:
    from paceline.analysis.comparison import Comparison
    from paceline.analysis.failure_rates import Overtaking

UNKNOWN = "not caused by the run"
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


def recovery(comparison: Comparison) -> dict[str, Any] | None:
    """Return a row for each configuration and kind of failure, and sentences on failure rates.

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
        "sentences": [_sentence(comparison, each) for each in overtakings(costs)],
    }


def _name(comparison: Comparison, configuration: str) -> str:
    return short_name(comparison.row(configuration), comparison.rows)


def _sentence(comparison: Comparison, overtaking: Overtaking) -> str:
    failures = "failures" if overtaking.kind is None else f"failures of kind {overtaking.kind}"
    return (
        f"{_name(comparison, overtaking.rare)} is expected to be faster while {failures} are rarer "
        f"than one in {duration(overtaking.mtbf_s)}; {_name(comparison, overtaking.frequent)} is "
        "faster where they are more frequent."
    )


def duration(seconds: float) -> str:
    """Return a duration in words, in the largest unit of which there are two."""
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{number(seconds / size)} {unit}"
    return f"{number(seconds)} seconds"
