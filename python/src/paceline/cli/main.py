"""The argument parser, and the only place that turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from paceline.cli import (
    commands,
    explain,
    export,
    extensions,
    lab,
    monitor,
    predict,
    recommend,
    render,
    script,
    watch,
)
from paceline.cli.numbers import count, seconds, seed
from paceline.cli.signals import EndedBySignal, signals_raise
from paceline.cli.streams import reader_may_end
from paceline.errors import ExitCode, PacelineError, PacelineWarning
from paceline.spec.extensions import WORKLOADS
from paceline.telemetry import request as sidecar_request
from paceline.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

# Set to 1, it makes Python show the stack trace of an error of the operating system.
_TRACEBACK_VARIABLE = "PACELINE_TRACEBACK"


def _epilog() -> str:
    codes = ", ".join(f"{code:d} {code.meaning}" for code in ExitCode)
    return f"{textwrap.fill(f'exit codes: {codes}', 80)}\n\nstart with: paceline run quickstart\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's mistake shows no stack trace."""
    warnings.showwarning = _show_warning
    words, script_arguments = script.split_arguments(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{script.hint_of(arguments)}")
    arguments.script_arguments = script_arguments
    with reader_may_end("stderr"):
        return _run_command(arguments)


def _run_command(arguments: argparse.Namespace) -> int:
    try:
        with signals_raise():
            code: int = arguments.command(arguments) or ExitCode.OK
        sys.stdout.flush()  # here a closed pipe is handled, at the exit of Python it is not
    except PacelineError as error:
        _say(f"paceline: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("paceline: interrupted")
        return ExitCode.INTERRUPTED
    except EndedBySignal as error:
        _say(f"paceline: ended by {error.name}")
        raise
    except BrokenPipeError:
        # The reader of our output has ended (`paceline compare … | head`). The interpreter must
        # not flush to the closed pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except OSError as error:
        if os.environ.get(_TRACEBACK_VARIABLE) == "1":
            raise
        _say(f"paceline: {_os_error_message(error)}")
        return ExitCode.ENVIRONMENT
    return code


def _os_error_message(error: OSError) -> str:
    """Say which file the operating system refused, and why."""
    places = [str(name) for name in (error.filename, error.filename2) if name is not None]
    reason = error.strerror or str(error) or type(error).__name__
    return (
        f"{': '.join([*places, reason])}. Expected the operating system to allow this; check the "
        f"permissions, the free space and the limits (ulimit -a). {_TRACEBACK_VARIABLE}=1 shows "
        "where it happened."
    )


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
    # Warnings of libraries do not help the user; python -W error still shows them.
    if issubclass(category, PacelineWarning):
        _say(f"paceline: warning: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Find the fastest configuration for distributing a training on these "
        "machines: by how much, and why.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(verbs)
    _add_plan(verbs)
    extensions.add(verbs)
    _add_tune(verbs)
    _add_compare(verbs)
    explain.add(verbs)
    predict.add(verbs)
    recommend.add(verbs)
    _add_history(verbs)
    _add_profile(verbs)
    _add_report(verbs)
    export.add(verbs)
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
    _add_spec(run)
    run.add_argument("--out", type=Path, metavar="RUN_DIR", help="default: runs/NAME-DATE-TIME")
    run.add_argument(
        "--resume", action="store_true", help="run only the failed and missing trials of RUN_DIR"
    )
    run.add_argument(
        "--keep-going",
        action=argparse.BooleanOptionalAction,
        help="run the other trials after one has failed; default: if there are several "
        "configurations",
    )
    run.set_defaults(command=commands.run)


def _add_plan(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = verbs.add_parser("plan", help="show every trial and its command; run nothing")
    _add_spec(plan)
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(command=commands.plan)


def _add_spec(parser: argparse.ArgumentParser) -> None:
    """Add the spec and the options that change it."""
    parser.add_argument(
        "spec", metavar="SPEC", nargs="?", help="a TOML file, or the name of a shipped experiment"
    )
    script.add_options(parser)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="run only the configurations whose name matches this shell pattern, and the baseline; "
        "may be repeated (`paceline plan SPEC` shows the names)",
    )
    parser.add_argument(
        "--repeats",
        metavar="N",
        help='run each configuration N times; "auto": until the ranking is decided, at most '
        "max_repeats times",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a key of the spec to a TOML value, as in training.max_steps=8 or "
        "workloads.0.global_batch=16; may be repeated",
    )


def _add_tune(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tune = verbs.add_parser("tune", help="find the fastest settings by short trials")
    actions = tune.add_subparsers(title="actions", metavar="ACTION", required=True)
    local = actions.add_parser(
        "local", help="tune each local strategy on this node; write a spec with the winners"
    )
    _add_search(local, "NAME-tune")
    local.set_defaults(command=commands.tune_local)
    comm = actions.add_parser(
        "comm",
        help="tune the gradient communication of each trial; write a spec with the winners",
    )
    _add_search(comm, "NAME-tune-comm")
    comm.set_defaults(command=commands.tune_comm)
    batch = actions.add_parser(
        "batch", help="find the largest batch of each trial that fits into memory"
    )
    batch.add_argument(
        "spec", metavar="SPEC", help="a TOML file, or the name of a shipped experiment"
    )
    batch.add_argument(
        "--out", type=Path, metavar="DIR", help="default: runs/NAME-tune-batch-DATE-TIME"
    )
    batch.add_argument(
        "--memory",
        type=count,
        metavar="MIB",
        help="memory of the ranks of a trial; default: 80 %% of what is available",
    )
    batch.add_argument(
        "--train",
        action="store_true",
        help="also train with each batch size, with linear and square-root scaling of the learning "
        "rate; needs held_out_samples",
    )
    batch.add_argument("--json", action="store_true")
    batch.set_defaults(command=commands.tune_batch)


def _add_search(search: argparse.ArgumentParser, name: str) -> None:
    search.add_argument(
        "spec", metavar="SPEC", help="a TOML file, or the name of a shipped experiment"
    )
    search.add_argument("--out", type=Path, metavar="DIR", help=f"default: runs/{name}-DATE-TIME")
    search.add_argument("--resume", action="store_true", help="continue the search in DIR")
    search.add_argument(
        "--budget", type=seconds, metavar="SECONDS", help="start no short trial after this time"
    )


def _add_compare(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    compare = verbs.add_parser("compare", help="print the table of a run, or compare two runs")
    compare.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    compare.add_argument(
        "second",
        type=Path,
        nargs="?",
        metavar="RUN_B",
        help="compare RUN_DIR with this later run: what differs, and which rows became faster",
    )
    _add_baseline(compare)
    compare.add_argument("--json", action="store_true")
    compare.set_defaults(command=commands.compare)


def _add_history(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    history = verbs.add_parser("history", help="list runs by time; mark changes of speed")
    history.add_argument("dir", type=Path, metavar="DIR", help="all runs below it are listed")
    history.add_argument("--json", action="store_true")
    history.set_defaults(command=commands.history)


def _add_baseline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--baseline",
        metavar="NAME",
        help="show speedups over this configuration, or over the fastest one that matches this "
        "shell pattern; default: that of the spec, else the sequential one",
    )


def _add_profile(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    profile = verbs.add_parser("profile", help="show the communication time of a run by cause")
    profile.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    profile.add_argument("--trial", metavar="ID", help="show only this trial, in detail")
    profile.add_argument("--json", action="store_true")
    profile.add_argument(
        "--trace", type=Path, metavar="FILE", help="also write a trace for ui.perfetto.dev"
    )
    profile.set_defaults(command=commands.profile)


def _add_report(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = verbs.add_parser("report", help="write the report of a run, one HTML file")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    _add_baseline(report)
    report.add_argument("-o", "--output", type=Path, metavar="FILE.html")
    report.set_defaults(command=commands.report)


def _add_data(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    data = verbs.add_parser("data", help="synthesise, ingest, register and inspect data sets")
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True)

    synth = actions.add_parser("synth", help="make images in class folders")
    synth.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    presets = sorted(workload.name for workload in WORKLOADS.all() if not workload.own_samples)
    synth.add_argument("--preset", choices=presets, required=True)
    synth.add_argument("--images", type=count, metavar="N", help="default: that of the preset")
    synth.add_argument("--seed", type=seed, default=1, metavar="S")
    synth.set_defaults(command=commands.data_synth)

    ingest = actions.add_parser("ingest", help="class folders of images -> Petastorm data set")
    ingest.add_argument("images_dir", type=Path, metavar="IMAGES_DIR")
    ingest.add_argument("out_dataset", metavar="OUT_DATASET", help="folder or file:// URL")
    ingest.add_argument("--on-bad-image", choices=("fail", "skip"), default="fail")
    ingest.add_argument(
        "--seed", type=seed, default=1, metavar="S", help="seed of the order of the samples"
    )
    ingest.set_defaults(command=commands.data_ingest)

    register = actions.add_parser(
        "register", help="use Parquet files or a Petastorm data set without a conversion"
    )
    register.add_argument("dataset", metavar="DATASET", help="folder or URL (s3, gs, hdfs)")
    register.add_argument(
        "--manifest-dir", type=Path, metavar="DIR",
        help="folder for the manifest, where DATASET must not be written to; DIR is then the data "
        "set",
    )  # fmt: skip
    register.add_argument(
        "--codec", action="append", default=[], metavar="NAME=CODEC",
        help="how the bytes of a column are encoded, where they do not show it: image, array, "
        "compressed_array",
    )  # fmt: skip
    register.set_defaults(command=commands.data_register)

    inspect = actions.add_parser("inspect", help="show the contents of a data set")
    inspect.add_argument("dataset", metavar="DATASET", help="folder or URL")
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(command=commands.data_inspect)


def _add_doctor(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = verbs.add_parser("doctor", help="show what this machine has, and what is missing")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(command=commands.doctor)


def _add_sidecar(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("sidecar", help="sample the resources of this host and of processes")
    sidecar_request.add_arguments(parser)
    parser.set_defaults(command=commands.run_sidecar)
