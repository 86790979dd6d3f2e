"""`paceline compare`: the table of a run, or two runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from paceline.analysis.between_runs.gate import Gate, judge
from paceline.analysis.between_runs.speeds import (
    RunSpeeds,
    read_reference,
    read_speeds,
    write_reference,
)
from paceline.analysis.between_runs.two_runs import compare_runs, run_differences
from paceline.analysis.compare.row import Row
from paceline.analysis.compare.run import Comparison
from paceline.base.errors import ExitCode, NotComparable
from paceline.cli.console import markdown, plain_console, print_json
from paceline.cli.options import (
    FILE,
    baseline_option,
    compared_run_argument,
    existing_run,
    json_option,
    list_option,
    percentage,
)
from paceline.measure.records.files import fields_of, write_text
from paceline.measure.records.layout import RunFiles
from paceline.plan.trials.planning import matching, no_match
from paceline.show.export.run_data import RunData
from paceline.show.report.runs import (
    configuration_names,
    gate_sentences,
    junit_text,
    loaded_runs,
    runs_view,
)
from paceline.show.report.table import comparison_view
from paceline.show.report.verdict import comparison_document

_MARKDOWN_WIDTH = 200  # columns, so that all figures are shown


def _ascending(value: float | None) -> float:
    return math.inf if value is None else value


# What `--sort` can name: its key, the best row first, rows without a value last.
_SORT_KEYS: dict[str, Callable[[Row], float | str]] = {
    "samples": lambda row: (
        math.inf if row.speed.samples_per_s is None else -row.speed.samples_per_s.estimate
    ),
    "efficiency": lambda row: (
        math.inf if row.speed.efficiency is None else -row.speed.efficiency.estimate
    ),
    "step": lambda row: math.inf if row.speed.step_s is None else row.speed.step_s.estimate,
    "first-step": lambda row: _ascending(row.times.time_to_first_step_s),
    "cpu": lambda row: _ascending(row.usage.cpu_percent),
    "memory": lambda row: _ascending(row.usage.memory_peak_bytes),
    "strategy": lambda row: row.setup.local_strategy,
    "launcher": lambda row: row.setup.launcher,
    "transport": lambda row: row.setup.transport,
}


@click.command("compare")
@compared_run_argument
@click.argument("second", metavar="[RUN_B]", type=existing_run, required=False)
@baseline_option
@list_option(
    "--only", "PATTERN,…", "Show only the configurations whose names match these shell patterns."
)
@click.option(
    "--sort",
    metavar="COLUMN",
    type=click.Choice(list(_SORT_KEYS)),
    help=f"Sort the rows of each workload by this column: {', '.join(_SORT_KEYS)}; default: by "
    "speed.",
)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option(
    "--fail-slower",
    "limit",
    metavar="PERCENT",
    type=percentage,
    help="Two runs: end with exit code 8 if a configuration of the later run is slower by more "
    "than this (for example 3%), 9 if it is not equivalent, and 7 if it cannot be judged or so "
    "large a slowdown could not have been seen.",
)
@click.option(
    "--allow-undecided",
    is_flag=True,
    help="With --fail-slower: pass what could not have been seen.",
)
@click.option("--junit", metavar="FILE", type=FILE, help="With --fail-slower: write a JUnit file.")
@click.option(
    "--reference",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Compare the run with this file instead of with an earlier run.",
)
@click.option("--save-reference", metavar="FILE", type=FILE, help="Write the file for --reference.")
@json_option
def command(
    run_dir: Path,
    second: Path | None,
    baseline: str | None,
    only: tuple[str, ...],
    sort: str | None,
    as_markdown: bool,
    limit: float | None,
    allow_undecided: bool,
    junit: Path | None,
    reference: Path | None,
    save_reference: Path | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Print the table of a run, or compare two runs.

    RUN_DIR is the newest run in runs/ with trials to compare by default. RUN_B is a later run: the
    output says what differs, and which configurations became faster.
    """
    is_pair = second is not None or reference is not None
    if is_pair and (baseline is not None or only or sort or save_reference is not None):
        raise click.UsageError(
            "--baseline, --only, --sort, --save-reference: expected one run, got two; leave them "
            "out to compare two runs"
        )
    if second is not None and reference is not None:
        raise click.UsageError("--reference: expected one run beside it, got two; leave one out")
    if limit is not None and not is_pair:
        raise click.UsageError(
            "--fail-slower: expected two runs, or one run and --reference FILE, got one run"
        )
    if limit is None and (junit is not None or allow_undecided):
        name = "--allow-undecided" if allow_undecided else "--junit"
        raise click.UsageError(f"{name}: expected --fail-slower beside it, found none; add it")
    if is_pair:
        before = read_reference(reference) if reference is not None else _speeds(run_dir)
        after = _speeds(second or run_dir)
        labels = str(reference or run_dir), str(second or run_dir)
        gate = (
            None if limit is None else judge(before, after, limit, allows_undecided=allow_undecided)
        )
        _print_pair(before, after, labels, gate, as_json=as_json, as_markdown=as_markdown)
        if gate is not None and junit is not None:
            write_text(junit, junit_text(gate, _names(before, after)))
        return ExitCode.OK if gate is None else gate.exit_code
    run = RunData(run_dir, baseline)
    shown = _sorted(_selected(run.comparison, only), sort)
    if as_json:
        rows = [row.to_json() for row in shown.rows]
        print_json({**comparison_document(run.comparison), "rows": rows})
    elif as_markdown:
        print(markdown(comparison_view(shown, _MARKDOWN_WIDTH, run.comparison)))
    else:
        print_table(shown, run.comparison)
    if save_reference is not None:
        write_reference(save_reference, read_speeds(run.files))
    if not run.comparison.baselines:
        raise NotComparable(_no_baseline(run.files))
    return ExitCode.OK


def print_table(
    comparison: Comparison, whole: Comparison | None = None, *, verdict_last: bool = False
) -> None:
    """Print verdicts and tables, on a terminal with bars.

    whole: the comparison with all rows, if only some are shown. verdict_last: below the tables.
    """
    console = plain_console()
    view = comparison_view(
        comparison, console.width, whole, bars=console.is_terminal, verdict_last=verdict_last
    )
    console.print(view)


def _selected(comparison: Comparison, patterns: Sequence[str]) -> Comparison:
    """Keep the rows that match a pattern. Raises UsageError if a pattern matches none."""
    if not patterns:
        return comparison
    names = [row.configuration for row in comparison.rows]
    found = {pattern: matching(names, pattern) for pattern in patterns}
    if unmatched := [pattern for pattern in patterns if not found[pattern]]:
        raise no_match("--only", unmatched, names)
    wanted = {name for matched in found.values() for name in matched}
    rows = tuple(row for row in comparison.rows if row.configuration in wanted)
    return dataclasses.replace(comparison, rows=rows)


def _sorted(comparison: Comparison, column: str | None) -> Comparison:
    """Sort the rows of each workload."""
    if column is None:
        return comparison
    rows: list[Row] = []
    for workload in comparison.workloads:
        rows += sorted(comparison.rows_of(workload), key=_SORT_KEYS[column])
    return dataclasses.replace(comparison, rows=tuple(rows))


def _no_baseline(run: RunFiles) -> str:
    """Return the message about a run whose rows have no speedup."""
    return (
        f"{run.root}: expected a finished baseline (launcher local, local strategy sequential) to "
        "compare with, found none. Correct what prevents it, then run `paceline run --resume "
        f"{run.root}`."
    )


def _speeds(run_dir: Path) -> RunSpeeds:
    return read_speeds(RunData(run_dir).files)


def _names(before: RunSpeeds, after: RunSpeeds) -> dict[str, str]:
    return configuration_names((before.trials | after.trials).values())


def _print_pair(
    before: RunSpeeds,
    after: RunSpeeds,
    labels: tuple[str, str],
    gate: Gate | None,
    *,
    as_json: bool,
    as_markdown: bool,
) -> None:
    """Print the comparison of two runs. Raises NotComparable if they share no configuration."""
    comparison = compare_runs(before, after)
    differences = run_differences(before.manifest, after.manifest)
    if as_json:
        more = {"first": labels[0], "second": labels[1], "differences": differences}
        judged = {} if gate is None else {"gate": gate}
        print_json({**fields_of(comparison), **more, **judged})
    else:
        names = _names(before, after)
        load = loaded_runs({"the first run": before.loaded, "the second run": after.loaded})
        sentences = [] if gate is None else gate_sentences(gate, names, load)
        view = runs_view(comparison, differences, names, sentences, load)
        if as_markdown:
            print(markdown(view))
        else:
            plain_console().print(view)
    if not comparison.rows:
        raise NotComparable(
            f"{', '.join(labels)}: expected a configuration that finished in both runs, found "
            "none; compare runs of the same spec"
        )
