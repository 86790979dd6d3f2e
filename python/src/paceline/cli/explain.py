"""`paceline explain`: why one configuration is slower than another."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.console import plain_console, print_json
from paceline.cli.numbers import seconds
from paceline.errors import ExitCode, NotComparable, UsageError

if TYPE_CHECKING:
    from paceline.analysis.comparison import Comparison
    from paceline.analysis.explain.explanation import Explanation
    from paceline.analysis.explain.interventions import Verification
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
        "of the others. Or another run, and a shell pattern: explain why the configurations "
        "differ between the two runs",
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
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run the proposed intervention, which decides whether a cause is right",
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="time for --verify; default: %(default)g",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="of --verify; default: runs/NAME-verify-DATE-TIME"
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    from paceline.analysis.attribution import attribute
    from paceline.export.run_data import RunData
    from paceline.records.files import jsonable
    from paceline.records.layout import RunFiles
    from paceline.records.rows import SCHEMA
    from paceline.report.explain import verification_sentence

    names, trials = arguments.configurations, arguments.trial
    if names and Path(names[0]).is_dir():
        return _explain_runs(arguments)
    if (len(names), len(trials)) not in {(0, 0), (2, 0), (0, 2)}:
        raise UsageError(
            "expected two configurations (A B), or --trial twice, or neither; got "
            f"{len(names)} configurations and {len(trials)} trials"
        )
    run = RunData(RunFiles(arguments.run_dir))
    explanations = _explanations(run, names, trials)
    verification = _verify(run, explanations, arguments) if arguments.verify else None
    others = [RunData(RunFiles(path)).comparison for path in arguments.others]
    shares = None if names or trials else attribute([run.comparison, *others])
    if arguments.json:
        document = {
            "schema": SCHEMA,
            "explanations": [e.to_json() for e in explanations],
            "attribution": jsonable(shares),
            "verification": jsonable(verification),
        }
        print_json(document)
    else:
        _show(run.comparison, explanations)
        if shares is not None:
            lines = [shares.sentence, shares.figure_sentence]
            plain_console().print("\n" + " ".join(line for line in lines if line))
        if verification is not None:
            plain_console().print("\n" + verification_sentence(verification))
    return ExitCode.OK


def _explain_runs(arguments: argparse.Namespace) -> int:
    """Explain the difference between two runs."""
    from paceline.analysis.explain.two_runs import explain_runs
    from paceline.export.run_data import RunData
    from paceline.records.files import jsonable
    from paceline.records.layout import RunFiles
    from paceline.records.rows import SCHEMA
    from paceline.report.explain_runs import explained_runs_view

    other, *patterns = arguments.configurations
    unfit = [name for name in ("trial", "others", "verify") if getattr(arguments, name)]
    if len(patterns) > 1 or unfit:
        raise UsageError(
            "two runs: expected RUN_DIR RUN_B and at most one shell pattern, without --trial, "
            "--with and --verify"
        )
    paths = arguments.run_dir, Path(other)
    first, second = (RunData(RunFiles(path)).comparison for path in paths)
    names = [path.resolve().name for path in paths]
    labels = (names[0], names[1]) if names[0] != names[1] else (str(paths[0]), str(paths[1]))
    if labels[0] == labels[1]:
        raise UsageError(f"{paths[0]}: expected two runs, got the same one twice")
    found = explain_runs(first, second, labels, patterns[0] if patterns else None)
    if arguments.json:
        document = {
            "schema": SCHEMA,
            "first": str(paths[0]),
            "second": str(paths[1]),
            "explanations": [each.to_json() for each in found.explanations],
            "differences": jsonable(found.differences),
            "not_compared": found.not_compared,
        }
        print_json(document)
        return ExitCode.OK
    trials = [own[0].record.trial for own in {**first.trials, **second.trials}.values()]
    plain_console().print(explained_runs_view(found, labels, trials))
    return ExitCode.OK


def _verify(
    run: RunData, explanations: list[Explanation], arguments: argparse.Namespace
) -> Verification:
    """Verify the first explanation that has an intervention."""
    from paceline.cli.progress import ConsoleProgress
    from paceline.runner.verification import verify_run

    chosen = next((each for each in explanations if each.intervention), explanations[0])
    with ConsoleProgress() as progress:
        return verify_run(run, chosen, arguments.out, limit_s=arguments.limit, progress=progress)


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
