"""Successive halving by Optuna: who goes on to be measured more often.

Optuna's SuccessiveHalvingPruner is the asynchronous form (Li et al., A System for Massively
Parallel Hyperparameter Tuning, MLSys 2020, algorithm 2): each candidate is judged, as it reports,
against those that have reported on the same rung. The first on a rung always goes on, and so does
one that is the fastest so far: hence the fastest of a rung is never dropped.

Optuna keeps nothing on disk here. What was measured is in the run directory, so a search that is
taken up again hears the same values in the same order, and decides the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import optuna

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAME = "candidate"
_RUNNING_QUIETLY = optuna.logging.WARNING


class Halving:
    """Candidates in the order in which they report, the first of which goes on while it works.

    names: each once. keep: about one in so many goes on from a rung to the next, whose candidates
    are measured so many times as often. repeats: measurements of each at the end.
    """

    def __init__(self, names: Sequence[str], *, keep: int, repeats: int) -> None:
        optuna.logging.set_verbosity(_RUNNING_QUIETLY)
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=keep)
        # every candidate is asked for by name, so what the sampler would choose does not matter
        sampler = optuna.samplers.RandomSampler(seed=0)
        study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
        choice = optuna.distributions.CategoricalDistribution(list(names))
        self._trials: dict[str, optuna.trial.Trial] = {}
        for name in names:
            study.enqueue_trial({_NAME: name})
            self._trials[name] = study.ask({_NAME: choice})
        self._alive = list(names)
        self._keep = keep
        self._most = repeats
        self._wanted = 1
        self._finished = False
        self._scores: dict[str, float] = {}

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def alive(self) -> list[str]:
        """Candidates that are still measured, in order."""
        return list(self._alive)

    @property
    def wanted(self) -> int:
        """Measurements that the present rung wants of each candidate that is alive."""
        return self._wanted

    @property
    def best(self) -> str | None:
        """The fastest of those that got furthest; None if none could be measured."""
        return max(self._scores, key=lambda name: self._scores[name], default=None)

    def report(self, speeds: Mapping[str, float]) -> None:
        """Judge the rung; a speed that is not finite is a candidate that failed."""
        working = {n: speeds[n] for n in self._alive if math.isfinite(speeds[n])}
        going_on = [name for name in self._alive if self._goes_on(name, speeds[name])]
        self._scores = working
        self._finished = not going_on or self._wanted * self._keep > self._most
        if not self._finished:
            self._alive = going_on
            self._wanted *= self._keep

    def _goes_on(self, name: str, speed: float) -> bool:
        trial = self._trials[name]
        trial.report(speed, step=self._wanted)
        return not trial.should_prune()
