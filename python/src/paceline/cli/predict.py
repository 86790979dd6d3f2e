"""`paceline predict`: step time and throughput of configurations that were not run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from paceline.analysis.predict.exchange import requested_link
from paceline.analysis.predict.predict import predict, unmeasured_shares
from paceline.analysis.predict.prediction import (
    CONFIDENCE,
    PredictionRequest,
    ShareMeasurement,
)
from paceline.analysis.trial.reading import TrialRecord, load_manifest
from paceline.base.errors import NotComparable, PacelineError
from paceline.base.host.own_runs import THE_SPEC, check_own_run
from paceline.cli.console import plain_console, print_json
from paceline.cli.options import (
    all_of,
    compared_runs_argument,
    count,
    json_option,
    list_option,
    positive,
    trust_option,
)
from paceline.cli.progress import ConsoleProgress
from paceline.cli.streams import continued_by, repeated_command
from paceline.measure.records.files import fields_of
from paceline.runner.trials.directory import check_machine
from paceline.runner.trials.experiment import SHARE_REPEATS, run_share
from paceline.runner.trials.preview import duration
from paceline.show.export.run_data import RunData, finished_trials
from paceline.show.report.predict import predictions_view, refusal_sentences
from paceline.show.report.wording import listed

_MOST_NODES = 100_000
_NUMBERS = re.compile(r"(\d+)(?:\.\.(\d+))?")


def node_numbers(value: str) -> tuple[int, ...]:
    """Return numbers such as `1..64` or `1,2,4`. Raises click.BadParameter."""
    found: set[int] = set()
    for part in value.split(","):
        match = _NUMBERS.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else 0
        if not 1 <= first <= last <= _MOST_NODES:
            raise click.BadParameter(
                f"expected numbers from 1 to {_MOST_NODES}, as in 1..64 or 1,2,4, got {value!r}"
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))


_takes_options = all_of(
    click.option(
        "--nodes", metavar="N,…", type=node_numbers, default="1,2,4,8",
        help="Numbers of nodes, as in 1..64 or 1,2,4.",
    ),
    click.option(
        "--link", metavar="RATE",
        help="Link between nodes, as in 10gbit or 1 Gbit/s; default: as measured in the runs.",
    ),
    click.option(
        "--latency", "latency_s", metavar="SECONDS", type=positive,
        help="Latency of the link; default: 20 to 200 µs.",
    ),
    list_option("--local-strategy", "PATTERN,…", "Predict only local strategies that match."),
    list_option("--transport", "NAME,…", "Transports between nodes; default: as measured."),
    click.option(
        "--scaling", type=click.Choice(("strong", "weak")), default="strong",
        help="Keep the global batch (strong) or that of a node (weak).",
    ),
    click.option(
        "--global-batch", metavar="N", type=count,
        help="Global batch, with weak scaling that of a node; default: that of the runs.",
    ),
    click.option(
        "--micro-batches", metavar="N", type=count,
        help="Micro-batches of pipelines; default: those of the runs.",
    ),
)  # fmt: skip


def _takes_prediction(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of predictions, which the function gets as a request."""

    @functools.wraps(function)
    def with_request(**values: Any) -> Any:
        request = PredictionRequest(
            nodes=values.pop("nodes"),
            link=requested_link(values.pop("link"), values.pop("latency_s")),
            strategies=values.pop("local_strategy"),
            transports=values.pop("transport"),
            **{name: values.pop(name) for name in ("scaling", "global_batch", "micro_batches")},
        )
        return function(request=request, **values)

    decorated: Callable[..., Any] = _takes_options(with_request)
    return decorated


@click.command("predict")
@compared_runs_argument
@_takes_prediction
@click.option(
    "--measure",
    is_flag=True,
    help="Measure steps with the batch of a node's share first, in short trials on this machine.",
)
@trust_option
@json_option
def command(
    run_dirs: tuple[Path, ...],
    request: PredictionRequest,
    measure: bool,
    trust_run: bool,
    as_json: bool,
) -> None:
    """Predict configurations that were not run.

    RUN_DIR is the newest run in runs/ with trials to compare by default. The trials of all runs are
    used, also those that --measure made.
    """
    if measure and not trust_run:
        check_own_run(run_dirs[0], THE_SPEC)
    failures: list[PacelineError] = []
    found = predict(_trials(run_dirs), request)
    # Measured shares narrow predictions; they do not remove what refuses all of them.
    if measure and found.predictions:
        if shares := unmeasured_shares(_trials(run_dirs), request):
            failures = _measure(run_dirs[0], shares)
        found = predict(_trials(run_dirs), request)
    if as_json:
        print_json({"confidence": CONFIDENCE, **fields_of(found)})
    elif found.predictions:
        console = plain_console()
        console.print(predictions_view(found, console.width))
    if failures:  # the others could be measured, and what follows from them is printed
        raise failures[0]
    if not found.predictions:
        refused = refusal_sentences(found.refusals, names_workload=len(found.load) > 1)
        reasons = "".join(f"\n  - {sentence}" for sentence in refused)
        raise NotComparable(f"nothing can be predicted from these runs:{reasons}")


def _trials(run_dirs: Sequence[Path]) -> list[TrialRecord]:
    """Return the finished trials of runs. Raises NotComparable if there are none."""
    return finished_trials([RunData(path) for path in run_dirs])


def _measure(run_dir: Path, unmeasured: Sequence[ShareMeasurement]) -> list[PacelineError]:
    """Run short trials of the first run's configurations; say before how long they take.

    Return the errors of trials that failed.
    """
    run = RunData(run_dir)
    check_machine(load_manifest(run.files), run_dir)
    trials_s = {
        record.trial.configuration: record.outcome.ended_unix_s - record.outcome.launched_unix_s
        for record in run.trials
        if record.outcome is not None and record.finished
    }
    baselines = {r.trial.configuration for r in run.trials if r.trial.is_baseline}
    names = [
        name
        for each in unmeasured
        for name in {*each.configurations, *baselines}
        if name.startswith(f"{each.workload}.")
    ]
    most_s = SHARE_REPEATS * sum(trials_s.get(name, 0.0) for name in names)
    batches = listed([str(each.global_batch) for each in unmeasured])
    plain_console(stderr=True).print(
        f"{SHARE_REPEATS * len(names)} short trials with {batches} samples in a step: about "
        f"{duration(most_s)}, if each takes as long as a trial of the run"
    )
    with continued_by(repeated_command, run.files.manifest), ConsoleProgress() as progress:
        errors = [run_share(run.files, each, progress) for each in unmeasured]
    return [error for error in errors if error is not None]
