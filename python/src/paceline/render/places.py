"""What is rendered, and where things are for the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.trial import Trial

# a scheduler's limit beyond the trial's own: Paceline should be the one that ends it, with a reason
_MARGIN_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A file's name and content, and how it is handed in."""

    name: str
    text: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A configuration that is not rendered."""

    configuration: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Paths as the ranks see them, on storage that all nodes share."""

    run_dir: str
    data_dir: str | None  # holds a data set for each workload, by its name; None: as planned

    def dataset(self, trial: Trial) -> str:
        training = trial.training
        return training.dataset if self.data_dir is None else f"{self.data_dir}/{training.workload}"


def by_configuration(trials: Sequence[Trial]) -> list[list[Trial]]:
    """The repeats of each configuration, in the order of the first that is planned of each."""
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.configuration, []).append(trial)
    return [sorted(repeats, key=lambda t: t.repeat) for repeats in found.values()]


def limit_s(trial: Trial) -> int:
    """After which the scheduler may end the trial."""
    return math.ceil(trial.limits.trial_s) + _MARGIN_S
