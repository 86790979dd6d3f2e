"""`paceline predict`: step time and throughput of configurations that were not run."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ExitCode, NotComparable, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.predict.prediction import Request
    from paceline.analysis.reading import TrialRecord

_MOST_NODES = 100_000
_NUMBERS = re.compile(r"(\d+)(?:\.\.(\d+))?")


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = verbs.add_parser(
        "predict", help="predict configurations that were not run, from those of a run"
    )
    parser.add_argument("run_dir", type=Path, nargs="+", metavar="RUN_DIR")
    add_options(parser, nodes="as in 1..64 or 1,2,4; default: 1,2,4,8")
    parser.set_defaults(nodes=(1, 2, 4, 8))
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=_predict)


def add_options(parser: argparse.ArgumentParser, *, nodes: str) -> None:
    """Add the options that describe what to predict. nodes: help of --nodes."""
    parser.add_argument("--nodes", type=numbers, metavar="N", help=nodes)
    parser.add_argument(
        "--link", metavar="RATE", help='between nodes: "10gbit"; default: as measured in the runs'
    )
    parser.add_argument(
        "--latency", type=float, metavar="SECONDS", help="of the link; default: 20 to 200 µs"
    )
    parser.add_argument(
        "--strategy", action="append", default=[], metavar="PATTERN", help="may be repeated"
    )
    parser.add_argument(
        "--transport", action="append", default=[], metavar="NAME", help="may be repeated"
    )
    parser.add_argument("--scaling", choices=("strong", "weak"), default="strong")
    parser.add_argument("--global-batch", type=int, metavar="N", help="default: that of the runs")
    parser.add_argument("--micro-batches", type=int, metavar="N", help="of pipelines")


def request_of(arguments: argparse.Namespace) -> Request:
    """Return the request. Raises UsageError for an unknown rate or transport."""
    from paceline.analysis.predict.link import given_link
    from paceline.analysis.predict.prediction import Request
    from paceline.lab.settings import bits_per_s
    from paceline.spec.extensions import TRANSPORTS

    for name in arguments.transport:
        TRANSPORTS.get(name)
    if arguments.latency is not None and arguments.link is None:
        raise UsageError("--latency: expected --link with it; a measured link has its latency")
    link = None
    if arguments.link is not None:
        link = given_link(bits_per_s(arguments.link), arguments.latency)
    return Request(
        nodes=arguments.nodes,
        link=link,
        strategies=tuple(arguments.strategy),
        transports=tuple(arguments.transport),
        scaling=arguments.scaling,
        global_batch=arguments.global_batch,
        micro_batches=arguments.micro_batches,
    )


def numbers(text: str) -> tuple[int, ...]:
    """Parse numbers of nodes such as `1..64` or `1,2,4`."""
    found: set[int] = set()
    for part in text.split(","):
        match = _NUMBERS.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else 0
        if not 1 <= first <= last <= _MOST_NODES:
            raise argparse.ArgumentTypeError(
                f"expected numbers from 1 to {_MOST_NODES}, as in 1..64 or 1,2,4, got {text!r}"
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def finished_records(run_dirs: Sequence[Path]) -> list[TrialRecord]:
    """Read the finished trials of all runs. Raises NotComparable if there are none."""
    from paceline.export.run_data import RunData
    from paceline.records.layout import RunFiles

    found = [r for path in run_dirs for r in RunData(RunFiles(path)).trials if r.finished]
    if not found:
        names = ", ".join(map(str, run_dirs))
        raise NotComparable(f"{names}: expected finished trials to predict from, found none")
    return found


def _predict(arguments: argparse.Namespace) -> int:
    from paceline.analysis.predict.predict import predict
    from paceline.cli.console import plain_console
    from paceline.report.predict import predictions_view, refusal_sentences

    found = predict(finished_records(arguments.run_dir), request_of(arguments))
    if arguments.json:
        print(found.to_json())
    elif found.predictions:
        plain_console().print(predictions_view(found))
    if not found.predictions:
        reasons = "".join(f"\n  - {sentence}" for sentence in refusal_sentences(found.refusals))
        raise NotComparable(f"nothing can be predicted from these runs:{reasons}")
    return ExitCode.OK
