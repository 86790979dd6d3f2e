"""`paceline explain`: why one configuration is slower than another."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ExitCode, NotComparable, UsageError

if TYPE_CHECKING:
    from paceline.analysis.comparison import Comparison
    from paceline.analysis.explain.explanation import Explanation
    from paceline.export.run_data import RunData


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = verbs.add_parser(
        "explain", help="split a difference in step time into parts, and name the causes"
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "configurations",
        nargs="*",
        metavar="A B",
        help="two configurations, as names or shell patterns; default: the fastest one and each "
        "of the others",
    )
    parser.add_argument(
        "--trial",
        action="append",
        default=[],
        metavar="ID",
        help="in place of configurations; give it twice",
    )
    parser.add_argument(
        "--with",
        dest="others",
        action="append",
        default=[],
        type=Path,
        metavar="RUN_DIR",
        help="also use the configurations of this run for the shares of the choices",
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    from paceline.analysis.attribution import attribute
    from paceline.cli.console import plain_console
    from paceline.export.run_data import RunData
    from paceline.records.files import jsonable
    from paceline.records.layout import RunFiles
    from paceline.records.rows import SCHEMA

    names, trials = arguments.configurations, arguments.trial
    if (len(names), len(trials)) not in {(0, 0), (2, 0), (0, 2)}:
        raise UsageError(
            "expected two configurations (A B), or --trial twice, or neither; got "
            f"{len(names)} configurations and {len(trials)} trials"
        )
    run = RunData(RunFiles(arguments.run_dir))
    explanations = _explanations(run, names, trials)
    others = [RunData(RunFiles(path)).comparison for path in arguments.others]
    shares = None if names or trials else attribute([run.comparison, *others])
    if arguments.json:
        document = {
            "schema": SCHEMA,
            "explanations": [e.to_json() for e in explanations],
            "attribution": jsonable(shares),
        }
        json.dump(document, sys.stdout, indent=1)
        print()
    else:
        _show(run.comparison, explanations)
        if shares is not None:
            lines = [shares.sentence, shares.figure_sentence]
            plain_console().print("\n" + " ".join(line for line in lines if line))
    return ExitCode.OK


def _explanations(run: RunData, names: list[str], trials: list[str]) -> list[Explanation]:
    from paceline.analysis.explain.run import explain_pair, explain_trials, explain_workload

    comparison = run.comparison
    if names:
        return [explain_pair(comparison, *names)]
    if trials:
        (first,), (second,) = run.chosen(trials[0]), run.chosen(trials[1])
        return [explain_trials(comparison, first, second)]
    found = [each for w in comparison.workloads for each in explain_workload(comparison, w)]
    if not found:
        raise NotComparable(
            f"{run.files.root}: expected two equivalent configurations with finished trials, found "
            "fewer; `paceline compare` shows why"
        )
    return found


def _show(comparison: Comparison, explanations: list[Explanation]) -> None:
    from paceline.cli.console import plain_console
    from paceline.report.explain import explanation_view, name_in, overview

    name = name_in(comparison)
    console = plain_console()
    if len(explanations) == 1:
        console.print(explanation_view(explanations[0], name))
        return
    for workload in comparison.workloads:
        own = [e for e in explanations if comparison.row(e.faster).workload == workload]
        reference = comparison.verdicts[workload].best
        if own and reference is not None:
            console.print(overview(own, reference, name))
            print()
    clear = next((e for e in explanations if e.causes), explanations[0])
    print(f"in detail: paceline explain RUN_DIR {clear.faster} {clear.slower}")
