"""The report: one self-contained HTML page that needs no network and prints well."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files as package_files
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from paceline.analysis.compare import compare_run
from paceline.analysis.host_frames import read_series
from paceline.analysis.labels import short_name
from paceline.records.files import write_text
from paceline.records.phases import ALL_PHASES, OTHER_SPANS
from paceline.report import (
    communication,
    compression,
    evaluation,
    explain,
    figures,
    recommend,
    recovery,
    sections,
    sidecar,
    staleness,
    strategies,
    wording,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.trial_analysis import TrialAnalysis
    from paceline.records.layout import RunFiles
    from paceline.report.figures import Chart

_TEMPLATE = "document.html.j2"
_MOST_TRIALS = 30  # whose traces are drawn
_MOST_TIES = 100  # that are listed


@dataclass(slots=True)
class ChartBook:
    """The figures of the page by name."""

    charts: dict[str, Chart] = field(default_factory=dict)
    titles: dict[str, Chart] = field(default_factory=dict)  # the same charts

    def add(self, chart: Chart, trial: str | None = None) -> str:
        """Keep `chart` and return its name. trial: the only one that it shows."""
        name = f"chart{len(self.charts)}"
        self.charts[name] = chart
        self.titles[chart.title if trial is None else f"{trial}: {chart.title}"] = chart
        return name

    def __getitem__(self, name: str) -> Chart:
        return self.charts[name]

    def scripts(self) -> list[tuple[str, Markup]]:
        """Each chart's name and its JSON, safe within a script element."""
        return [(name, _script_json(chart.json)) for name, chart in self.charts.items()]


def write_report(run: RunFiles, out: Path, comparison: Comparison | None = None) -> None:
    """Write the report on the finished trials of `run` to `out`.

    comparison: of this run, if it was computed already.
    Raises NotComparable if no trial has finished, DataError if a file is damaged. Without a
    finished baseline the page says so and shows no speedup.
    """
    found = compare_run(run, require_baseline=False) if comparison is None else comparison
    write_text(out, render(found))


def render(comparison: Comparison) -> str:
    """Return the whole page as text."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_template),
    )
    environment.filters.update(
        number=wording.number,
        percent=wording.percent,
        mebibytes=wording.mebibytes,
        interval=wording.with_bounds,
    )
    book = ChartBook()
    context = _context(comparison, book)
    return environment.get_template(_TEMPLATE).render(
        **context, book=book, plotly=_script(figures.plotly_js())
    )


def charts(comparison: Comparison) -> dict[str, Chart]:
    """Return all figures of the page by title; those of one trial begin with its id."""
    book = ChartBook()
    _context(comparison, book)
    return book.titles


def _template(name: str) -> str:
    return package_files("paceline.report").joinpath(name).read_text("utf-8")


def _context(comparison: Comparison, book: ChartBook) -> dict[str, Any]:
    manifest = comparison.manifest
    return {
        "comparison": comparison,
        "created": _date(manifest.get("created_unix_s")),
        "manifest": manifest,
        "machine": sections.machine(comparison),
        "workloads": [_workload(comparison, w, book) for w in comparison.workloads],
        "explanations": explain.explanations(comparison, book.add),
        "phases": ALL_PHASES,
        "other_spans": OTHER_SPANS,
        "shades": figures.shades(gaps=_has_gaps(comparison)),
        "node_local": strategies.node_local(comparison, book.add),
        "pipelines": strategies.pipelines(comparison, book.add),
        "local_global": strategies.local_global(comparison, book.add),
        "evaluations": evaluation.evaluations(comparison, book.add),
        "gradient_compression": compression.gradient_compression(comparison),
        "stale_updates": staleness.stale_updates(comparison),
        "communication": communication.communication(comparison, book.add),
        "recovery": recovery.recovery(comparison),
        "resources": _resources(comparison, book),
        "trials": sum(len(found) for found in comparison.trials.values()),
        "equivalence": sections.equivalence_rows(comparison),
        "environments": sections.environment_rows(comparison),
        "commands": sections.commands(comparison),
        "versions": sections.versions(comparison),
        "data": sections.data_rows(manifest),
        "sidecar": sidecar.sidecar_cost(comparison),
        "table_sentences": wording.table_sentences(comparison),
        "unfinished": comparison.unfinished,
        "flags": comparison.flags,
        "short_name": partial(short_name, among=comparison.rows),
        "split_point_words": strategies.split_point_words,
        "place_name": wording.place_name,
        "mark_of": wording.mark_of,
        "cost_label": sections.cost_label,
        "layout_words": partial(sections.layout_words, comparison),
        "not_measured": wording.NOT_MEASURED,
    }


def _workload(comparison: Comparison, workload: str, book: ChartBook) -> Mapping[str, Any]:
    rows = comparison.rows_of(workload)
    has_speedup = any(r.speedup is not None for r in rows)
    verdict = comparison.verdicts[workload]
    return {
        "name": workload,
        "sentence": verdict.sentence,
        "next": recommend.next_sentence(comparison, workload),
        "best": verdict.best,
        "rows": rows,
        "notes": [(short_name(r, comparison.rows), note) for r in rows for note in r.notes],
        "ties": [
            (
                short_name(comparison.row(tie.faster), comparison.rows),
                short_name(comparison.row(tie.slower), comparison.rows),
                tie.ratio,
            )
            for tie in [t for t in comparison.ties if t.workload == workload][:_MOST_TIES]
        ],
        "tie_count": sum(tie.workload == workload for tie in comparison.ties),
        "speedup": book.add(figures.speedup_chart(comparison, workload)) if has_speedup else None,
        "rank_time": book.add(figures.rank_time_chart(comparison, workload)),
        "step_time": book.add(figures.step_time_chart(comparison, workload)),
        "distribution": book.add(figures.step_distribution_chart(comparison, workload)),
        "loss": book.add(figures.loss_chart(comparison, workload)),
    }


def _resources(comparison: Comparison, book: ChartBook) -> list[dict[str, Any]]:
    """Return, for each configuration, the charts of the hosts of each repeat.

    At most _MOST_TRIALS trials are shown, first repeats first, so that the page stays small.
    """
    found = []
    chosen = _shown_trials(comparison)
    for row in comparison.rows:
        trials = comparison.trials.get(row.configuration, ())
        repeats = [_repeat(trial, book) for trial in trials if trial.record.trial.id in chosen]
        sampled = [r for r in repeats if r["hosts"]]
        if sampled:
            name = f"{row.workload}: {short_name(row, comparison.rows)}"
            found.append({"name": name, "row": row, "repeats": sampled})
    return found


def _shown_trials(comparison: Comparison) -> set[str]:
    by_row = [comparison.trials.get(row.configuration, ()) for row in comparison.rows]
    in_order = [trial for same in zip_longest(*by_row) for trial in same if trial is not None]
    return {trial.record.trial.id for trial in in_order[:_MOST_TRIALS]}


def _repeat(trial: TrialAnalysis, book: ChartBook) -> dict[str, Any]:
    hosts = read_series(trial.record.files)
    main = figures.resource_charts(trial.record, hosts)
    more = figures.telemetry_charts(trial, hosts)
    add = partial(book.add, trial=trial.record.trial.id)
    return {
        "repeat": trial.repeat,
        "hosts": [(add(use), add(idle)) for use, idle in main],
        "more": [add(chart) for chart in more],
        "more_words": wording.listed([_in_sentence(chart.title) for chart in more]) if more else "",
    }


def _in_sentence(title: str) -> str:
    """Return the title of a figure for a sentence: without explanation, in lower case."""
    short = title.partition(":")[0].partition(" (")[0]
    return short if short[:2].isupper() else short[0].lower() + short[1:]


def _has_gaps(comparison: Comparison) -> bool:
    return any(t.usage.sidecar_gaps for trials in comparison.trials.values() for t in trials)


def _date(unix_s: float | None) -> str | None:
    if unix_s is None:
        return None
    moment = dt.datetime.fromtimestamp(unix_s, tz=dt.UTC)
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _script_json(text: str) -> Markup:
    """Return JSON for a script element. Without `<`, no text can end the element."""
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704


def _script(text: str) -> Markup:
    """Return trusted JavaScript without the text that would end its element."""
    return Markup(text.replace("</script", "<\\/script"))  # noqa: S704
