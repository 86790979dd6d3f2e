"""`paceline compare`: the table of a run, or two runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
def command(**given: Any) -> int:
    """Print the table of a run, or compare two runs.

    RUN_DIR is the newest run in runs/ with trials to compare by default. RUN_B is a later run: the
    output says what differs, and which configurations became faster.
    """
    wanted = _Wanted(**given)
    wanted.check()
    return _compare_two(wanted) if wanted.is_pair else _show_one(wanted)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The arguments and options of the command."""

    run_dir: Path
    second: Path | None
    baseline: str | None
    only: tuple[str, ...]
    sort: str | None
    as_markdown: bool
    limit: float | None
    allow_undecided: bool
    junit: Path | None
    reference: Path | None
    save_reference: Path | None
    as_json: bool

    @property
    def is_pair(self) -> bool:
        return self.second is not None or self.reference is not None

    def check(self) -> None:
        """Raise click.UsageError for options that do not go together."""
        of_one = (self.baseline, self.sort, self.save_reference)
        if self.is_pair and (self.only or any(each is not None for each in of_one)):
            raise click.UsageError(
                "--baseline, --only, --sort, --save-reference: expected one run, got two; leave "
                "them out to compare two runs"
            )
        if self.second is not None and self.reference is not None:
            raise click.UsageError(
                "--reference: expected one run beside it, got two; leave one out"
            )
        if self.limit is not None and not self.is_pair:
            raise click.UsageError(
                "--fail-slower: expected two runs, or one run and --reference FILE, got one run"
            )
        if self.limit is None and (self.junit is not None or self.allow_undecided):
            name = "--allow-undecided" if self.allow_undecided else "--junit"
            raise click.UsageError(f"{name}: expected --fail-slower beside it, found none; add it")


def _compare_two(wanted: _Wanted) -> int:
    """Compare two runs; return the exit code of the gate, if one was asked for."""
    first, second = wanted.reference or wanted.run_dir, wanted.second or wanted.run_dir
    before = _speeds(first) if wanted.reference is None else read_reference(wanted.reference)
    after = _speeds(second)
    gate = None
    if wanted.limit is not None:
        gate = judge(before, after, wanted.limit, allows_undecided=wanted.allow_undecided)
    _print_pair(
        before, after, (str(first), str(second)), gate, as_json=wanted.as_json,
        as_markdown=wanted.as_markdown,
    )  # fmt: skip
    if gate is not None and wanted.junit is not None:
        write_text(wanted.junit, junit_text(gate, _names(before, after)))
    return ExitCode.OK if gate is None else gate.exit_code


def _show_one(wanted: _Wanted) -> int:
    """Print the table of a run. Raises NotComparable without a baseline."""
    run = RunData(wanted.run_dir, wanted.baseline)
    shown = _sorted(_selected(run.comparison, wanted.only), wanted.sort)
    if wanted.as_json:
        rows = [row.to_json() for row in shown.rows]
        print_json({**comparison_document(run.comparison), "rows": rows})
    elif wanted.as_markdown:
        print(markdown(comparison_view(shown, _MARKDOWN_WIDTH, run.comparison)))
    else:
        print_table(shown, run.comparison)
    if wanted.save_reference is not None:
        write_reference(wanted.save_reference, read_speeds(run.files))
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
    return replace(comparison, rows=rows)


def _sorted(comparison: Comparison, column: str | None) -> Comparison:
    """Sort the rows of each workload."""
    if column is None:
        return comparison
    rows: list[Row] = []
    for workload in comparison.workloads:
        rows += sorted(comparison.rows_of(workload), key=_SORT_KEYS[column])
    return replace(comparison, rows=tuple(rows))


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
