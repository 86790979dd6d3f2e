"""The comparison for the terminal; it fits 80 columns."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from paceline.analysis.compare.row import full_name
from paceline.analysis.compare.run import Comparison
from paceline.show.report.columns import (
    UNKNOWN_WIDTH,
    comparison_table,
    mark_sentences,
    table_title,
)
from paceline.show.report.local_global import answer_view
from paceline.show.report.section import (
    WIDE_COLUMNS,
    detail_of,
    spaced,
    terminal_table,
    terminal_view,
)
from paceline.show.report.sections import lossy_section, staleness_section, weak_scaling_views
from paceline.show.report.verdict import verdict_sentence
from paceline.show.report.wording import (
    mark_of,
    not_ranked_reason,
    statement_sentences,
    table_sentences,
)

_LEGEND = "eq.: equivalent to the baseline. Main cost: largest part beside computation."
_HTML = '<pre style="line-height: normal; overflow-x: auto">{code}</pre>'


def comparison_view(
    comparison: Comparison,
    width: int,
    whole: Comparison | None = None,
    *,
    bars: bool = False,
    verdict_last: bool = False,
) -> RenderableType:
    """Return everything that `paceline compare` prints; the console may drop the colours.

    whole: the comparison with all rows, if only some are shown; the verdict is about these.
    bars: draw the speedups where the width allows it. verdict_last: below the tables.
    """
    verdict = _verdict_view(whole or comparison, comparison.workloads, width)
    tables = [
        *(_workload_view(comparison, each, width, bars=bars) for each in comparison.workloads),
        Group(*_footnotes(comparison)),
    ]
    return spaced([*tables, verdict] if verdict_last else [verdict, *tables])


def _verdict_view(comparison: Comparison, workloads: Sequence[str], width: int) -> RenderableType:
    """Return the verdict on each of the workloads, after weak scaling and several nodes."""
    detail = detail_of(width)
    scalings = weak_scaling_views(comparison, workloads, detail)
    found: list[RenderableType] = [terminal_view(each, detail) for each in scalings]
    for workload in workloads:
        answer = answer_view(comparison, workload)
        found += [] if answer is None else [terminal_view(answer, detail)]
        sentence = verdict_sentence(comparison, workload)
        found.append(Text(f"{workload}: {sentence}", style="bold"))
    return spaced(found)


def ranking_view(comparison: Comparison, width: int) -> RenderableType:
    """Return the tables alone, with bars, while the run goes on.

    Without a verdict: looking at it after every trial would find more false differences than the
    5 % that it states.
    """
    return spaced(
        [
            _ranking_table(comparison, workload, width, bars=True)
            for workload in comparison.workloads
        ]
    )


def _workload_view(
    comparison: Comparison, workload: str, width: int, *, bars: bool
) -> RenderableType:
    more = (lossy_section(comparison, workload), staleness_section(comparison, workload))
    blocks: list[RenderableType] = [_ranking_table(comparison, workload, width, bars=bars)]
    blocks += [terminal_view(each, detail_of(width)) for each in more if each is not None]
    return spaced(blocks)


def _ranking_table(
    comparison: Comparison, workload: str, width: int, *, bars: bool
) -> RenderableType:
    detail = detail_of(width)
    title = table_title(comparison, workload)
    table = comparison_table(comparison, workload, detail, title=title)
    return terminal_table(table, detail, width if bars else None)


def comparison_text(comparison: Comparison, width: int = 80) -> str:
    """Return the same as plain text without colours."""
    console = Console(file=io.StringIO(), width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(comparison_view(comparison, width))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def comparison_html(comparison: Comparison) -> str:
    """Return the same as an HTML element with inline styles, for notebooks."""
    console = Console(
        file=io.StringIO(), width=WIDE_COLUMNS, record=True, highlight=False, force_jupyter=False
    )
    console.print(comparison_view(comparison, WIDE_COLUMNS))
    return console.export_html(inline_styles=True, code_format=_HTML)


def _footnotes(comparison: Comparison) -> list[RenderableType]:
    lines = [Text(_LEGEND, style="dim"), *map(Text, table_sentences(comparison))]
    lines += map(Text, mark_sentences(comparison))
    lines += map(Text, statement_sentences(comparison))
    for row in comparison.rows:
        name = full_name(row, comparison.rows)
        if row.is_unchecked_script:
            lines.append(Text(f"{mark_of(row)} {name}: {row.equivalence.equivalence_reason}"))
        elif not row.ranked and not row.failed:
            reason = not_ranked_reason(row)
            lines.append(Text(f"{mark_of(row)} {name} is not ranked: {reason}"))
    if any(
        row.speed.step_s is not None and row.speed.samples_per_s is None for row in comparison.rows
    ):
        lines.append(Text("Without known samples, speedups compare steps per second."))
    if any(
        not row.speed.speedup.is_known for row in comparison.rows if row.speed.speedup is not None
    ):
        unknown = "the interval is not known."
        lines.append(Text(f"{UNKNOWN_WIDTH} {unknown}", style="dim"))
    for trial in comparison.unfinished:
        text = Text(f"✗ {trial.trial_id}: {trial.status}", style="red")
        if trial.message:
            text.append(f": {trial.message.splitlines()[0]}")
        lines.append(text)
    lines += [Text(f"! {flag}", style="yellow") for flag in comparison.flags]
    return list(lines)
