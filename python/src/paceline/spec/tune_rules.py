"""What goes together with [tune] and with `local_strategy = "best"`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.spec.models import Experiment, TrialRequest

# What a search finds for a trial that leaves all of it open.
LAYOUT_KEYS = (
    "ranks_per_node", "threads_per_rank", "replicas", "stages", "micro_batches", "schedule",
    "balance", "cuts",
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
