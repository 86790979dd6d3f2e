"""Results of a search: for every target the default, the best, and whether the difference exceeds
noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.analysis.statistics.noise import run_noise
from paceline.analysis.statistics.series import median_interval, ratio_interval
from paceline.records.files import jsonable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.analysis.statistics.noise import RunNoises
    from paceline.analysis.statistics.resampling import Series
    from paceline.analysis.statistics.series import Interval
    from paceline.plan.trial import Trial
    from paceline.tune.search import Bracket, Measurements
    from paceline.tune.spaces import LeftOut, Space, Target

SCHEMA = 2


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
    ties_best: bool = False  # not significantly slower than the fastest target of the workload

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
            "workload": self.target.workload,
            "target": self.target.name,
            "default": configuration_of(self.default),
            "default_samples_per_s": jsonable(self.default_samples_per_s),
            "fastest": configuration_of(self.fastest),
            "fastest_samples_per_s": jsonable(self.fastest_samples_per_s),
            "ratio": jsonable(self.ratio),
            "repeats": list(self.repeats),
            "tie": self.tie,
            "ties_best": self.ties_best,
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
    compares_targets: bool = True  # whether the targets of a workload are alternatives

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
    workloads = {space.target.workload for space in spaces}
    noises = {workload: _noise(workload, brackets, measured) for workload in workloads}
    found = [_finding(space, brackets, measured, noises[space.target.workload]) for space in spaces]
    findings = Findings(found=tuple(found), compares_targets=compares_targets)
    if not compares_targets:
        return findings
    return replace(
        findings,
        found=tuple(
            replace(each, ties_best=_ties_best(each, findings, brackets, measured, noises))
            for each in found
        ),
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
    decided = _decided(space.target, brackets)
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


def _ties_best(
    finding: Finding,
    findings: Findings,
    brackets: Sequence[Bracket],
    measured: Measurements,
    noises: Mapping[str, RunNoises],
) -> bool:
    """Return whether the best target of the workload may be no faster than this one."""
    workload = finding.target.workload
    best = findings.best(workload)
    if best is None or finding.chosen is None or best.chosen is None or best is finding:
        return False
    ratio = ratio_interval(
        _decisive_series(best, brackets, measured),
        _decisive_series(finding, brackets, measured),
        noises[workload].of_ratio(best.chosen.configuration, finding.chosen.configuration),
    )
    return ratio is not None and ratio.low <= 1


def _decisive_series(
    finding: Finding, brackets: Sequence[Bracket], measured: Measurements
) -> dict[int, Series]:
    """Return the measurements of the chosen trial that decided."""
    decided = _decided(finding.target, brackets)
    return _series(finding.chosen, measured, 0 if decided is None else decided.first_repeat)


def _decided(target: Target, brackets: Sequence[Bracket]) -> Bracket | None:
    """Return the last bracket of the target that has a winner."""
    ours = [b for b in brackets if b.target == target and b.best is not None]
    return ours[-1] if ours else None


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
