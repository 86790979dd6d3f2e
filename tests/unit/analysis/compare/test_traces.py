"""Traces that go along with the global speedup: strategies are the units of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.analysis.compare.places import Place
from paceline.analysis.compare.traces import TraceRelations, relate_traces
from paceline.analysis.statistics.rates import RepeatRate
from paceline.analysis.trial.usage import HostUsage

TWO = Place(launcher="mpi", transport="gloo", nodes=2)
_SENT = (5, 2, 6, 0, 3, 1, 4)  # in no order
FOUR = Place(launcher="mpi", transport="gloo", nodes=4)
SPARK = Place(launcher="spark", transport="gloo", nodes=2)


def _trials(usages: list[HostUsage]) -> list[Any]:
    return [SimpleNamespace(usage=usage, steps_per_s=RepeatRate(log_rate=0.0)) for usage in usages]


def _related(
    strategies: int, places: tuple[Place, ...] = (TWO, FOUR), **less: int
) -> TraceRelations:
    """Relate traces of made-up strategies, of which the later ones are faster on several nodes.

    The number of threads rises with the global speedup. CPU use rises with the local speedup, whose
    order is another one. Memory differs between repeats only; context switches were not measured.
    less: fewer strategies at a launcher's places.
    """
    observed: dict[Place, dict[str, tuple[str, float, float]]] = {}
    trials: dict[str, Any] = {}
    for place in places:
        for n in range(less.get(place.launcher, strategies)):
            name, local = f"{n} at {place.launcher} {place.nodes}", float(n * 3 % 7)
            observed.setdefault(place, {})[f"{n}"] = name, local, local + 2 * n
            trials[name] = _trials(
                [
                    HostUsage(
                        cpu_percent=40 + 2 * local,
                        threads_median=10 + n,
                        ram_percent_mean=30 + 2.5 * ((n + repeat) % 2),
                        iowait_percent=0.1 * n,
                        network_sent_bytes_per_s=1e6 * _SENT[n],
                    )
                    for repeat in range(3)
                ]
            )
    found = relate_traces(observed, trials)
    assert found is not None
    return found


def test_trace_of_the_global_speedup_is_found_beyond_the_local_one() -> None:
    found = _related(7)
    assert [scope.nodes for scope in found.scopes] == [None, 2, 4]
    relations = {each.trace: each for each in found.scopes[0].relations}
    threads = relations["threads_median"]
    assert threads.is_significant
    assert threads.beyond_local == pytest.approx(0.97, abs=0.05)
    # CPU use has the order of the local speedup, so nothing of it is left beyond that
    assert relations["cpu_percent"].correlation > 0.1
    assert relations["cpu_percent"].beyond_local is None
    assert not relations["sent_bytes_per_step"].is_significant
    assert relations["sent_bytes_per_step"].strategies_needed > 7


def test_nothing_is_said_of_traces_without_differences() -> None:
    found = _related(7)
    assert found.not_varying == ("ram_percent_mean", "iowait_percent")
    assert found.not_measured == ("context_switches_per_s",)
    named = {each.trace for scope in found.scopes for each in scope.relations}
    assert named == {"cpu_percent", "threads_median", "sent_bytes_per_step"}


def test_four_strategies_can_show_nothing_with_any_number_of_places() -> None:
    found = _related(4)
    assert found.least_p_value == pytest.approx(2 / 24)
    assert found.least_strategies == 5
    assert not any(each.is_significant for scope in found.scopes for each in scope.relations)


def test_places_with_fewer_strategies_are_left_out() -> None:
    found = _related(6, (TWO, SPARK, FOUR), spark=2)
    assert found.strategies == 6
    assert [scope.places for scope in found.scopes] == [2, 1, 1]


def test_without_strategies_there_is_no_relation() -> None:
    assert relate_traces({}, {}) is None
