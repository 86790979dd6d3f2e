"""What goes together with [tune] and with `local_strategy = "best"`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.spec.communication_rules import CARRIERS, carrier, in_buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.spec.models import Experiment, TrialRequest

# What a search finds for a trial that leaves all of it open.
LAYOUT_KEYS = (
    "ranks_per_node", "threads_per_rank", "replicas", "stages", "micro_batches", "schedule",
    "balance", "split_points",
)  # fmt: skip


def says_its_layout(trial: TrialRequest) -> bool:
    """Whether any count, schedule or cut is given, so that a search leaves the trial as it is."""
    return any(getattr(trial, key) not in (None, "auto") for key in LAYOUT_KEYS)


def is_filled_in(trial: TrialRequest, experiment: Experiment) -> bool:
    """Whether a search says the trial's counts before it runs."""
    tune = experiment.tune
    if tune is None or says_its_layout(trial):
        return False
    return tune.strategies is None or trial.local_strategy in ("best", *tune.strategies)


def best_faults(trial: TrialRequest, experiment: Experiment) -> Iterator[str]:
    """Faults of a trial that wants the best strategy found, beyond keys that the search finds."""
    if trial.local_strategy != "best":
        return
    if experiment.tune is None:
        yield (
            'local_strategy: "best" is what a search finds; add a table [tune], or name a strategy'
        )
    if trial.device != "cpu":
        yield f'device: the search is among strategies on cores, got "{trial.device}"'
    if trial.transport is not None and trial.nodes == 1:
        yield (
            f'transport: on one node the best strategy brings its own, got "{trial.transport}"; '
            "leave it out"
        )


def compresses(trial: TrialRequest) -> bool:
    """Whether what it sends in a step could be compressed."""
    return carrier(trial) in CARRIERS and trial.averaging_period is None


def sends_by_mpirun(trial: TrialRequest) -> bool:
    """Whether parameters of mpirun can change how its gradients travel."""
    return trial.launcher == "mpi" and carrier(trial) == "mpi"


# key -> the trials that it can be tried with, in words
_TRIED_WITH: dict[str, tuple[Callable[[TrialRequest], bool], str]] = {
    "buckets_mb": (in_buckets, "sends gradients in buckets"),
    "buckets_in_flight": (in_buckets, "sends gradients in buckets"),
    "algorithms": (lambda trial: carrier(trial) == "mpi", 'has transport = "mpi"'),
    "compressions": (compresses, "sends gradients"),
    "mpi_parameters": (sends_by_mpirun, 'has launcher = "mpi" and transport = "mpi"'),
}


def tune_faults(experiment: Experiment) -> Iterator[str]:
    """Lists of [tune] that no trial of the spec has a use for."""
    tune = experiment.tune
    if tune is None:
        return
    for key, (has_use, words) in _TRIED_WITH.items():
        if getattr(tune, key) and not any(map(has_use, experiment.trials)):
            yield f"tune.{key}: expected a trial that {words}, found none; leave it out"
