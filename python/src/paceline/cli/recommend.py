"""`paceline recommend`: the best configuration for a goal, and what to measure next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from paceline.analysis.compare.explain_run import explain_workload
from paceline.analysis.compare.result import Comparison
from paceline.analysis.predict.prediction import Predictions, Request
from paceline.analysis.recommend import Goal, Recommendation, recommend
from paceline.cli.console import plain_console, print_json
from paceline.cli.options import json_option, run_dirs_argument
from paceline.cli.predict import predictions_of, takes_prediction
from paceline.cli.progress import ConsoleProgress
from paceline.cli.signals import continued_by, repeated_command
from paceline.export.run_data import RunData
from paceline.records.files import fields_of
from paceline.records.layout import RunFiles
from paceline.records.rows import SCHEMA
from paceline.report.predict import refusal_sentences
from paceline.report.recommend import recommendation_view
from paceline.report.wording import share
from paceline.runner.directory import check_machine
from paceline.runner.measure_more import run_extra_block

_GOALS = ("time", "cost", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """A run with what is recommended from it, for each workload."""

    comparison: Comparison
    predictions: Predictions | None
    recommendations: list[Recommendation]


@click.command("recommend")
@run_dirs_argument
@click.option(
    "--goal",
    type=click.Choice(_GOALS),
    default="time",
    help="What to minimise: the time or the core seconds (cost), of a sample or until the target "
    "is reached, or the memory of a node.",
)
@takes_prediction("Configurations of at most so many nodes; default: as measured.")
@click.option(
    "--measure",
    is_flag=True,
    help="Run one more repeat of the baseline and of what is not decided, into RUN_DIR.",
)
@json_option
def command(
    run_dirs: tuple[Path, ...], goal: Goal, request: Request, measure: bool, as_json: bool
) -> None:  # fmt: skip
    """Rank measured and predicted configurations for a goal.

    RUN_DIR is the newest run in runs/ by default. Of several runs, the first one is ranked, and
    predictions use all of them.
    """
    decision = _decide(run_dirs, goal, request)
    measured = 0
    if measure:
        decision, measured = _measure(decision, run_dirs, goal, request)
    if as_json:
        documents = [{"schema": SCHEMA, **fields_of(each)} for each in decision.recommendations]
        print_json({"recommendations": documents, "measured": measured})
        return
    _show(decision)
    if measure:
        plain_console().print(_measured_sentence(measured))


def _decide(run_dirs: tuple[Path, ...], goal: Goal, request: Request) -> _Decision:
    """Read the run and recommend for each workload."""
    most = max(request.nodes, default=None)
    comparison = RunData(run_dirs[0]).comparison
    predictions = None
    if most is not None and most > 1:
        predictions = predictions_of(run_dirs, request)
    found = [
        recommend(comparison, workload, goal, most, predictions)
        for workload in comparison.workloads
    ]
    return _Decision(comparison=comparison, predictions=predictions, recommendations=found)


def _measure(
    before: _Decision, run_dirs: tuple[Path, ...], goal: Goal, request: Request
) -> tuple[_Decision, int]:
    """Run one more repeat of all configurations that are not decided; return their number."""
    proposed = [each.next_measurement for each in before.recommendations]
    names = [name for each in proposed if each is not None for name in each.configurations]
    if not names:
        return before, 0
    files = RunFiles(run_dirs[0])
    check_machine(before.comparison.manifest, files.root)
    trials = [trial.record.trial for own in before.comparison.trials.values() for trial in own]
    with continued_by(repeated_command, files.manifest), ConsoleProgress() as progress:
        run_extra_block(files, names, trials, progress)
    return _decide(run_dirs, goal, request), len(names)


def _measured_sentence(measured: int) -> str:
    if not measured:
        return "Nothing was measured: the run decides already."
    return f"Measured one more repeat of {measured} configurations."


def _show(decision: _Decision) -> None:
    console = plain_console()
    for each in decision.recommendations:
        reasons = {}
        has_target = any(row.target for row in decision.comparison.rows_of(each.workload))
        if each.goal == "time" and not has_target:  # a target may need other numbers of steps
            reasons = {
                e.slower: f"slower: {e.causes[0].label} {share(e.causes[0].share)}"
                for e in explain_workload(decision.comparison, each.workload)
                if e.causes
            }
        console.print(recommendation_view(each, reasons))
    predictions = decision.predictions
    refused = refusal_sentences(() if predictions is None else predictions.refusals)
    for sentence in refused[:3]:
        console.print(f"Not predicted: {sentence}")
    if len(refused) > 3:
        console.print("More are not predicted: see `paceline predict`.")
