"""Results of a search: for every target the default, the best, and whether the difference exceeds
noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.analysis.statistics.rates import RunRates
from paceline.records.files import jsonable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.analysis.statistics.intervals import Interval
    from paceline.analysis.statistics.rates import RepeatRate
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
    rates = {workload: _Decisive(workload, brackets, measured) for workload in workloads}
    found = [_finding(space, brackets, measured, rates[space.target.workload]) for space in spaces]
    findings = Findings(found=tuple(found), compares_targets=compares_targets)
    if not compares_targets:
        return findings
    return replace(
        findings,
        found=tuple(
            replace(each, ties_best=_ties_best(each, findings, rates[each.target.workload]))
            for each in found
        ),
    )


def configuration_of(trial: Trial | None) -> str | None:
    return None if trial is None else trial.configuration


class _Decisive:
    """The rates of one workload. Those of earlier repeats tell the noise, but decide nothing.

    Rows of the fitted run are configurations with the first repeat that counts for them.
    """

    def __init__(self, workload: str, brackets: Sequence[Bracket], measured: Measurements) -> None:
        ours = [bracket for bracket in brackets if bracket.target.workload == workload]
        names = {name for bracket in ours for name in bracket.candidates}
        firsts = sorted({bracket.first_repeat for bracket in ours})
        rows: dict[str, dict[int, RepeatRate]] = {}
        for name in sorted(names & measured.rates.keys() - measured.failures.keys()):
            for first, last in zip(firsts, [*firsts[1:], None], strict=True):
                found = measured.rates[name].items()
                rows[_row(name, first)] = {
                    repeat: rate
                    for repeat, rate in found
                    if repeat >= first and (last is None or repeat < last)
                }
        self._rates = RunRates({row: found for row, found in rows.items() if found})
        self._first = {
            target: 0 if (decided := _decided(target, brackets)) is None else decided.first_repeat
            for target in {bracket.target for bracket in ours}
        }

    def row(self, trial: Trial | None, target: Target) -> str:
        """Return the row of the repeats of a trial that decide about a target."""
        return _row(configuration_of(trial) or "", self._first.get(target, 0))

    def rate(self, trial: Trial | None, target: Target) -> Interval | None:
        return self._rates.rate(self.row(trial, target))

    def ratio(self, first: str, second: str) -> Interval | None:
        return self._rates.ratio(first, second)

    def repeats(self, trial: Trial | None, target: Target) -> set[int]:
        return set(self._rates.repeats.get(self.row(trial, target), {}))


def _row(configuration: str, first: int) -> str:
    return f"{configuration} from repeat {first}"


def _finding(
    space: Space, brackets: Sequence[Bracket], measured: Measurements, rates: _Decisive
) -> Finding:
    target, default = space.target, space.default
    ours = [bracket for bracket in brackets if bracket.target == target]
    decided = _decided(target, brackets)
    fastest = None if decided is None else decided.best
    configurations = {name for bracket in ours for name in bracket.candidates}
    rows = rates.row(fastest, target), rates.row(default, target)
    return Finding(
        target=target,
        default=default,
        default_samples_per_s=rates.rate(default, target),
        fastest=fastest,
        fastest_samples_per_s=rates.rate(fastest, target),
        ratio=None if rows[0] == rows[1] else rates.ratio(*rows),
        candidates=len(configurations),
        left_out=space.left_out,
        failures={n: r for n, r in measured.failures.items() if n in configurations},
        cut_short=any(bracket.cut_short for bracket in ours),
        repeats=tuple(sorted(rates.repeats(default, target) & rates.repeats(fastest, target))),
    )


def _ties_best(finding: Finding, findings: Findings, rates: _Decisive) -> bool:
    """Return whether the best target of the workload may be no faster than this one."""
    best = findings.best(finding.target.workload)
    if best is None or finding.chosen is None or best.chosen is None or best is finding:
        return False
    ratio = rates.ratio(
        rates.row(best.chosen, best.target), rates.row(finding.chosen, finding.target)
    )
    return ratio is not None and ratio.low <= 1


def _decided(target: Target, brackets: Sequence[Bracket]) -> Bracket | None:
    """Return the last bracket of the target that has a winner."""
    ours = [b for b in brackets if b.target == target and b.best is not None]
    return ours[-1] if ours else None
