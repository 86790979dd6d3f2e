"""Explain the differences within one run: a pair, or the fastest configuration and all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from paceline.analysis.compare.ranking import Ranking, rankings
from paceline.analysis.compare.result import Comparison
from paceline.analysis.explain.explanation import Explanation, explain
from paceline.analysis.explain.parts import ExplainedTrials
from paceline.analysis.statistics.fastest import Fastest
from paceline.analysis.statistics.rates import RunRates
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.base.errors import NotComparable, UsageError
from paceline.plan.trials.selection import matching, no_match

_THREADS = 4  # reading, Polars and NumPy release the interpreter lock most of the time


class WorkloadExplainer:
    """Explains pairs of configurations of one workload; each configuration is read once.

    Two configurations differ if the ranking by speed says so: beside the fastest one, those that it
    does not separate from it do not differ, and for all pairs the interval of their ratio decides.
    """

    def __init__(
        self,
        trials: Mapping[str, Sequence[TrialAnalysis]],
        rates: RunRates,
        fastest: Fastest,
    ) -> None:
        """trials: of the workload, by configuration. rates, fastest: of the ranking by speed."""
        self._trials, self._rates, self._fastest = trials, rates, fastest
        self._sides: dict[str, ExplainedTrials] = {}

    def read(self, names: Sequence[str]) -> None:
        """Read several configurations at once."""
        with ThreadPoolExecutor(_THREADS) as pool:
            self._sides |= zip(names, pool.map(self._side, names), strict=True)

    def explain(self, first: str, second: str) -> Explanation:
        self.read([name for name in (first, second) if name not in self._sides])
        found = self._fastest
        others = {first, second} - {found.leader}
        return explain(
            self._sides[first],
            self._sides[second],
            self._rates.log_ratio(first, second),
            may_differ=len(others) > 1 or not others & set(found.not_separated),
        )

    def _side(self, name: str) -> ExplainedTrials:
        return ExplainedTrials(name, [trial.record for trial in self._trials.get(name, ())])


def explain_pair(comparison: Comparison, first: str, second: str) -> Explanation:
    """Explain the difference of two configurations.

    first, second: names, or shell patterns that match one configuration each.
    Raises UsageError if a pattern matches none or several, NotComparable if they belong to
    different workloads or have no steps.
    """
    names = [configuration_like(comparison, pattern) for pattern in (first, second)]
    if names[0] == names[1]:
        raise UsageError(
            f"{first!r} and {second!r}: expected two configurations, both are {names[0]}; name "
            "another one"
        )
    first_workload, second_workload = (comparison.row(name).workload for name in names)
    if first_workload != second_workload:
        raise NotComparable(
            f"expected two configurations of one workload, got {first_workload} and "
            f"{second_workload}; their steps are different work"
        )
    return _explainer(comparison, first_workload).explain(*names)


def explain_workload(
    comparison: Comparison, workload: str, most: int | None = None
) -> list[Explanation]:
    """Explain the fastest configuration of a workload against each of the others, in their order.

    Configurations that are not ranked are left out: their steps are other work, or were not
    measured. most: the number of explanations, None for all.
    """
    ranked = [row.configuration for row in comparison.rows_of(workload) if row.ranked]
    ranked = ranked if most is None else ranked[: most + 1]
    if len(ranked) < 2:
        return []
    explainer = _explainer(comparison, workload)
    explainer.read(ranked)
    return [explainer.explain(ranked[0], other) for other in ranked[1:]]


def speed_ranking(comparison: Comparison, workload: str) -> Ranking:
    """Rank the configurations of a workload by speed, also where it has a target."""
    by_speed, _ = rankings(_trials_of(comparison, workload), comparison.stopping)
    return by_speed


def _explainer(comparison: Comparison, workload: str) -> WorkloadExplainer:
    ranking = speed_ranking(comparison, workload)
    ranked = (row.configuration for row in comparison.rows_of(workload) if row.ranked)
    trials = _trials_of(comparison, workload)
    return WorkloadExplainer(trials, ranking.rates, ranking.fastest(ranked))


def _trials_of(comparison: Comparison, workload: str) -> dict[str, Sequence[TrialAnalysis]]:
    names = [row.configuration for row in comparison.rows_of(workload)]
    return {name: comparison.trials[name] for name in names if name in comparison.trials}


def configuration_like(comparison: Comparison, pattern: str) -> str:
    """Return the one configuration that matches a shell pattern.

    Raises UsageError if none or several match.
    """
    names = [row.configuration for row in comparison.rows]
    found = matching(names, pattern)
    if not found:
        raise no_match("configuration", [pattern], names)
    if len(found) > 1:
        listed = "".join(f"\n  - {name}" for name in found)
        raise UsageError(f"{pattern!r}: expected one configuration, it matches:{listed}")
    return found[0]
