"""A search: brackets of candidates, measured rung by rung, with the trials of all targets
interleaved; its short trials, and its findings."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.analysis.between_runs.speeds import trial_speed
from paceline.analysis.equivalence.check import read_equivalence
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.statistics.rates import RepeatRate, RunRates
from paceline.analysis.trial.reading import load_trial
from paceline.measure.records.documents import set_aside
from paceline.measure.records.files import jsonable
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.models import TuneSettings
from paceline.plan.trials.planning import repeated
from paceline.plan.trials.trial import Trial
from paceline.runner.trials.experiment import check_equivalences
from paceline.runner.trials.planning import Progress
from paceline.runner.trials.run_trial import failure_of, is_finished, run_followed
from paceline.runner.tune.spaces import LeftOut, SearchTarget, Space

# --- one short trial: run it like any other, or read the records of an earlier search ------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRate:
    """Samples per second of the steady steps, or the reason why there are none."""

    samples_per_s: RepeatRate | None
    failure: str | None = None


class TrialMeasurer:
    """Measures trials on this machine, and keeps each in a run directory.

    A trial with an outcome, good or bad, is not repeated unless it is a baseline, because nothing
    can be compared without a baseline. A trial that is not equivalent to the baseline counts as
    failed: its speed is meaningless. (Trials with lossy communication are not required to be
    equivalent.)
    """

    def __init__(
        self,
        files: RunFiles,
        baselines: Mapping[str, Trial],
        progress: Progress,
        *,
        limit_s: float | None,
    ) -> None:
        """baselines: the sequential trial of each workload, which is measured before others.

        `measure` raises RankFailed or TimedOut if one of them fails.
        """
        self._files = files
        self._baselines = baselines
        self._progress = progress
        self._deadline_s = None if limit_s is None else time.monotonic() + limit_s

    def measure(self, trial: Trial, number: int, of: int) -> MeasuredRate | None:
        """Return the measurement, made only if there is none yet; None if the time budget is
        spent."""
        files = self._files.trial(trial.id)
        if not self._has_ended(trial):
            if self._deadline_s is not None and time.monotonic() > self._deadline_s:
                return None
            set_aside(self._files, trial)
            outcome = run_followed(trial, files, self._progress, number, of)
            if trial.is_baseline and outcome.status != "ok":
                raise failure_of(outcome, self._files)
        baseline = self._baselines[trial.training.workload]
        check_equivalences([baseline, trial], self._files, keep_tensors=False)
        return self._read(trial)

    def _has_ended(self, trial: Trial) -> bool:
        files = self._files.trial(trial.id)
        return is_finished(files) if trial.is_baseline else files.outcome.exists()

    def _read(self, trial: Trial) -> MeasuredRate:
        record = load_trial(self._files.trial(trial.id))
        if not record.finished:
            reason = None if record.outcome is None else record.outcome.message
            return MeasuredRate(samples_per_s=None, failure=reason or "it left no reason")
        different = _difference(record.files.equivalence) if trial.is_exact else None
        if different is not None:
            return MeasuredRate(samples_per_s=None, failure=different)
        found = trial_speed(record)
        failure = None if found is not None else "it recorded no steady step"
        return MeasuredRate(samples_per_s=found, failure=failure)


def _difference(equivalence: Path) -> str | None:
    """Return how the trial differs from the baseline; None if it does not, or this is unknown."""
    if not equivalence.exists():
        return None
    faults = read_equivalence(equivalence).faults
    return f"not equivalent to the baseline: {'; '.join(faults)}" if faults else None


@dataclass
class Measurements:
    """All measurements by configuration and repeat."""

    rates: dict[str, dict[int, RepeatRate]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, trial: Trial, measured: MeasuredRate) -> None:
        if measured.samples_per_s is None:
            self.failures[trial.configuration] = measured.failure or "it failed"
        else:
            found = self.rates.setdefault(trial.configuration, {})
            found[trial.repeat] = measured.samples_per_s

    def speed(self, configuration: str, repeats: Iterable[int]) -> float:
        """Return the geometric mean over these repeats in samples/s.

        NaN if it failed or a repeat is missing.
        """
        found, wanted = self.rates.get(configuration, {}), list(repeats)
        if configuration in self.failures or any(r not in found for r in wanted):
            return math.nan
        return math.exp(statistics.fmean(found[r].log_rate for r in wanted))


class Bracket:
    """Candidates for one target, of which the fastest is sought by successive halving.

    All candidates of a rung are measured equally often, and the fastest go on to the next rung
    (Jamieson, Talwalkar: Non-stochastic Best Arm Identification and Hyperparameter Optimization,
    AISTATS 2016). The first candidate is the default: it goes on as long as it works. The state
    follows from the measurements alone, so a search that is resumed decides the same again.
    """

    is_final = False

    def __init__(
        self,
        target: SearchTarget,
        candidates: Sequence[Trial],
        settings: TuneSettings,
        *,
        round_number: int = 0,
    ) -> None:
        self.target = target
        self.candidates = {trial.configuration: trial for trial in candidates}
        self.round_number = round_number
        self.cut_short = False
        self.finished = False
        self.best: Trial | None = None  # the fastest of the last rung; None if all failed
        self._alive = list(self.candidates)
        # without a choice, the final measures it as often as needed
        self._most_repeats = 1 if len(self.candidates) == 1 else settings.repeats
        self._repeats = range(1)  # of this rung
        self.counted = range(settings.repeats)  # repeats of its candidates that decide

    def due(self, measured: Measurements) -> list[Trial]:
        """Return the trials that this rung still needs; a failed candidate is not measured
        again."""
        return [
            repeated(self.candidates[name], repeat)
            for repeat in self._repeats
            for name in self._alive
            if name not in measured.failures
        ]

    def judge(self, measured: Measurements) -> None:
        """End the rung."""
        count = self._repeats.stop
        speeds = self._speeds(measured, range(count))
        ranked = sorted(speeds, key=speeds.__getitem__, reverse=True)
        self.best = self.candidates[ranked[0]] if ranked else None
        self.finished = not ranked or 2 * count > self._most_repeats
        going_on = {next(iter(self.candidates)), *ranked[: math.ceil(len(ranked) / 2)]}
        self._alive = [name for name in speeds if name in going_on]
        self._repeats = range(count, 2 * count)

    def _speeds(self, measured: Measurements, repeats: range) -> dict[str, float]:
        """Return the speeds of the candidates of this rung that work."""
        speeds = {name: measured.speed(name, repeats) for name in self._alive}
        return {name: speed for name, speed in speeds.items() if math.isfinite(speed)}


class FinalBracket(Bracket):
    """A winner against the default, both measured again alternately.

    The fastest of many looks faster than it is (a maximum over noise), and it was measured at
    another time than the default. Here neither effect counts.
    """

    is_final = True

    def __init__(
        self, target: SearchTarget, candidates: Sequence[Trial], settings: TuneSettings
    ) -> None:
        """candidates: the winner is the last one."""
        super().__init__(target, candidates, settings)
        self._repeats = self.counted = range(settings.repeats, 2 * settings.repeats)

    def judge(self, measured: Measurements) -> None:
        # The winner is reported also if it is slower this time, because that is the result.
        working = list(self._speeds(measured, self._repeats))
        self.best = self.candidates[working[-1]] if working else None
        self.finished = True


def search(
    brackets: Sequence[Bracket],
    measurer: TrialMeasurer,
    measured: Measurements,
    follow: Callable[[Bracket], Bracket | None],
    *,
    seed: int,
) -> list[Bracket]:
    """Measure rung by rung until every bracket has a winner, or the time budget is spent.

    follow: returns the bracket that starts from the winner of a finished one, if any.
    Return all brackets, and add the measurements to `measured`.
    """
    every, running = list(brackets), list(brackets)
    while running:
        block = [trial for bracket in running for trial in bracket.due(measured)]
        if not _measure(interleaved(block, seed), measurer, measured):
            for bracket in running:
                bracket.cut_short = True
            break
        for bracket in running:
            bracket.judge(measured)
        followers = [follow(bracket) for bracket in running if bracket.finished]
        new = [bracket for bracket in followers if bracket is not None]
        every += new
        running = [bracket for bracket in running if not bracket.finished] + new
    return every


def interleaved(trials: Iterable[Trial], seed: int) -> list[Trial]:
    """Order trials repeat by repeat, each repeat in a seeded random order with the baselines first,
    because every other trial is compared with them as soon as it ends."""
    drawn = random.Random(seed)  # noqa: S311  (an order, not a secret)
    unique = list({trial.id: trial for trial in trials}.values())
    drawn.shuffle(unique)
    return sorted(unique, key=lambda trial: (trial.repeat, not trial.is_baseline))


def _measure(block: Sequence[Trial], measurer: TrialMeasurer, measured: Measurements) -> bool:
    for number, trial in enumerate(block, start=1):
        found = measurer.measure(trial, number, len(block))
        if found is None:
            return False
        measured.add(trial, found)
    return True


# Results of a search: for every target the default, the best, and whether the best is faster
#
# That is the test of `paceline compare`: the best must be separated from the default.

SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPoint:
    """A candidate that was tried: its speed in each repeat, or why it has none."""

    configuration: str
    options: Mapping[str, Any]  # of strategy, transport and launcher
    samples_per_s: Mapping[int, float]  # by repeat
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetResult:
    """Result for one target. None means that it could not be measured."""

    target: SearchTarget
    default: Trial | None
    default_samples_per_s: Interval | None
    fastest: Trial | None  # as measured; after a final bracket, the winner that it confirms
    fastest_samples_per_s: Interval | None
    ratio: Interval | None  # of the fastest to the default, within repeats
    candidates: int
    left_out: tuple[LeftOut, ...]
    failures: Mapping[str, str]  # by configuration
    cut_short: bool  # whether the time budget ended before all measurements
    repeats: tuple[int, ...] = ()  # repeats of both default and fastest, used to compare them
    is_faster: bool = False  # the fastest is separated from the default
    near_best: bool = False  # not separated from the fastest target of the workload
    points: tuple[TriedPoint, ...] = ()  # all candidates, in the order of the rounds

    @property
    def keeps_default(self) -> bool:
        """True if another one was not shown to be faster than the default."""
        return self.ratio is not None and not self.is_faster

    @property
    def chosen(self) -> Trial | None:
        """The fastest, or the default if nothing was shown to be faster."""
        return self.default if self.keeps_default else self.fastest

    @property
    def chosen_samples_per_s(self) -> Interval | None:
        return self.default_samples_per_s if self.keeps_default else self.fastest_samples_per_s

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.target.workload,
            "target": self.target.name,
            "default": configuration_of(self.default),
            "default_samples_per_s": jsonable(self.default_samples_per_s),
            "fastest": configuration_of(self.fastest),
            "fastest_samples_per_s": jsonable(self.fastest_samples_per_s),
            "ratio": jsonable(self.ratio),
            "repeats": list(self.repeats),
            "is_faster": self.is_faster,
            "near_best": self.near_best,
            "chosen": configuration_of(self.chosen),
            "candidates": self.candidates,
            "left_out": jsonable(self.left_out),
            "failures": dict(self.failures),
            "cut_short": self.cut_short,
            "points": jsonable(self.points),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Results for all targets."""

    found: tuple[TargetResult, ...]
    compares_targets: bool = True  # whether the targets of a workload are alternatives

    def of(self, target: SearchTarget) -> TargetResult | None:
        return next((found for found in self.found if found.target == target), None)

    def best(self, workload: str) -> TargetResult | None:
        """Return the workload's fastest target; None if none could be measured."""
        measured = [
            (found.chosen_samples_per_s.estimate, found)
            for found in self.found
            if found.target.workload == workload and found.chosen_samples_per_s is not None
        ]
        return max(measured, key=lambda pair: pair[0])[1] if measured else None

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(found.target.workload for found in self.found))

    def to_json(self) -> dict[str, Any]:
        """Return the content of `tuning.json`."""
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "targets": [found.to_json() for found in self.found],
        }
        if self.compares_targets:
            best = {name: self.best(name) for name in self.workloads}
            document["best"] = {
                name: None if found is None else configuration_of(found.chosen)
                for name, found in best.items()
            }
        return document


def findings_of(
    spaces: Sequence[Space],
    brackets: Sequence[Bracket],
    measured: Measurements,
    *,
    compares_targets: bool = True,
) -> Findings:
    """Compare the measurements; run-to-run noise is estimated from all trials of a workload."""
    rates = {
        workload: _Rates([b for b in brackets if b.target.workload == workload], measured)
        for workload in {space.target.workload for space in spaces}
    }
    found = [_finding(space, brackets, measured, rates[space.target.workload]) for space in spaces]
    if compares_targets:
        found = [
            replace(each, near_best=rates[each.target.workload].is_near_best(each, found))
            for each in found
        ]
    return Findings(found=tuple(found), compares_targets=compares_targets)


def configuration_of(trial: Trial | None) -> str | None:
    return None if trial is None else trial.configuration


class _Rates:
    """The rates of one workload: those of the finals, and those of the rounds before.

    A target without a final has those of its rounds.
    """

    def __init__(self, brackets: Sequence[Bracket], measured: Measurements) -> None:
        self._finals = _rates([b for b in brackets if b.is_final], measured)
        self._rounds = _rates([b for b in brackets if not b.is_final], measured)
        self._decided_by_final = {b.target for b in brackets if b.is_final and b.best is not None}

    def of(self, target: SearchTarget) -> RunRates:
        return self._finals if target in self._decided_by_final else self._rounds

    def is_near_best(self, one: TargetResult, findings: Sequence[TargetResult]) -> bool:
        """Tell whether a target is not the fastest of its workload, and not separated from it."""
        chosen = [
            each.chosen.configuration
            for each in findings
            if each.target in self._decided_by_final and each.chosen is not None
        ]
        return configuration_of(one.chosen) in self._finals.fastest(chosen).not_separated


def _rates(brackets: Sequence[Bracket], measured: Measurements) -> RunRates:
    """Return the rates of all candidates in the repeats that these brackets count."""
    counted = {name: bracket.counted for bracket in brackets for name in bracket.candidates}
    found = {
        name: {repeat: rate for repeat, rate in measured.rates[name].items() if repeat in repeats}
        for name, repeats in sorted(counted.items())
        if name in measured.rates and name not in measured.failures
    }
    return RunRates({name: rates for name, rates in found.items() if rates})


def _finding(
    space: Space, brackets: Sequence[Bracket], measured: Measurements, of_workload: _Rates
) -> TargetResult:
    target, default = space.target, space.default
    rates = of_workload.of(target)
    ours = [bracket for bracket in brackets if bracket.target == target]
    winners = [bracket.best for bracket in ours if bracket.best is not None]
    fastest = winners[-1] if winners else None
    candidates = {name: trial for bracket in ours for name, trial in bracket.candidates.items()}
    names = configuration_of(fastest) or "", configuration_of(default) or ""
    ratio = None if names[0] == names[1] else rates.ratio(*names)
    repeats = [set(rates.repeats.get(name, {})) for name in names]
    return TargetResult(
        target=target,
        default=default,
        default_samples_per_s=rates.rate(names[1]),
        fastest=fastest,
        fastest_samples_per_s=rates.rate(names[0]),
        ratio=ratio,
        is_faster=ratio is not None and rates.is_faster(*names),
        candidates=len(candidates),
        left_out=space.left_out,
        failures={n: r for n, r in measured.failures.items() if n in candidates},
        cut_short=any(bracket.cut_short for bracket in ours),
        repeats=tuple(sorted(repeats[0] & repeats[1])),
        points=tuple(_point(trial, measured) for trial in candidates.values()),
    )


def _point(trial: Trial, measured: Measurements) -> TriedPoint:
    options: dict[str, Any] = {}
    for each in trial.options:
        options |= each.model_dump(mode="json", exclude_none=True)
    rates = measured.rates.get(trial.configuration, {})
    return TriedPoint(
        configuration=trial.configuration,
        options=options,
        samples_per_s={repeat: found.rate for repeat, found in sorted(rates.items())},
        failure=measured.failures.get(trial.configuration),
    )
