"""Results of a search: for every target the default, the best, and whether the best is faster.

That is the test of `paceline compare`: the best must be separated from the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.statistics.rates import RunRates
from paceline.measure.records.files import jsonable
from paceline.plan.trials.trial import Trial
from paceline.runner.tune.search import Bracket, Measurements
from paceline.runner.tune.spaces import LeftOut, SearchTarget, Space

SCHEMA = 2


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
            (found.chosen_samples_per_s.median, found)
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
    configurations = {name for bracket in ours for name in bracket.candidates}
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
        candidates=len(configurations),
        left_out=space.left_out,
        failures={n: r for n, r in measured.failures.items() if n in configurations},
        cut_short=any(bracket.cut_short for bracket in ours),
        repeats=tuple(sorted(repeats[0] & repeats[1])),
    )
