"""Candidates of a search: requests that the planner accepts, as trials; of others, its reason."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks, UsageError
from paceline.plan.planning import plan_trials, resolve_training
from paceline.plan.trial import trial_name
from paceline.spec.models import TrialRequest
from paceline.spec.rules import faults_of
from paceline.spec.values import LOCAL_STRATEGIES
from paceline.tune.space import cores_wanted, local_requests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.trial import Trial
    from paceline.spec import Experiment, LocalStrategy, TuneSettings, WorkloadRequest

_BASELINE = TrialRequest(launcher="local", local_strategy="sequential")
# "experiment 'x' cannot be planned:\n  - trials[2], workload tiny: ..."; here it is about one trial
_PLACE = re.compile(r"(?s).*?(?:trials\[\d+\](?:, workload [\w-]+)?|workload [\w-]+)[:.] ?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A request that cannot be a trial here."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpace:
    """One strategy on one workload: its candidates as trials, the default first if it is one."""

    workload: str
    strategy: LocalStrategy
    candidates: tuple[Trial, ...]
    has_default: bool
    left_out: tuple[LeftOut, ...]

    @property
    def default(self) -> Trial | None:
        return self.candidates[0] if self.has_default else None


def searched_strategies(experiment: Experiment, settings: TuneSettings) -> list[LocalStrategy]:
    """Those of [tune], else those that the trials name, all if a trial wants the best one."""
    if settings.strategies is not None:
        return [s for s in LOCAL_STRATEGIES if s in settings.strategies]
    named = {trial.local_strategy for trial in experiment.trials}
    return [s for s in LOCAL_STRATEGIES if s in named or "best" in named]


def short_experiment(experiment: Experiment, settings: TuneSettings) -> Experiment:
    """The experiment with the steps of a search; its trials are the planner's to fill in."""
    steps = {
        "max_steps": settings.warmup_steps + settings.steps,
        "warmup_steps": settings.warmup_steps,
        "epochs": settings.warmup_steps + settings.steps,  # an epoch has a step at least
    }
    workloads = tuple(w.model_copy(update=steps) for w in experiment.workloads)
    return experiment.model_copy(update={"workloads": workloads, "repeats": 1, "tune": None})


def baseline_trial(short: Experiment, workload: WorkloadRequest, dataset: str, cores: int) -> Trial:
    """The sequential trial that every candidate must train the same as."""
    return plan_one(short, workload, _BASELINE, dataset, cores)


def strategy_space(
    short: Experiment,
    workload: WorkloadRequest,
    strategy: LocalStrategy,
    dataset: str,
    *,
    cores: int,
    settings: TuneSettings,
) -> StrategySpace:
    """Plan every request of a strategy; draw at most `max_candidates` from the seed."""
    batch = resolve_training(short, workload, dataset).global_batch
    oversubscribe = settings.oversubscribe or any(
        t.oversubscribe for t in short.trials if t.local_strategy in (strategy, "best")
    )
    requests = local_requests(strategy, cores=cores, batch=batch, oversubscribe=oversubscribe)
    accepted: dict[str, Trial] = {}
    left_out: list[LeftOut] = []
    has_default = False
    for number, request in enumerate(requests):
        try:
            trial = plan_one(short, workload, request, dataset, cores)
        except (UsageError, EnvironmentLacks) as error:
            left_out.append(LeftOut(what=_named(request), reason=_PLACE.sub("", str(error))))
            continue
        has_default = has_default or number == 0
        accepted.setdefault(trial.configuration, trial)
    chosen = _drawn(list(accepted.values()), short.seed, settings.max_candidates)
    if len(chosen) < len(accepted):
        left_out.append(
            LeftOut(
                what=f"{len(accepted) - len(chosen)} others",
                reason=f"max_candidates = {settings.max_candidates}; drawn from the seed",
            )
        )
    return StrategySpace(
        workload=workload.name,
        strategy=strategy,
        candidates=tuple(chosen),
        has_default=has_default,
        left_out=tuple(dict.fromkeys(left_out)),
    )


def plan_one(
    short: Experiment,
    workload: WorkloadRequest,
    request: TrialRequest,
    dataset: str,
    cores: int,
) -> Trial:
    """One request as a trial of one workload. Raises UsageError or EnvironmentLacks if it is none.

    It goes through the same rules and planner as a trial that a user writes.
    """
    alone = request.local_strategy == "sequential"
    trials = (request,) if alone else (_BASELINE, request)
    one = short.model_copy(update={"workloads": (workload,), "trials": trials})
    faults = faults_of(one)
    if faults:
        raise UsageError("; ".join(_PLACE.sub("", fault) for fault in faults))
    wanted = cores_wanted(request, cores)
    if wanted > cores and not request.oversubscribe:
        raise EnvironmentLacks(
            f"wants {wanted} cores, this node has {cores}; oversubscribe = true in [tune] or in "
            "a trial of the spec allows it"
        )
    planned = plan_trials(one, {workload.name: dataset}, cores)
    return next(t for t in planned if t.local_strategy == request.local_strategy)


def repeated(trial: Trial, repeat: int) -> Trial:
    """The trial as its repeat of this number, from 0."""
    name = trial_name(trial.configuration, repeat)
    return trial.model_copy(update={"repeat": repeat, "id": name})


def _drawn(trials: Sequence[Trial], seed: int, most: int) -> list[Trial]:
    """The first, then the others in an order drawn from the seed, `most` in all."""
    others = list(trials[1:])
    random.Random(seed).shuffle(others)  # noqa: S311  (an order, not a secret)
    return [*trials[:1], *others][:most]


def _named(request: TrialRequest) -> str:
    """What the request says beyond its strategy."""
    said = request.model_dump(exclude_unset=True, exclude={"launcher", "local_strategy"})
    return " ".join(f"{k}={_shown(v)}" for k, v in said.items()) or "default"


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
