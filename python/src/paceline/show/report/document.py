"""The report: one self-contained HTML page that needs no network and prints well."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline.analysis.compare.row import full_name, short_name
from paceline.analysis.compare.run import Comparison
from paceline.analysis.statistics.fastest import TIE_MARGIN
from paceline.analysis.statistics.intervals import CONFIDENCE
from paceline.analysis.trial.host_frames import read_series
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.measure.records.phases import ALL_PHASES
from paceline.show.report import strategies
from paceline.show.report.answers import order_sentences
from paceline.show.report.columns import comparison_table, mark_sentences, table_title
from paceline.show.report.explain import causes_section
from paceline.show.report.figures.charts import Chart, plotly_js, rank_time_chart, step_time_chart
from paceline.show.report.figures.hosts import resource_charts, shades, telemetry_charts
from paceline.show.report.figures.speed import (
    local_global_chart,
    loss_chart,
    metric_chart,
    speedup_chart,
    step_distribution_chart,
    weak_scaling_chart,
)
from paceline.show.report.local_global import QUESTION, local_global_section
from paceline.show.report.profile import communication_section
from paceline.show.report.provenance import (
    commands_section,
    equivalence_section,
    facts_table,
    machine_section,
    ranks_section,
)
from paceline.show.report.section import Card, Detail, Repeat, Section
from paceline.show.report.sections import (
    evaluation_table,
    lossy_section,
    metrics_of,
    of_workloads,
    phase_table,
    recovery_section,
    scalings_by_entry,
    sidecar_sentence,
    staleness_section,
    weak_scaling_section,
    weak_scaling_sentences,
)
from paceline.show.report.verdict import verdict_sentence
from paceline.show.report.wording import (
    NOT_MEASURED,
    arithmetic_words,
    beside_load,
    share,
    table_sentences,
    turns_mark,
    utc,
)

_CONFIDENCE, _ERROR = share(CONFIDENCE), share(1 - CONFIDENCE)
_MEANINGS = {
    "samples/s": "Samples of all steps of a repeat after the warm-up over their total time, so "
    "stalls count. A step lasts from the end of the previous one to its own end on the slowest "
    "rank. The table shows the speed of the repeats that other work did not slow: it can only "
    "slow a repeat, and all repeats together tell how probable that is for each of them. The "
    "first step is timed from the launch command.",
    "Interval": f"It contains the speed with a probability of {_CONFIDENCE}, and both speeds of a "
    "configuration that has two. That of samples/s has the whole spread between repeats. With one "
    "repeat it is not known.",
    "Speedup": "Ratio of samples/s to that of the baseline. What all "
    "configurations share in a repeat cancels in it, such as slow drifts of the machine.",
    "Efficiency": "Speedup over allocated cores, for configurations in the precision of the "
    "baseline.",
    "Undecided": "Neither shown to be slower than the fastest, nor to be a tie with it. All "
    f"configurations are compared with the fastest at once. At most {_ERROR} of runs call a "
    "configuration slower that is not. With one repeat there is no verdict.",
    "Tie": f"Shown to be within the margin of the fastest, {share(TIE_MARGIN)} unless the spec has "
    "another.",
    "Time": "Counted for each rank from the launch command to its exit; the phases add up to the "
    "wall time. Communication is the exposed part, after the rank's last gradient: until the "
    "slowest rank's last gradient it is waiting, then transfer.",
    "CPU, RAM and IOWait": "Those of the whole host, mean over the training, in percent of all its "
    "cores. Threads are those of the run, median over the training. Peak memory covers the whole "
    "trial, as proportional set size (PSS, shared memory counted once) where it was read, else as "
    "resident set size (RSS).",
    "Repeats": "Every repeat is a fresh process. The trials of a repeat run in a seeded random "
    f"order. {NOT_MEASURED} means not measured.",
}
_TARGET = (
    "Training time until the first evaluation that meets the target. A repeat that misses it is "
    "censored: it counts as slower than those that reach it, and the time needs more than half of "
    "the repeats. Configurations are ranked by it, also those that are lossy on purpose."
)


def method_section(comparison: Comparison) -> Section:
    """Explain the figures; the time to a target only where there are evaluations."""
    meanings = dict(_MEANINGS)
    if any(row.result.metrics for row in comparison.rows):
        meanings["Time to target"] = _TARGET
    parts = [Section(title=term, sentences=(text,)) for term, text in meanings.items()]
    return Section(title="Method", anchor="method", parts=parts)


_TEMPLATE = "document.html.j2"
_MOST_TRIALS = 30  # whose traces are drawn


def render(comparison: Comparison) -> str:
    """Return the whole page as text.

    Without a finished baseline the page says so and shows no speedup. Raises DataError if a trace
    is damaged.
    """
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=PackageLoader("paceline.show", "report"),
    )
    created = comparison.manifest.get("created_unix_s")
    context: dict[str, Any] = {
        "comparison": comparison,
        "created": None if created is None else f"{utc(created)} UTC",
        "headlines": list(_headlines(comparison)),
        "sections": page_sections(comparison),
        "page": Detail.PAGE,
        "opened": Detail.WIDE,
        "json": _script_json,
        "plotly": _packed(plotly_js()),
    }
    return environment.get_template(_TEMPLATE).render(context)


def _headlines(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield weak scalings, and workloads with the answer on several nodes and the verdict."""
    for entry, own in scalings_by_entry(comparison).items():
        if words := weak_scaling_sentences(comparison, own):
            names = {point.configuration for each in own for point in each.points}
            load = comparison.load_of(names)
            yield f"{entry}, weak scaling", beside_load(" ".join(words), load)
    for workload in comparison.workloads:
        for found in comparison.local_global:
            if found.workload == workload:
                about = f"{workload}{arithmetic_words(comparison, found)}"
                yield about, " ".join([QUESTION, *order_sentences(comparison, found)])
        yield workload, verdict_sentence(comparison, workload)


def charts(comparison: Comparison) -> dict[str, Chart]:
    """Return all figures of the page by title; those of one trial begin with its id."""
    return dict(found for section in page_sections(comparison) for found in section.figures())


def page_sections(comparison: Comparison) -> list[Section]:
    """Return the sections of the page that have something to show.

    Local strategies on several nodes, weak scaling, speed and causes are open, everything else is
    folded.
    """
    open_ones = [
        local_global_section(comparison, local_global_chart),
        weak_scaling_section(comparison, weak_scaling_chart),
        _speed_section(comparison),
        causes_section(comparison),
    ]
    others = [
        strategies.local_section(comparison),
        strategies.pipelines_section(comparison),
        of_workloads(
            comparison,
            lossy_section,
            title="Lossy training",
            anchor="compression",
            intro=(
                "These configurations compress gradients, average weights every few steps, update "
                "them without a barrier, or normalise with the statistics of each replica. They "
                "are lossy on purpose, therefore not equivalent (~). They are ranked only by the "
                "time to a target. Each is compared with its exact form: bytes, time and loss."
            ),
        ),
        of_workloads(
            comparison, staleness_section, title="Staleness of updates", anchor="staleness"
        ),
        _time_section(comparison),
        communication_section(comparison),
        recovery_section(comparison),
        _resources_section(comparison),
        of_workloads(
            comparison,
            _evaluation_section,
            title="Evaluation",
            anchor="evaluation",
            intro=(
                "On held-out samples, which are never trained on and are the same for every "
                "configuration. Training time is that of all steps from the first one on, warm-up "
                "steps included, without the evaluations."
            ),
        ),
        _loss_section(comparison),
        equivalence_section(comparison),
        ranks_section(comparison),
        commands_section(comparison),
        machine_section(comparison),
        method_section(comparison),
    ]
    folded = [replace(section, folded=True) for section in others if section is not None]
    found = [*(section for section in open_ones if section is not None), *folded]
    if comparison.dilation == 1:
        return found
    mark = turns_mark(comparison.dilation)
    return [section.marked(mark) for section in found]


def _speed_section(comparison: Comparison) -> Section:
    meaning = (
        "Speedup over the baseline with the 95 % confidence interval. The main cost is the "
        "largest part of a step beside computation."
    )
    return Section(
        title="Speedup",
        anchor="speed",
        intro=" ".join([meaning, *mark_sentences(comparison), *table_sentences(comparison)]),
        parts=[_speed_part(comparison, workload) for workload in comparison.workloads],
    )


def _speed_part(comparison: Comparison, workload: str) -> Section:
    rows = comparison.rows_of(workload)
    shown = []
    if any(row.speed.speedup is not None for row in rows):
        shown.append(speedup_chart(comparison, workload))
    notes = [f"{short_name(row, comparison.rows)}: {note}" for row in rows for note in row.notes]
    return Section(
        title=f"{workload}: global batch {rows[0].training.global_batch}",
        charts=shown,
        table=comparison_table(
            comparison, workload, Detail.PAGE, title=table_title(comparison, workload)
        ),
        parts=[Section(notes=notes)],
    )


def _time_section(comparison: Comparison) -> Section:
    parts = [
        Section(
            charts=(
                step_distribution_chart(comparison, workload),
                rank_time_chart(comparison, workload),
                step_time_chart(comparison, workload),
            ),
            parts=(
                Section(
                    title=f"The numbers for {workload}, in seconds (mean over ranks, median over "
                    "repeats)",
                    folded=True,
                    table=phase_table(comparison, workload),
                ),
            ),
        )
        for workload in comparison.workloads
    ]
    meanings = facts_table([(phase.label, phase.meaning) for phase in ALL_PHASES])
    parts.append(Section(title="What the phases are", folded=True, table=meanings))
    return Section(title="Time", anchor="time", parts=parts)


def _evaluation_section(comparison: Comparison, workload: str) -> Section | None:
    table = evaluation_table(comparison, workload)
    if table is None:
        return None
    target = table.items[0].goal.target
    return Section(
        title=workload if target is None else f"{workload}, target: {target}",
        charts=[metric_chart(comparison, workload, name) for name in metrics_of(table.items)],
        table=table,
    )


def _loss_section(comparison: Comparison) -> Section:
    drawn = [loss_chart(comparison, workload) for workload in comparison.workloads]
    return Section(title="Loss", anchor="loss", charts=drawn)


def _resources_section(comparison: Comparison) -> Section:
    """Show the hosts of each repeat of each configuration over time.

    At most _MOST_TRIALS trials are shown, first repeats first, so that the page stays small.
    """
    title, anchor = "Resources over time", "resources"
    cards = list(_cards(comparison))
    if not cards:
        return Section(title=title, anchor=anchor, sentences=("This run has no traces.",))
    intro = (
        "Sampled by one sidecar per host. Shades show the spans of the ranks. Left: CPU, RAM "
        "and threads. Right: CPU idle and IOWait. All times are on rank 0's clock."
    )
    trials = [trial for found in comparison.trials.values() for trial in found]
    if len(trials) > _MOST_TRIALS:
        intro += (
            f" Shown: {_MOST_TRIALS} of {len(trials)} trials; the traces of all are in "
            "trials/*/hosts/."
        )
    cost = sidecar_sentence(comparison)
    return Section(
        title=title,
        anchor=anchor,
        intro=intro,
        legend=shades(gaps=any(trial.sidecar.gaps for trial in trials)),
        cards=cards,
        parts=() if cost is None else (Section(title="Cost of the sidecar", sentences=(cost,)),),
    )


def _cards(comparison: Comparison) -> Iterator[Card]:
    chosen = _shown_trials(comparison)
    for row in comparison.rows:
        trials = comparison.trials.get(row.configuration, ())
        repeats = [_repeat(trial) for trial in trials if trial.record.trial.id in chosen]
        sampled = [repeat for repeat in repeats if repeat.pairs]
        if sampled:
            name = full_name(row, comparison.rows)
            yield Card(name=name, repeats=sampled)


def _shown_trials(comparison: Comparison) -> set[str]:
    by_row = [comparison.trials.get(row.configuration, ()) for row in comparison.rows]
    in_order = [trial for same in zip_longest(*by_row) for trial in same if trial is not None]
    return {trial.record.trial.id for trial in in_order[:_MOST_TRIALS]}


def _repeat(trial: TrialAnalysis) -> Repeat:
    record = trial.record.trial
    hosts = read_series(trial.record.files)
    return Repeat(
        name=f"{record.planned_repeat}{' again' if record.is_again else ''}",
        trial=trial.record.trial.id,
        pairs=resource_charts(trial.record, hosts),
        more=telemetry_charts(trial, hosts),
    )


def _script_json(text: str) -> Markup:
    """Return JSON for a script element. Without `<`, no text can end the element."""
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704


@cache
def _packed(text: str) -> str:
    """Return text for a script element, compressed with gzip and in Base64.

    Plotly.js is five megabytes, which browsers unpack in a tenth of a second.
    """
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()
