"""The argument parser, and the one place where errors become exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from paceline import __version__
from paceline.cli import commands, lab, monitor, render, watch
from paceline.errors import ExitCode, PacelineError, PacelineWarning
from paceline.spec import WORKLOADS
from paceline.telemetry import sidecar

if TYPE_CHECKING:
    from collections.abc import Sequence

_EPILOG = """\
exit codes: 0 done, 2 wrong usage or spec, 3 environment lacks something, 4 bad data,
5 a rank failed, 6 timed out, 7 not comparable, 130 interrupted

start with: paceline run quickstart
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; no stack trace for a user's mistake."""
    warnings.showwarning = _show_warning
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments) or ExitCode.OK
    except PacelineError as error:
        _say(f"paceline: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("paceline: interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`paceline compare … | head`): nothing more to say,
        # and the interpreter must not try to flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    return code


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,  # noqa: ARG001  (the standard library's signature)
    lineno: int,  # noqa: ARG001
    file: TextIO | None = None,  # noqa: ARG001
    line: str | None = None,  # noqa: ARG001
) -> None:
    # Other people's warnings mean nothing to our user; python -W error still shows them.
    if issubclass(category, PacelineWarning):
        _say(f"paceline: warning: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Which way of distributing this training is fastest here, by how much, and "
        "why?",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(verbs)
    _add_plan(verbs)
    _add_tune(verbs)
    _add_compare(verbs)
    _add_profile(verbs)
    _add_report(verbs)
    _add_data(verbs)
    _add_doctor(verbs)
    _add_sidecar(verbs)
    lab.add(verbs)
    watch.add(verbs)
    render.add(verbs)
    monitor.add(verbs)
    return parser


def _add_run(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = verbs.add_parser("run", help="run an experiment, print the table, write the report")
    run.add_argument("spec", metavar="SPEC", help="a TOML file, or a shipped experiment's name")
    run.add_argument("--out", type=Path, metavar="RUN_DIR", help="default: runs/NAME-DATE-TIME")
    run.add_argument("--resume", action="store_true", help="complete the run in RUN_DIR")
    run.set_defaults(command=commands.run)


def _add_plan(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = verbs.add_parser("plan", help="show every trial and its command; run nothing")
    plan.add_argument("spec", metavar="SPEC")
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(command=commands.plan)


def _add_tune(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tune = verbs.add_parser("tune", help="find the fastest settings by short trials")
    actions = tune.add_subparsers(title="actions", metavar="ACTION", required=True)
    local = actions.add_parser(
        "local", help="of each local strategy on this node; writes a spec with the winners"
    )
    _add_search(local, "NAME-tune")
    local.set_defaults(command=commands.tune_local)
    comm = actions.add_parser(
        "comm",
        help="how the gradients of each trial with peers travel; writes a spec with the winners",
    )
    _add_search(comm, "NAME-tune-comm")
    comm.set_defaults(command=commands.tune_comm)


def _add_search(search: argparse.ArgumentParser, name: str) -> None:
    search.add_argument("spec", metavar="SPEC", help="a TOML file, or a shipped experiment's name")
    search.add_argument("--out", type=Path, metavar="DIR", help=f"default: runs/{name}-DATE-TIME")
    search.add_argument("--resume", action="store_true", help="go on with the search in DIR")
    search.add_argument(
        "--budget", type=_seconds, metavar="SECONDS", help="start no short trial later than that"
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text}")
    return seconds


def _add_compare(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    compare = verbs.add_parser("compare", help="print the table of a run")
    compare.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    compare.add_argument("--json", action="store_true")
    compare.set_defaults(command=commands.compare)


def _add_profile(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    profile = verbs.add_parser("profile", help="show where a run's communication time goes")
    profile.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    profile.add_argument("--trial", metavar="ID", help="this trial alone, in detail")
    profile.add_argument("--json", action="store_true")
    profile.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev as well"
    )
    profile.set_defaults(command=commands.profile)


def _add_report(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = verbs.add_parser("report", help="write a run's report, one HTML file")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    report.add_argument("-o", "--output", type=Path, metavar="FILE.html")
    report.set_defaults(command=commands.report)


def _add_data(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    data = verbs.add_parser("data", help="make, ingest and inspect data sets")
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True)

    synth = actions.add_parser("synth", help="make photos in class folders")
    synth.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    synth.add_argument("--preset", choices=sorted(WORKLOADS), required=True)
    synth.add_argument("--images", type=int, metavar="N", help="default: the preset's")
    synth.add_argument("--seed", type=int, default=1, metavar="S")
    synth.set_defaults(command=commands.data_synth)

    ingest = actions.add_parser("ingest", help="class folders of photos -> Petastorm data set")
    ingest.add_argument("photos_dir", type=Path, metavar="PHOTOS_DIR")
    ingest.add_argument("out_dataset", type=Path, metavar="OUT_DATASET")
    ingest.add_argument("--on-bad-image", choices=("fail", "skip"), default="fail")
    ingest.add_argument("--seed", type=int, default=1, metavar="S", help="order of the samples")
    ingest.set_defaults(command=commands.data_ingest)

    inspect = actions.add_parser("inspect", help="what a data set holds, checksums verified")
    inspect.add_argument("dataset", type=Path, metavar="DATASET")
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(command=commands.data_inspect)


def _add_doctor(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = verbs.add_parser("doctor", help="what this machine has, and what is missing")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(command=commands.doctor)


def _add_sidecar(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("sidecar", help="sample this host and some processes")
    sidecar.add_arguments(parser)
    parser.set_defaults(command=commands.run_sidecar)
