"""Traces of the hosts that go along with the global speedup of local strategies.

The units are strategies: what one strategy does at several places is not independent, so they are
permuted as a whole, and only within a place. With few strategies nothing can be significant,
however many repeats and places there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from paceline.analysis.compare.places import Place
from paceline.analysis.statistics.intervals import (
    holm,
    least_p_value,
    least_units,
    rank_correlation,
    units_to_find,
)
from paceline.analysis.trial_analysis import TrialAnalysis

Observed = Mapping[Place, Mapping[str, tuple[str, float, float]]]
Values = Mapping[str, Sequence[float]]  # of the repeats, by configuration

_LEAST_STRATEGIES = 4  # with three, nothing is left beside the local speedup
_SPREADS = 2.0  # between repeats: a smaller range of a trace is chance
_LEAST_POINTS = 1.0  # of traces in percent; a smaller range makes no step longer
_LEAST_SHARE = 0.01  # of other traces: of the largest value


def _bytes_per_step(trial: TrialAnalysis) -> float | None:
    sent, steps = trial.usage.network_sent_bytes_per_s, trial.steps_per_s
    return None if sent is None or steps is None else sent / steps.rate


TRACES: dict[str, Callable[[TrialAnalysis], float | None]] = {
    "cpu_percent": lambda trial: trial.usage.cpu_percent,
    "ram_percent_mean": lambda trial: trial.usage.ram_percent_mean,
    "threads_median": lambda trial: trial.usage.threads_median,
    "context_switches_per_s": lambda trial: trial.usage.context_switches_per_s,
    "iowait_percent": lambda trial: trial.usage.iowait_percent,
    "sent_bytes_per_step": _bytes_per_step,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRelation:
    """Rank correlation of one trace and the global speedup."""

    trace: str  # of TRACES
    correlation: float | None  # None: one of them has no order
    beyond_local: float | None  # the same, with the local speedup taken out of both
    p_value: float | None  # of beyond_local, by a permutation test
    is_significant: bool  # at 5 %, among all traces (Holm)
    strategies_needed: int | None  # with which beyond_local would be found; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceScope:
    """The relations over all places, or over those with one number of nodes."""

    nodes: int | None  # None: all
    places: int
    relations: tuple[TraceRelation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRelations:
    """All traces of one workload's strategies on several nodes."""

    strategies: int  # that ran at all of the places
    least_p_value: float  # that so many strategies can have
    least_strategies: int  # from which on a trace could be significant
    scopes: tuple[TraceScope, ...]  # all places first
    not_measured: tuple[str, ...]  # traces
    not_varying: tuple[str, ...]  # traces that do not differ by more than repeats do


def relate_traces(
    observed: Observed, trials: Mapping[str, Sequence[TrialAnalysis]]
) -> TraceRelations | None:
    """Relate each trace to the global speedup; None for fewer than two strategies.

    observed: configuration, local and global speedup by place and strategy.
    """
    strategies, places = _complete(observed)
    if len(strategies) < 2:
        return None
    used = [observed[place][name][0] for place in places for name in strategies]
    read = {trace: _values(of, used, trials) for trace, of in TRACES.items()}
    values = {trace: found for trace, found in read.items() if found is not None}
    blocks = [[observed[place][name][0] for name in strategies] for place in places]
    varying = [t for t, found in values.items() if any(_varies(t, found, b) for b in blocks)]
    numbers = sorted({place.nodes for place in places})
    scopes = [None, *numbers] if len(numbers) > 1 else [None]
    tests = max(len(varying), 1)
    return TraceRelations(
        strategies=len(strategies),
        least_p_value=least_p_value(len(strategies)),
        least_strategies=max(least_units(tests), _LEAST_STRATEGIES),
        scopes=tuple(
            _scope(
                nodes,
                {p: observed[p] for p in places if nodes in (None, p.nodes)},
                strategies,
                {trace: values[trace] for trace in varying},
            )
            for nodes in scopes
        ),
        not_measured=tuple(trace for trace in TRACES if trace not in values),
        not_varying=tuple(trace for trace in values if trace not in varying),
    )


def _complete(observed: Observed) -> tuple[list[str], list[Place]]:
    """Return the most strategies that ran at one place, and all places where these ran."""
    sets = [frozenset(at) for at in observed.values()]
    if not sets:
        return [], []
    most = max(sets, key=lambda names: (len(names), sum(names <= other for other in sets)))
    return sorted(most), [place for place, at in observed.items() if most <= at.keys()]


def _values(
    trace_of: Callable[[TrialAnalysis], float | None],
    configurations: Sequence[str],
    trials: Mapping[str, Sequence[TrialAnalysis]],
) -> Values | None:
    """Return the values of the repeats; None unless each configuration has one."""
    found = {
        name: [value for t in trials[name] if (value := trace_of(t)) is not None]
        for name in configurations
    }
    return found if all(found.values()) else None


def _varies(trace: str, values: Values, block: Sequence[str]) -> bool:
    """Tell whether configurations differ by more than their repeats do."""
    middle = [median(values[name]) for name in block]
    between = max(middle) - min(middle)
    within = median(max(values[name]) - min(values[name]) for name in block)
    least = _LEAST_POINTS if "percent" in trace else _LEAST_SHARE * max(map(abs, middle))
    return between > max(_SPREADS * within, least)


def _scope(
    nodes: int | None, observed: Observed, strategies: Sequence[str], values: Mapping[str, Values]
) -> TraceScope:
    local = np.array([next(iter(observed.values()))[name][1] for name in strategies])
    speedups = np.array([[at[name][2] for name in strategies] for at in observed.values()])
    relations, p_values = [], {}
    for trace, by_name in values.items():
        table = np.array(
            [[median(by_name[at[n][0]]) for n in strategies] for at in observed.values()]
        )
        plain = rank_correlation(table, speedups)
        beyond = rank_correlation(table, speedups, given=local)
        if beyond is not None:
            p_values[trace] = beyond.p_value
        needed = None if beyond is None else units_to_find(beyond.correlation, len(values), 1)
        relations.append(
            TraceRelation(
                trace=trace,
                correlation=None if plain is None else plain.correlation,
                beyond_local=None if beyond is None else beyond.correlation,
                p_value=p_values.get(trace),
                is_significant=False,
                strategies_needed=needed,
            )
        )
    significant = holm(p_values)
    return TraceScope(
        nodes=nodes,
        places=len(observed),
        relations=tuple(
            replace(each, is_significant=each.trace in significant) for each in relations
        ),
    )
