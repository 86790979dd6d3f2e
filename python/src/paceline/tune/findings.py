"""Results of a search: for every target the default, the best, and whether the difference exceeds
noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.analysis.noise import run_noise
from paceline.analysis.statistics import median_interval, ratio_interval
from paceline.records.files import jsonable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.analysis.noise import RunNoises
    from paceline.analysis.statistics import Interval, Series
    from paceline.plan.trial import Trial
    from paceline.tune.search import Bracket, Measurements
    from paceline.tune.spaces import LeftOut, Space, Target

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result for one target. None means that it could not be measured."""

    target: Target
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

    @property
    def tie(self) -> bool:
        """True if the fastest may be no faster than the default."""
        return self.ratio is not None and self.ratio.low <= 1

    @property
    def chosen(self) -> Trial | None:
        """The fastest, or the default if it is as good."""
        return self.default if self.tie else self.fastest

    @property
    def chosen_samples_per_s(self) -> Interval | None:
        return self.default_samples_per_s if self.tie else self.fastest_samples_per_s

    def to_json(self) -> dict[str, Any]:
        return {
            "default": configuration_of(self.default),
            "default_samples_per_s": jsonable(self.default_samples_per_s),
            "fastest": configuration_of(self.fastest),
            "fastest_samples_per_s": jsonable(self.fastest_samples_per_s),
            "ratio": jsonable(self.ratio),
            "repeats": list(self.repeats),
            "tie": self.tie,
            "chosen": configuration_of(self.chosen),
            "candidates": self.candidates,
            "left_out": [out.to_json() for out in self.left_out],
            "failures": dict(self.failures),
            "cut_short": self.cut_short,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Results for all targets."""

    found: tuple[Finding, ...]

    def of(self, target: Target) -> Finding | None:
        return next((found for found in self.found if found.target == target), None)

    def best(self, workload: str) -> Finding | None:
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


def findings_of(
    spaces: Sequence[Space], brackets: Sequence[Bracket], measured: Measurements
) -> Findings:
    """Compare the measurements; run-to-run noise is estimated from all trials of a workload."""
    workloads = {space.target.workload for space in spaces}
    noises = {workload: _noise(workload, brackets, measured) for workload in workloads}
    return Findings(
        found=tuple(
            _finding(space, brackets, measured, noises[space.target.workload]) for space in spaces
        )
    )


def configuration_of(trial: Trial | None) -> str | None:
    return None if trial is None else trial.configuration


def _finding(
    space: Space,
    brackets: Sequence[Bracket],
    measured: Measurements,
    noises: RunNoises,
) -> Finding:
    ours = [bracket for bracket in brackets if bracket.target == space.target]
    decided = next((bracket for bracket in reversed(ours) if bracket.best is not None), None)
    fastest = None if decided is None else decided.best
    first = 0 if decided is None else decided.first_repeat
    configurations = {name for bracket in ours for name in bracket.candidates}
    of_default = _series(space.default, measured, first)
    of_fastest = _series(fastest, measured, first)
    names = [configuration_of(fastest) or "", configuration_of(space.default) or ""]
    same = names[0] == names[1]
    return Finding(
        target=space.target,
        default=space.default,
        default_samples_per_s=median_interval(of_default, noises.of(names[1])),
        fastest=fastest,
        fastest_samples_per_s=median_interval(of_fastest, noises.of(names[0])),
        ratio=None if same else ratio_interval(of_fastest, of_default, noises.of_ratio(*names)),
        candidates=len(configurations),
        left_out=space.left_out,
        failures={n: r for n, r in measured.failures.items() if n in configurations},
        cut_short=any(bracket.cut_short for bracket in ours),
        repeats=tuple(sorted(of_default.keys() & of_fastest.keys())),
    )


def _noise(workload: str, brackets: Sequence[Bracket], measured: Measurements) -> RunNoises:
    ours = [bracket for bracket in brackets if bracket.target.workload == workload]
    names = {name for bracket in ours for name in bracket.candidates}
    return run_noise(
        {name: measured.series[name] for name in sorted(names & measured.series.keys())}
    )


def _series(trial: Trial | None, measured: Measurements, first: int) -> dict[int, Series]:
    """Return the measurements of a trial from repeat `first` on; empty if it failed."""
    if trial is None or trial.configuration in measured.failures:
        return {}
    found = measured.series.get(trial.configuration, {})
    return {repeat: series for repeat, series in found.items() if repeat >= first}
