"""The part on sending less: bytes, time, and what it did to the loss; for the terminal and page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from paceline.report.labels import NAME_WIDTH, folded, short_name
from paceline.report.wording import NOT_MEASURED, bounds, number

if TYPE_CHECKING:
    from paceline.analysis.comparison import Comparison
    from paceline.analysis.compression import LessToSend

_BASELINE_MARK = "†"
_COLUMNS = ("MB a\nstep", "of\nall", "s per\nstep", "times as\nfast", "loss", "loss\ndifference")
_NUMBERS_WIDTH = 48
MINUS = "\N{MINUS SIGN}"


def less_to_send(comparison: Comparison) -> list[dict[str, Any]]:
    """For each workload with a way that sends less: its lines, and what they mean."""
    found = []
    for workload in comparison.workloads:
        lines = [part for part in comparison.less_to_send if part.workload == workload]
        if lines:
            found.append(
                {
                    "workload": workload,
                    "lines": [_line(comparison, part) for part in lines],
                    "remarks": remarks(lines),
                }
            )
    return found


def less_to_send_table(comparison: Comparison, workload: str, width: int) -> Table | None:
    """None where nothing was compressed. width: of the terminal."""
    lines = [part for part in comparison.less_to_send if part.workload == workload]
    if not lines:
        return None
    table = Table(
        title="Less to send",
        title_justify="left",
        title_style="bold",
        caption="\n".join(remarks(lines)),
        caption_justify="left",
        caption_style="",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    table.add_column("\nconfiguration")
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for part in lines:
        cells = _line(comparison, part)
        name = str(cells["name"])
        shown = [cells[key] for key in ("sent", "share", "step_s", "speed", "loss", "difference")]
        table.add_row(
            Text(folded(name, max(NAME_WIDTH, width - _NUMBERS_WIDTH))), *map(Text, shown)
        )
    return table


def remarks(lines: list[LessToSend]) -> list[str]:
    """How to read the numbers."""
    first = lines[0]
    found = [
        f"Bytes are rank 0's. Loss: mean of the last {first.last_steps} of {first.steps} steps.",
        "Speed and loss are against the same way with everything sent.",
    ]
    if any(not part.same_way for part in lines):
        found.append(f"{_BASELINE_MARK} against the baseline: the run has no such way.")
    return found


def _line(comparison: Comparison, part: LessToSend) -> dict[str, str]:
    name = short_name(comparison.row(part.configuration), comparison.rows)
    return {
        "configuration": part.configuration,
        "name": name,
        "against": NOT_MEASURED
        if part.against is None
        else short_name(comparison.row(part.against), comparison.rows),
        "sent": number(None if part.sent_bytes is None else part.sent_bytes / 1e6),
        "uncompressed": number(
            None if part.uncompressed_bytes is None else part.uncompressed_bytes / 1e6
        ),
        "share": NOT_MEASURED if part.sent_share is None else f"{100 * part.sent_share:.3g} %",
        "step_s": number(None if part.step_s is None else part.step_s.median),
        "against_step_s": number(
            None if part.against_step_s is None else part.against_step_s.median
        ),
        "speed": NOT_MEASURED
        if part.speed_ratio is None
        else f"{part.speed_ratio.median:.2f}{'' if part.same_way else _BASELINE_MARK}",
        "speed_range": "" if part.speed_ratio is None else bounds(part.speed_ratio),
        "loss": number(part.loss, 4),
        "against_loss": number(part.against_loss, 4),
        "difference": _signed(part.loss_difference),
    }


def _signed(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    sign = MINUS if value < 0 else "+"
    return f"{sign}{number(abs(value), 2)}"
