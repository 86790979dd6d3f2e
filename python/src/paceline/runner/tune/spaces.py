"""The candidates of a search: trials, planned by the same rules as those of a user."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec import values
from paceline.plan.spec.models import Experiment, TrialRequest, TuneSettings, WorkloadRequest
from paceline.plan.spec.rules.experiment import faults_of, unsearched_batch_fault
from paceline.plan.spec.rules.trial import counts_on_node
from paceline.plan.trials.planning import plan_on_node
from paceline.plan.trials.trial import Trial

BASELINE = TrialRequest.model_validate(values.BASELINE)
# "experiment 'x' cannot be planned:\n  - trials[2], workload tiny: ..."; only the fault is kept
_PLACE = re.compile(r"(?s).*?(?:trials\[\d+\](?:, workload [\w-]+)?|workload [\w-]+)[:.] ?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Candidates that are not searched, and why."""

    what: str
    reason: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTarget:
    """The object of a search: a strategy for `tune local`, a trial of the spec for `tune comm`."""

    workload: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The candidates of a target as trials, the default first if it is one of them."""

    target: SearchTarget
    candidates: tuple[Trial, ...]
    has_default: bool
    left_out: tuple[LeftOut, ...]
    round_number: int = 0  # of the method's rounds

    @property
    def default(self) -> Trial | None:
        return self.candidates[0] if self.has_default else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """Facts that all parts of a search use."""

    experiment: Experiment
    spec_text: str
    settings: TuneSettings
    short: Experiment  # the experiment with the number of steps of a search
    cores: int
    datasets: Mapping[str, str]
    files: RunFiles | None  # of the search; None if it is only planned

    def short_workload(self, name: str) -> WorkloadRequest:
        return next(w for w in self.short.workloads if w.name == name)

    def dataset(self, workload: str) -> str:
        return self.datasets.get(workload, "")

    def planned(self, workload: str, request: TrialRequest) -> Trial:
        """Plan a short trial; see `plan_one`."""
        return plan_one(
            self.short, self.short_workload(workload), request, self.dataset(workload), self.cores
        )


def check_batches(experiment: Experiment, command: str) -> None:
    """Raise UsageError if a workload has several global batches. command: `tune local`."""
    for workload in experiment.workloads:
        fault = unsearched_batch_fault(workload, experiment)
        if fault is not None:
            raise UsageError(f"paceline {command}: {fault}")


def short_experiment(experiment: Experiment, settings: TuneSettings) -> Experiment:
    """Return the experiment with the steps of a search."""
    steps = {
        "max_steps": settings.warmup_steps + settings.steps,
        "warmup_steps": settings.warmup_steps,
        "epochs": settings.warmup_steps + settings.steps,  # an epoch has a step at least
    }
    workloads = tuple(w.model_copy(update=steps) for w in experiment.workloads)
    return experiment.model_copy(update={"workloads": workloads, "tune": None})


def space_of(
    target: SearchTarget,
    requests: Sequence[TrialRequest],
    context: SearchContext,
    *,
    round_number: int = 0,
) -> Space:
    """Plan every request, the first being the default; select at most `max_candidates` by the seed.

    Requests that mean the same trial are one candidate.
    """
    accepted: dict[str, Trial] = {}
    left_out: list[LeftOut] = []
    has_default = False
    for number, request in enumerate(requests):
        try:
            trial = context.planned(target.workload, request)
        except (UsageError, EnvironmentLacks) as error:
            left_out.append(LeftOut(what=_named(request), reason=reason_of(error)))
            continue
        has_default = has_default or number == 0
        accepted.setdefault(trial.configuration, trial)
    most = context.settings.max_candidates
    chosen = _drawn(list(accepted.values()), context.short.seed, most)
    if len(chosen) < len(accepted):
        left_out.append(
            LeftOut(
                what=f"{len(accepted) - len(chosen)} others",
                reason=f"max_candidates = {most}; drawn from the seed",
                count=len(accepted) - len(chosen),
            )
        )
    return Space(
        target=target,
        candidates=tuple(chosen),
        has_default=has_default,
        left_out=tuple(dict.fromkeys(left_out)),
        round_number=round_number,
    )


def plan_one(
    short: Experiment,
    workload: WorkloadRequest,
    request: TrialRequest,
    dataset: str,
    cores: int,
) -> Trial:
    """Plan one request for one workload. Raises UsageError or EnvironmentLacks if it is not
    possible.

    It follows the same rules as a trial that a user writes.
    """
    alone = request.is_baseline
    everywhere = request.model_copy(update={"workloads": None})
    trials = (everywhere,) if alone else (BASELINE, everywhere)
    one = short.model_copy(update={"workloads": (workload,), "trials": trials})
    faults = faults_of(one)
    if faults:
        raise UsageError("; ".join(_PLACE.sub("", fault) for fault in faults))
    wanted = cores_wanted(request, cores)
    if wanted > cores and request.nodes == 1 and not request.oversubscribe:
        raise EnvironmentLacks(
            f"wants {wanted} cores, this node has {cores}; oversubscribe = true in [tune] or in "
            "a trial of the spec allows it"
        )
    once = one.model_copy(update={"repeats": 1})  # the rules have seen what the spec says
    planned = plan_on_node(once, {workload.name: dataset}, cores)
    for reason in planned.left_out:
        raise UsageError(reason)
    return next(t for t in planned.trials if t.is_baseline is alone)


def cores_wanted(request: TrialRequest, cores: int) -> int:
    """Return ranks times threads of the request on a node with this many cores."""
    counts = counts_on_node(request, cores)
    return counts.ranks * counts.threads_per_rank


def reason_of(error: Exception) -> str:
    """Return why a request is not possible, without its place in a spec that does not exist."""
    return _PLACE.sub("", str(error))


def changed(request: TrialRequest, **values: Any) -> TrialRequest:
    """Return a validated copy with changed values; None removes a key."""
    said = {**request.model_dump(exclude_unset=True), **values}
    return TrialRequest.model_validate({k: v for k, v in said.items() if v is not None})


def _drawn(trials: Sequence[Trial], seed: int, most: int) -> list[Trial]:
    """Return the first trial, then the others in an order drawn from the seed, `most` in total."""
    others = list(trials[1:])
    random.Random(seed).shuffle(others)  # noqa: S311  (an order, not a secret)
    return [*trials[:1], *others][:most]


def _named(request: TrialRequest) -> str:
    """Return the keys of the request except launcher and strategy."""
    said = request.model_dump(exclude_unset=True, exclude={"launcher", "local_strategy"})
    return " ".join(f"{k}={_shown(v)}" for k, v in said.items()) or "default"


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
