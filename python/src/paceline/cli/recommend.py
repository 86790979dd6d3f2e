"""`paceline recommend`: the best configuration for a goal, and what to measure next."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import predict as predicting
from paceline.errors import ExitCode, NotComparable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.comparison import Comparison
    from paceline.analysis.predict.prediction import Predictions
    from paceline.analysis.recommend.recommend import Recommendation

_GOALS = ("time", "cost", "memory", "energy")


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
        return _print_guide(arguments.run_dir)
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
    if arguments.json:
        from paceline.records.rows import SCHEMA

        document = {"schema": SCHEMA, "recommendations": [each.to_json() for each in found]}
        json.dump(document, sys.stdout, indent=1)
        print()
    else:
        _show(comparison, found, predictions)
    return ExitCode.OK


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
    from paceline.cli.console import plain_console
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
