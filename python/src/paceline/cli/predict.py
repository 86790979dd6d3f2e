"""`paceline predict`: step time and throughput of configurations that were not run."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.numbers import count, number, seconds
from paceline.errors import EnvironmentLacks, ExitCode, NotComparable, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.analysis.predict.prediction import Request
    from paceline.analysis.reading import TrialRecord
    from paceline.analysis.simulation.job import Topology

_MOST_NODES = 100_000
_NUMBERS = re.compile(r"(\d+)(?:\.\.(\d+))?")
_ratio = number(float, "a number of at least 1", lambda value: value >= 1)


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
        "--latency", type=seconds, metavar="SECONDS", help="of the link; default: 20 to 200 µs"
    )
    parser.add_argument(
        "--strategy", action="append", default=[], metavar="PATTERN", help="may be repeated"
    )
    parser.add_argument(
        "--transport", action="append", default=[], metavar="NAME", help="may be repeated"
    )
    parser.add_argument("--scaling", choices=("strong", "weak"), default="strong")
    parser.add_argument("--global-batch", type=count, metavar="N", help="default: that of the runs")
    parser.add_argument("--micro-batches", type=count, metavar="N", help="of pipelines")
    parser.add_argument(
        "--simulate", action="store_true", help="contention in the network, by SimGrid"
    )
    parser.add_argument(
        "--rack-hosts", type=count, metavar="N",
        help="with --simulate: hosts of a rack, which share an uplink; default: one switch for all",
    )  # fmt: skip
    parser.add_argument(
        "--oversubscription", type=_ratio, metavar="RATIO",
        help="with --rack-hosts: bandwidth of a rack's links over its uplink; default: 1",
    )  # fmt: skip


def request_of(arguments: argparse.Namespace) -> Request:
    """Return the request. Raises UsageError for an unknown rate."""
    from paceline.analysis.predict.link import requested_link
    from paceline.analysis.predict.prediction import Request

    return Request(
        nodes=arguments.nodes,
        link=requested_link(arguments.link, arguments.latency),
        strategies=tuple(arguments.strategy),
        transports=tuple(arguments.transport),
        scaling=arguments.scaling,
        global_batch=arguments.global_batch,
        micro_batches=arguments.micro_batches,
        topology=_topology_of(arguments),
    )


def _topology_of(arguments: argparse.Namespace) -> Topology | None:
    """Return the network to simulate. Raises UsageError, and EnvironmentLacks without SimGrid."""
    from paceline.analysis.simulation.job import Topology
    from paceline.lab.network import why_not

    hosts, ratio = arguments.rack_hosts, arguments.oversubscription
    if not arguments.simulate:
        if hosts is not None or ratio is not None:
            raise UsageError("--rack-hosts, --oversubscription: expected --simulate with them")
        return None
    if hosts is None and ratio is not None:
        raise UsageError("--oversubscription: expected --rack-hosts with it, got one switch")
    reason = why_not()
    if reason is not None:
        raise EnvironmentLacks(f"--simulate: {reason}")
    return Topology(rack_hosts=hosts, oversubscription=ratio or 1.0)


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
    from paceline.export.run_data import RunData, finished_trials
    from paceline.records.layout import RunFiles

    return finished_trials([RunData(RunFiles(path)) for path in run_dirs])


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
