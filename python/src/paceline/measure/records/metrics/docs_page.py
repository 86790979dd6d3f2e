"""Tables of all metrics for docs/reference/metrics.md.

`python -m paceline.measure.records.metrics.docs_page FILE` replaces the tables in FILE.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.measure.records.metrics import METRICS, Metric, Scope

BEGIN = (
    "<!-- tables: python -m paceline.measure.records.metrics.docs_page "
    "docs/reference/metrics.md -->\n"
)
END = "<!-- end of tables -->"


def tables(metrics: Iterable[Metric] = METRICS) -> str:
    """Return one table for each scope; every metric is in one of them."""
    metrics = tuple(metrics)
    scopes = dict.fromkeys(metric.scope for metric in metrics)
    return "".join(
        f"{line}\n"
        for scope in scopes
        for line in _table(scope, [metric for metric in metrics if metric.scope is scope])
    )


def with_tables(page: str) -> str:
    """Return the text of the page with new tables. Raises ValueError without the two markers."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"expected the lines {BEGIN!r} and {END!r}")
    return before + BEGIN + tables() + END + after


def _table(scope: Scope, metrics: Iterable[Metric]) -> Iterator[str]:
    yield f"### {scope.title}"
    yield ""
    yield f"Labels of all: {_names(scope.labels)}. File: `{scope.file}`."
    yield ""
    yield "| metric | type | unit | more labels | column | meaning |"
    yield "|---|---|---|---|---|---|"
    for metric in metrics:
        name = metric.full_name if metric.kind == "histogram" else metric.series[0]
        more = _names((*metric.labels, *metric.info_labels))
        column = f"`{'.'.join(metric.path)}`" if metric.in_trace else ""
        meaning = metric.help.replace("|", "\\|")
        if metric.every_s:
            meaning += f" Read every {metric.every_s:g} s at most."
        yield f"| `{name}` | {metric.kind} | {metric.unit} | {more} | {column} | {meaning} |"
    yield ""


def _names(labels: Iterable[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


def main(argv: list[str]) -> int:
    """Replace the tables in the file that `argv` names."""
    path = Path(argv[0])
    path.write_text(with_tables(path.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
