"""`paceline recommend`: the best configuration for a goal, and what to measure next."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import predict as predicting
from paceline.cli.console import plain_console, print_json
from paceline.cli.numbers import number
from paceline.errors import ExitCode, NotComparable, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.predict.prediction import Predictions
    from paceline.analysis.recommend.next_measurement import Measured
    from paceline.analysis.recommend.recommend import Recommendation

_GOALS = ("time", "cost", "memory", "energy")
_count = number(int, "a whole number from 1 to 100", lambda value: 1 <= value <= 100)


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = verbs.add_parser(
        "recommend", help="rank measured and predicted configurations for a goal"
    )
    parser.add_argument(
        "run_dir", type=Path, nargs="+", metavar="RUN_DIR",
        help="the first one is ranked; predictions use all of them; a guide compares all of them",
    )  # fmt: skip
    parser.add_argument("--goal", choices=_GOALS, default="time")
    predicting.add_options(parser, nodes="at most so many; default: as measured")
    parser.add_argument(
        "--measure",
        type=_count,
        nargs="?",
        const=1,
        default=0,
        metavar="N",
        help="run up to N of the proposed measurements into RUN_DIR, one after the other; "
        "default: 1",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true")
    output.add_argument(
        "--guide", action="store_true",
        help="print a decision guide in Markdown: what was fastest for which network, number of "
        "nodes and link; RUN_DIR may also be a file of `paceline compare --json`",
    )  # fmt: skip
    parser.set_defaults(command=_recommend)


def _recommend(arguments: argparse.Namespace) -> int:
    if arguments.guide:
        if arguments.measure:
            raise UsageError("--measure: expected no --guide, which only compares what is there")
        return _print_guide(arguments.run_dir)
    from paceline.records.files import jsonable

    comparison, predictions, found = _found(arguments)
    measured = []
    for _ in range(arguments.measure):
        step = _measure(arguments, comparison, found)
        if step is None:
            break
        comparison, predictions, found, changed = step
        measured.append(changed)
    if arguments.json:
        from paceline.records.rows import SCHEMA

        document = {
            "schema": SCHEMA,
            "recommendations": [each.to_json() for each in found],
            "measured": jsonable(measured),
        }
        print_json(document)
    else:
        _show(comparison, found, predictions)
        if arguments.measure:
            _show_measured(measured, found)
    return ExitCode.OK


def _found(
    arguments: argparse.Namespace,
) -> tuple[Comparison, Predictions | None, list[Recommendation]]:
    """Read the run and recommend for each workload."""
    from paceline.analysis.recommend.recommend import recommend
    from paceline.export.run_data import RunData
    from paceline.records.layout import RunFiles

    most = None if arguments.nodes is None else max(arguments.nodes)
    comparison = RunData(RunFiles(arguments.run_dir[0])).comparison
    predictions = _predictions(arguments, most)
    found = [
        recommend(comparison, workload, arguments.goal, most, predictions)
        for workload in comparison.workloads
    ]
    return comparison, predictions, found


def _measure(
    arguments: argparse.Namespace, comparison: Comparison, before: list[Recommendation]
) -> tuple[Comparison, Predictions | None, list[Recommendation], Measured] | None:
    """Run the first proposed measurement of a configuration that was measured; None without one."""
    from paceline.analysis.recommend.next_measurement import Measured
    from paceline.cli.progress import ConsoleProgress
    from paceline.records.layout import RunFiles
    from paceline.runner.directory import check_machine
    from paceline.runner.extra_repeat import run_extra_repeat

    proposed = [(n, r.next_measurement) for n, r in enumerate(before)]
    chosen = next(((n, m) for n, m in proposed if m is not None and not m.is_predicted), None)
    if chosen is None:
        return None
    number, proposal = chosen
    files = RunFiles(arguments.run_dir[0])
    check_machine(comparison.manifest, files.root)
    trials = [trial.record.trial for own in comparison.trials.values() for trial in own]
    with ConsoleProgress() as progress:
        run_extra_repeat(files, proposal.configuration or "", trials, progress)
    comparison, predictions, after = _found(arguments)
    changed = Measured(
        configuration=proposal.configuration or "",
        loss_before=proposal.loss_now,
        loss_expected=proposal.loss_now - proposal.gain,
        loss_after=after[number].expected_loss,
    )
    return comparison, predictions, after, changed


def _show_measured(measured: list[Measured], found: list[Recommendation]) -> None:
    """Say how the measurements changed the uncertainty of the decision."""
    from paceline.report.recommend import measured_sentence

    console = plain_console()
    for each in measured:
        console.print(measured_sentence(each))
    left = [each.next_measurement for each in found if each.next_measurement is not None]
    if any(each.is_predicted for each in left):
        console.print(
            "The next measurement is of a predicted configuration: add it to a spec and run that."
        )
    elif not measured:
        console.print("Nothing was measured: no measurement is worth it.")


def _print_guide(paths: Sequence[Path]) -> int:
    from paceline.analysis.recommend.decisions import decisions
    from paceline.analysis.recommend.results import read_results
    from paceline.report.guide import guide
    from paceline.spec.extensions import WORKLOADS

    results = [each for path in paths for each in read_results(path)]
    found = decisions(results)
    if not found:
        raise NotComparable(
            f"{', '.join(map(str, paths))}: expected two equivalent configurations of one workload "
            "and precision in a run, found none; `paceline compare` says why"
        )
    models = {workload.name: workload.model for workload in WORKLOADS.all()}
    sys.stdout.write(guide(found, results, models))
    return ExitCode.OK


def _predictions(arguments: argparse.Namespace, most: int | None) -> Predictions | None:
    """Predict more nodes; None if no more than one node is wanted."""
    from paceline.analysis.predict.predict import predict

    if most is None or most < 2:
        return None
    request = predicting.request_of(arguments)
    return predict(predicting.finished_records(arguments.run_dir), request)


def _show(
    comparison: Comparison, found: list[Recommendation], predictions: Predictions | None
) -> None:
    from paceline.analysis.explain.run import explain_workload
    from paceline.report.predict import refusal_sentences
    from paceline.report.recommend import recommendation_view

    console = plain_console()
    for each in found:
        reasons = {}
        if each.goal == "time":
            reasons = {
                e.slower: f"slower by {e.causes[0].label}"
                for e in explain_workload(comparison, each.workload)
                if e.causes
            }
        console.print(recommendation_view(each, reasons))
    refused = refusal_sentences(() if predictions is None else predictions.refusals)
    for sentence in refused[:3]:
        console.print(f"Not predicted: {sentence}")
    if len(refused) > 3:
        console.print("More are not predicted: see `paceline predict`.")
