"""What a search found: of every strategy the default and the best, and whether that is more than
noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.analysis.statistics import median_interval, ratio_interval, run_noise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.analysis.statistics import Interval, RunNoise
    from paceline.plan.trial import Trial
    from paceline.spec import LocalStrategy
    from paceline.tune.candidates import LeftOut, StrategySpace
    from paceline.tune.search import Contest, Measurements

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFinding:
    """One strategy on one workload. None is what could not be measured."""

    workload: str
    strategy: LocalStrategy
    default: Trial | None
    default_images_per_s: Interval | None
    fastest: Trial | None  # as measured
    fastest_images_per_s: Interval | None
    ratio: Interval | None  # of the fastest to the default, within repeats
    candidates: int
    left_out: tuple[LeftOut, ...]
    failures: Mapping[str, str]  # by configuration
    cut_short: bool  # the time was spent before all was measured

    @property
    def tie(self) -> bool:
        """Whether the fastest may be no faster than the default."""
        return self.ratio is not None and self.ratio.low <= 1

    @property
    def chosen(self) -> Trial | None:
        """The fastest, but the default where that is as good."""
        return self.default if self.tie else self.fastest

    @property
    def chosen_images_per_s(self) -> Interval | None:
        return self.default_images_per_s if self.tie else self.fastest_images_per_s

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "local_strategy": self.strategy,
            "default": _configuration(self.default),
            "default_images_per_s": _interval(self.default_images_per_s),
            "fastest": _configuration(self.fastest),
            "fastest_images_per_s": _interval(self.fastest_images_per_s),
            "ratio": _interval(self.ratio),
            "tie": self.tie,
            "chosen": _configuration(self.chosen),
            "candidates": self.candidates,
            "left_out": [{"what": o.what, "reason": o.reason} for o in self.left_out],
            "failures": dict(self.failures),
            "cut_short": self.cut_short,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Of all workloads and strategies."""

    strategies: tuple[StrategyFinding, ...]

    def of(self, workload: str, strategy: LocalStrategy) -> StrategyFinding | None:
        wanted = (workload, strategy)
        return next((f for f in self.strategies if (f.workload, f.strategy) == wanted), None)

    def best(self, workload: str) -> StrategyFinding | None:
        """The workload's fastest strategy; None if none could be measured."""
        measured = [
            (found.chosen_images_per_s.median, found)
            for found in self.strategies
            if found.workload == workload and found.chosen_images_per_s is not None
        ]
        return max(measured, key=lambda pair: pair[0])[1] if measured else None

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(f.workload for f in self.strategies))

    def to_json(self) -> dict[str, Any]:
        best = {name: self.best(name) for name in self.workloads}
        return {
            "schema": SCHEMA,
            "strategies": [found.to_json() for found in self.strategies],
            "best": {n: None if f is None else _configuration(f.chosen) for n, f in best.items()},
        }


def findings_of(
    spaces: Sequence[StrategySpace], contests: Sequence[Contest], measured: Measurements
) -> Findings:
    """Judge what was measured; run-to-run noise is taken from all trials of a workload."""
    noises = {space.workload: _noise(space.workload, contests, measured) for space in spaces}
    return Findings(
        strategies=tuple(
            _finding(space, contests, measured, noises[space.workload]) for space in spaces
        )
    )


def _finding(
    space: StrategySpace,
    contests: Sequence[Contest],
    measured: Measurements,
    noise: RunNoise | None,
) -> StrategyFinding:
    ours = [c for c in contests if (c.workload, c.strategy) == (space.workload, space.strategy)]
    fastest = next((c.best for c in reversed(ours) if c.best is not None), None)
    configurations = {name for contest in ours for name in contest.candidates}
    return StrategyFinding(
        workload=space.workload,
        strategy=space.strategy,
        default=space.default,
        default_images_per_s=_speed(space.default, measured, noise),
        fastest=fastest,
        fastest_images_per_s=_speed(fastest, measured, noise),
        ratio=_ratio(fastest, space.default, measured, noise),
        candidates=len(configurations),
        left_out=space.left_out,
        failures={n: r for n, r in measured.failures.items() if n in configurations},
        cut_short=any(contest.cut_short for contest in ours),
    )


def _noise(workload: str, contests: Sequence[Contest], measured: Measurements) -> RunNoise | None:
    names = {name for c in contests if c.workload == workload for name in c.candidates}
    return run_noise([measured.series[name] for name in sorted(names & measured.series.keys())])


def _speed(trial: Trial | None, measured: Measurements, noise: RunNoise | None) -> Interval | None:
    if trial is None or trial.configuration in measured.failures:
        return None
    return median_interval(measured.series.get(trial.configuration, {}), noise)


def _ratio(
    fastest: Trial | None, default: Trial | None, measured: Measurements, noise: RunNoise | None
) -> Interval | None:
    if fastest is None or default is None or fastest.configuration == default.configuration:
        return None
    if default.configuration in measured.failures:
        return None
    return ratio_interval(
        measured.series.get(fastest.configuration, {}),
        measured.series.get(default.configuration, {}),
        noise,
    )


def _configuration(trial: Trial | None) -> str | None:
    return None if trial is None else trial.configuration


def _interval(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else interval.to_json()
