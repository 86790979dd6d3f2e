from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from tests.support.specs import spec_text

from paceline.analysis.statistics.rates import repeat_rate
from paceline.plan.spec.loading import parse_spec
from paceline.runner.tune.local import LOCAL_SEARCH
from paceline.runner.tune.search import MeasuredRate
from paceline.runner.tune.session import RoundSearch
from paceline.runner.tune.spaces import SearchContext, short_experiment

SPEC = spec_text()


class Watcher:
    """Records the trials that started."""

    def __init__(self):
        self.started = []

    def planned(self, summary, trials, expected_s): ...
    def between_trials(self, run): ...
    def stage(self, text): ...
    def data(self, done, total): ...
    def trial_started(self, trial, files, number, of):
        self.started.append(trial.id)

    def trial_ended(self, trial, outcome): ...


@dataclass
class FakeMeasurer:
    """Speeds by configuration; unknown configurations fail. Records the trials that were
    requested."""

    speeds: dict[str, float]
    jitter: float = 0.001  # between steps and between repeats, relative
    trials_left: float = math.inf
    asked: list[str] = field(default_factory=list)

    def measure(self, trial, number, of):
        del number, of
        if self.trials_left <= 0:
            return None
        self.trials_left -= 1
        self.asked.append(trial.id)
        speed = self.speeds.get(trial.configuration)
        if speed is None:
            return MeasuredRate(samples_per_s=None, failure="it was made to fail")
        wave = np.array([1.0, 1 + self.jitter, 1 - self.jitter, 1.0, 1 + self.jitter])
        # Drawn, not alternating: repeats that are equal would look as if they had no noise.
        draw = zlib.crc32(f"{trial.configuration} {trial.repeat}".encode()) / 2**31 - 1
        drift = 1 + self.jitter * draw
        return MeasuredRate(samples_per_s=repeat_rate(speed * drift * wave, np.ones(len(wave))))


@pytest.fixture
def measurer():
    return FakeMeasurer


def local_context(experiment, cores):
    return SearchContext(
        experiment=experiment,
        spec_text="",
        settings=experiment.tune,
        short=short_experiment(experiment, experiment.tune),
        cores=cores,
        datasets={workload.name: "data" for workload in experiment.workloads},
        files=None,
    )


def local_space(experiment, workload, strategy, cores):
    """Return the candidates of a strategy, which is searched although no trial has it."""
    tune = experiment.tune.model_copy(update={"strategies": (strategy,)})
    context = local_context(experiment.model_copy(update={"tune": tune}), cores)
    spaces = RoundSearch(LOCAL_SEARCH, context).first_spaces()
    return next(s for s in spaces if (s.target.workload, s.target.name) == (workload, strategy))


@pytest.fixture
def make_space():
    """The candidates of a strategy for `tiny`."""

    def make(strategy, *, cores=2, spec=SPEC, tune=""):
        experiment = parse_spec(f"{spec}\n[tune]\n{tune}", "mine.toml")
        return local_space(experiment, "tiny", strategy, cores)

    return make
