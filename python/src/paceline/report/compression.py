"""Gradient compression and local updates: bytes, time and loss, for the terminal and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.analysis.labels import short_name
from paceline.report.lines_table import lines_table
from paceline.report.wording import NOT_MEASURED, bounds, megabytes, number

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.compression import CompressionEffect

_BASELINE_MARK = "†"
_COLUMNS = {
    "sent": "MB a\nstep", "share": "of\nall", "step_s": "s per\nstep", "speed": "speed\nup",
    "loss": "loss", "difference": "loss\ndifference",
}  # fmt: skip
_NUMBERS_WIDTH = 48
MINUS = "\N{MINUS SIGN}"


def gradient_compression(comparison: Comparison) -> list[dict[str, Any]]:
    """Return, for each workload with lossy configurations, its lines and remarks."""
    found = []
    for workload in comparison.workloads:
        lines = [part for part in comparison.compression if part.workload == workload]
        if lines:
            found.append(
                {
                    "workload": workload,
                    "lines": [_line(comparison, part) for part in lines],
                    "remarks": remarks(lines),
                }
            )
    return found


def compression_table(comparison: Comparison, workload: str, width: int) -> Table | None:
    """Return the table for the terminal; None without lossy configurations."""
    lines = [part for part in comparison.compression if part.workload == workload]
    if not lines:
        return None
    return lines_table(
        "Lossy training",
        remarks(lines),
        _COLUMNS,
        [_line(comparison, part) for part in lines],
        width - _NUMBERS_WIDTH,
    )


def remarks(lines: list[CompressionEffect]) -> list[str]:
    """Explain the numbers."""
    first = lines[0]
    found = [
        f"Bytes are rank 0's. Loss: mean of the last {first.last_steps} of {first.steps} steps.",
        "Speedup and loss difference are relative to the exact form of the configuration.",
    ]
    if any(not part.reference_is_exact_form for part in lines):
        found.append(f"{_BASELINE_MARK} relative to the baseline: the run has no exact form of it.")
    return found


def _line(comparison: Comparison, part: CompressionEffect) -> dict[str, str]:
    name = short_name(comparison.row(part.configuration), comparison.rows)
    return {
        "configuration": part.configuration,
        "name": name,
        "against": NOT_MEASURED
        if part.reference is None
        else short_name(comparison.row(part.reference), comparison.rows),
        "sent": megabytes(part.sent_bytes_per_step),
        "uncompressed": megabytes(part.uncompressed_bytes_per_step),
        "share": NOT_MEASURED if part.sent_share is None else f"{100 * part.sent_share:.3g} %",
        "step_s": number(part.step_s),
        "against_step_s": number(part.reference_step_s),
        "speed": NOT_MEASURED
        if part.speedup is None
        else f"{part.speedup.median:.2f}{'' if part.reference_is_exact_form else _BASELINE_MARK}",
        "speed_range": "" if part.speedup is None else bounds(part.speedup),
        "loss": number(part.loss, 4),
        "against_loss": number(part.reference_loss, 4),
        "difference": _signed(part.loss_difference),
    }


def _signed(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    sign = MINUS if value < 0 else "+"
    return f"{sign}{number(abs(value), 2)}"
