"""`paceline explain`: why one configuration is slower than another."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from paceline.analysis.between_runs.two_runs import explain_runs
from paceline.analysis.compare.run import explain_pair, explain_workload
from paceline.analysis.explain.explanation import EXPLAIN_SCHEMA, Explanation
from paceline.analysis.trial.resource_checks import turns_flags
from paceline.base.errors import NotComparable
from paceline.cli.console import plain_console, print_json, print_text
from paceline.cli.options import (
    compared_run_argument,
    existing_run,
    json_option,
)
from paceline.plan.trials.planning import matching, no_match
from paceline.show.export.run_data import RunData
from paceline.show.report.explain import (
    explained_runs_view,
    overview,
    pair_view,
)
from paceline.show.report.runs import loaded_runs

Pair = tuple[str, str]


def _second_run(value: str | Path) -> Path:
    """Return a run directory. Raises click.BadParameter, also about a pattern of configurations."""
    try:
        return existing_run(value)
    except click.BadParameter as error:
        if "/" in str(value):
            raise
        raise click.BadParameter(
            f"{error.message} To explain only some configurations of RUN_DIR, use --only "
            f"{shlex.quote(str(value))}."
        ) from None


@click.command("explain")
@compared_run_argument
@click.argument("second", metavar="[RUN_B]", type=_second_run, required=False)
@click.option(
    "--pair",
    nargs=2,
    metavar="A B",
    help="Explain these two configurations (names or shell patterns); default: the fastest one and "
    "each of the others.",
)
@click.option(
    "--only",
    metavar="PATTERN",
    help="Explain only the configurations whose names match this shell pattern.",
)
@json_option
def command(
    run_dir: Path,
    second: Path | None,
    pair: Pair | None,
    only: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Split a difference in step time into parts, and name the causes.

    RUN_DIR is the newest run in runs/ with trials to compare by default. RUN_B is a later run: each
    configuration in both runs is compared with itself.
    """
    if pair is not None and only is not None:
        raise click.UsageError("--pair, --only: expected one of them, got both")
    if second is not None:
        if pair is not None:
            raise click.UsageError("--pair: expected one run, got two")
        _explain_runs(run_dir, second, only, as_json=as_json)
        return
    run = RunData(run_dir)
    explanations = _explanations(run, pair, only)
    if as_json:
        documents = [each.to_json() for each in explanations]
        print_json({"schema": EXPLAIN_SCHEMA, "explanations": documents})
        return
    _show(run, explanations)
    for flag in turns_flags(run.trials):
        print_text(f"! {flag}")


def _explanations(run: RunData, pair: Pair | None, only: str | None) -> list[Explanation]:
    """Explain a pair, or the fastest configuration and those of the others that match."""
    comparison = run.comparison
    if pair is not None:
        return [explain_pair(comparison, *pair)]
    found: dict[str, Explanation] = {}  # by the configuration that is not the fastest
    for workload in comparison.workloads:
        others = [row.configuration for row in comparison.rows_of(workload) if row.ranked][1:]
        found |= zip(others, explain_workload(comparison, workload), strict=True)
    if not found:
        raise NotComparable(
            f"{run.files.root}: expected two equivalent configurations with finished trials, found "
            "fewer; `paceline compare` shows why"
        )
    if only is None:
        return list(found.values())
    names = matching(found, only)
    if not names:
        raise no_match("--only", [only], found)
    return [found[name] for name in names]


def _show(run: RunData, explanations: list[Explanation]) -> None:
    comparison = run.comparison
    console = plain_console()
    if len(explanations) == 1:
        console.print(pair_view(comparison, explanations[0]))
        return
    for workload in comparison.workloads:
        own = [e for e in explanations if comparison.row(e.faster).workload == workload]
        if own:
            reference = next(row for row in comparison.rows_of(workload) if row.ranked)
            console.print(overview(comparison, own, reference.configuration))
            print()
    clear = next((e for e in explanations if e.causes), explanations[0])
    print_text(f"in detail: paceline explain {run.files.root} --pair {clear.faster} {clear.slower}")


def _explain_runs(first_dir: Path, second_dir: Path, only: str | None, *, as_json: bool) -> None:
    """Explain the difference between two runs."""
    paths = first_dir, second_dir
    first, second = (RunData(path).comparison for path in paths)
    names = [path.resolve().name for path in paths]
    labels = (names[0], names[1]) if names[0] != names[1] else (str(first_dir), str(second_dir))
    if labels[0] == labels[1]:
        raise click.UsageError(f"{first_dir}: expected two runs, got the same one twice")
    found = explain_runs(first, second, labels, only)
    if as_json:
        document = {
            "schema": EXPLAIN_SCHEMA,
            "first": str(first_dir),
            "second": str(second_dir),
            "explanations": [each.to_json() for each in found.explanations],
            "differences": found.differences,
            "not_compared": found.not_compared,
        }
        print_json(document)
        return
    trials = [own[0].record.trial for own in {**first.trials, **second.trials}.values()]
    loads = {
        label: (run.load.beside_others, run.load.trials)
        for label, run in zip(labels, (first, second), strict=True)
    }
    plain_console().print(explained_runs_view(found, labels, trials, loaded_runs(loads)))
