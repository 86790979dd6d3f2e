"""The comparison for the terminal; it fits 80 columns."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.text import Text

from paceline.analysis.compare.result import Comparison
from paceline.analysis.compare.row import short_name
from paceline.report.columns import UNKNOWN_WIDTH, comparison_table, mark_sentences
from paceline.report.section import (
    WIDE_COLUMNS,
    detail_of,
    spaced,
    terminal_table,
    terminal_view,
)
from paceline.report.sections import lossy_section, staleness_section
from paceline.report.verdict import verdict_sentence
from paceline.report.wording import DASH, mark_of, not_ranked_reason, table_sentences

_LEGEND = "eq.: equivalent to the baseline. Main cost: largest part beside computation."
_HTML = '<pre style="line-height: normal; overflow-x: auto">{code}</pre>'


def comparison_view(
    comparison: Comparison, width: int, whole: Comparison | None = None
) -> RenderableType:
    """Return everything that `paceline compare` prints; the console may drop the colours.

    whole: the comparison with all rows, if only some are shown; the verdict is about these.
    """
    judged = whole or comparison
    detail = detail_of(width)
    blocks: list[RenderableType] = []
    for workload in comparison.workloads:
        sentence = f"{workload}: {verdict_sentence(judged, workload)}"
        blocks.append(Text(sentence, style="bold"))
        title = _title(comparison, workload)
        table = comparison_table(comparison, workload, detail, title=title)
        blocks.append(terminal_table(table, detail))
        more = (lossy_section(comparison, workload), staleness_section(comparison, workload))
        blocks += [terminal_view(each, detail) for each in more if each is not None]
    return spaced([*blocks, Group(*_footnotes(comparison))])


def comparison_text(comparison: Comparison, width: int = 80) -> str:
    """Return the same as plain text without colours."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(comparison_view(comparison, width))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def comparison_html(comparison: Comparison, width: int = WIDE_COLUMNS) -> str:
    """Return the same as an HTML element with inline styles, for notebooks."""
    console = Console(
        file=io.StringIO(), width=width, record=True, highlight=False, force_jupyter=False
    )
    console.print(comparison_view(comparison, width))
    return console.export_html(inline_styles=True, code_format=_HTML)


def _title(comparison: Comparison, workload: str) -> str:
    rows = comparison.rows_of(workload)
    repeats = {row.repeats for row in rows if row.repeats} or {0}
    counted = DASH.join(str(n) for n in sorted({min(repeats), max(repeats)}))
    word = "repeat" if counted == "1" else "repeats"
    batches = {row.global_batch for row in rows if row.global_batch is not None}
    batch = f", global batch {batches.pop()}" if len(batches) == 1 else ""
    return f"{workload}{batch}, {counted} {word}"


def _footnotes(comparison: Comparison) -> list[RenderableType]:
    lines = [Text(_LEGEND, style="dim"), *map(Text, table_sentences(comparison))]
    lines += map(Text, mark_sentences(comparison))
    for row in comparison.rows:
        name = f"{row.workload}: {short_name(row, comparison.rows)}"
        if row.is_unchecked_script:
            lines.append(Text(f"{mark_of(row)} {name}: {row.equivalence_reason}"))
        elif not row.ranked and not row.failed:
            reason = not_ranked_reason(row)
            lines.append(Text(f"{mark_of(row)} {name} is not ranked: {reason}"))
    if any(row.step_s is not None and row.samples_per_s is None for row in comparison.rows):
        lines.append(Text("Without known samples, speedups compare steps per second."))
    if any(not row.speedup.is_known for row in comparison.rows if row.speedup is not None):
        unknown = "the interval is not known, or spans more than a factor of two."
        lines.append(Text(f"{UNKNOWN_WIDTH} {unknown}", style="dim"))
    for trial in comparison.unfinished:
        text = Text(f"✗ {trial.trial_id}: {trial.status}", style="red")
        if trial.message:
            text.append(f": {trial.message.splitlines()[0]}")
        lines.append(text)
    lines += [Text(f"! {flag}", style="yellow") for flag in comparison.flags]
    return list(lines)
