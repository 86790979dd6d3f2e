"""The same strategy is found again under other launchers, and orders are compared honestly."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.compare.local_global import LocalGlobal, relate_figures
from paceline.analysis.compare.row import RowSpeed
from paceline.analysis.compare.run import compare_run
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.trial.usage import HostUsage
from paceline.show.report.strategies import node_figure_sentences


def _under(way: Any, launcher: str, **changes: object) -> Any:
    return dataclasses.replace(way, launcher=launcher, **changes)


def _related(root: Path, ways: list[object], **run: object) -> LocalGlobal:
    (found,) = compare_run(fabricate.make_run(root, ways, **run)).local_global
    return found


def test_strategies_are_matched_and_their_orders_compared(tmp_path: Path) -> None:
    local = [fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.THREADS, fabricate.PROCESSES]
    # under mpi everything is half as fast, but processes, which are slower still
    mpi = [_under(w, "mpi", forward_s=2 * w.forward_s, backward_s=2 * w.backward_s) for w in local]
    mpi[3] = _under(fabricate.PROCESSES, "mpi", transfer_s=0.5)
    found = _related(tmp_path, [*local, *mpi], repeats=2)
    (relation,) = found.relations
    assert (relation.launcher, relation.nodes, relation.strategies) == ("mpi", 1, 4)
    assert ".processes." in relation.fastest_alone
    assert ".intraop." in relation.fastest_there
    assert relation.same_fastest is False
    # alone: processes, intraop, threads, sequential; there: intraop, threads, processes, sequential
    assert relation.rank_correlation == pytest.approx(1 - 6 * (4 + 1 + 1) / (4 * 15))
    sequential = next(li for li in found.lines if ".sequential." in li.configuration)
    assert sequential.elsewhere[0].ratio.estimate == pytest.approx(0.635 / 1.235)


def test_correlations_of_several_places_are_tested_together(tmp_path: Path) -> None:
    """Five strategies in the same order: p = 2 / 5! is significant alone, not among four places."""
    local = [
        dataclasses.replace(way, forward_s=0.5 - 0.09 * n, transfer_s=0.0)
        for n, way in enumerate(fabricate.LOCAL_WAYS[:5])
    ]
    places = [("mpi", 1), ("mpi", 2), ("spark", 1), ("torchrun", 1)]
    for count, is_significant in ((1, True), (4, False)):
        there = [_under(w, name, nodes=n) for name, n in places[:count] for w in local]
        found = _related(tmp_path / str(count), [*local, *there])
        assert [relation.p_value for relation in found.relations] == [pytest.approx(1 / 60)] * count
        assert {relation.is_significant for relation in found.relations} == {is_significant}


def test_the_fastest_transport_counts_and_nodes_are_places_of_their_own(tmp_path: Path) -> None:
    ways = [
        fabricate.SEQUENTIAL,
        fabricate.PROCESSES,
        _under(fabricate.SEQUENTIAL, "mpi"),
        _under(fabricate.PROCESSES, "mpi"),
        _under(fabricate.PROCESSES, "mpi", transport="gloo", transfer_s=0.2),
        _under(fabricate.SEQUENTIAL, "mpi", nodes=2, transport="mpi"),
        _under(fabricate.PROCESSES, "mpi", nodes=2, transport="mpi"),
    ]
    found = _related(tmp_path, ways)
    assert [(r.launcher, r.nodes) for r in found.relations] == [("mpi", 1), ("mpi", 2)]
    processes = next(li for li in found.lines if ".processes." in li.configuration)
    there = processes.under("mpi", 1)
    assert ".mpi.shared." in there.configuration
    assert all(r.rank_correlation is None for r in found.relations)  # of two strategies


def test_pipelines_of_other_micro_batches_are_other_strategies(tmp_path: Path) -> None:
    ways = [
        fabricate.SEQUENTIAL,
        fabricate.PIPELINE,
        _under(fabricate.SEQUENTIAL, "mpi"),
        _under(fabricate.PIPELINE, "mpi", micro_batches=2),
    ]
    assert compare_run(fabricate.make_run(tmp_path, ways)).local_global == ()


def test_a_tie_for_the_fastest_is_left_open(tmp_path: Path) -> None:
    twin = dataclasses.replace(fabricate.PROCESSES, local_strategy="threads", ranks=1, threads=2)
    twin = dataclasses.replace(twin, transport="none", thread_replicas=2, transfer_s=0.0081)
    ways = [fabricate.SEQUENTIAL, fabricate.PROCESSES, twin]
    ways += [_under(w, "mpi") for w in ways]
    found = _related(tmp_path, ways, repeats=3, jitter=0.05)
    assert found.relations[0].same_fastest is None


def test_what_is_another_training_is_left_out(tmp_path: Path) -> None:
    broken = _under(fabricate.PROCESSES, "mpi", weights_error=1.0, gradient_error=1.0)
    ways = [fabricate.SEQUENTIAL, fabricate.PROCESSES, _under(fabricate.SEQUENTIAL, "mpi"), broken]
    assert compare_run(fabricate.make_run(tmp_path, ways)).local_global == ()


def test_precisions_are_not_mixed(tmp_path: Path) -> None:
    fp32 = [fabricate.SEQUENTIAL, fabricate.PROCESSES]
    fp32 += [_under(w, "mpi") for w in fp32]
    bf16 = [dataclasses.replace(w, precision="bf16") for w in fp32]
    comparison = compare_run(fabricate.make_run(tmp_path, [*fp32, *bf16]))
    assert {f.precision: f.relations[0].strategies for f in comparison.local_global} == {
        "fp32": 2,
        "bf16": 2,
    }
    assert len(comparison.to_json()["local_global"]) == 2


def figures_of(cpu: list[float | None], speedups: list[float | None]) -> dict[str, Any]:
    rows = [
        SimpleNamespace(
            usage=HostUsage(
                cpu_percent=value,
                iowait_percent=1.0,  # has no order
                ram_percent_mean=(value or 0.0) % 7,
            ),
            speed=RowSpeed(
                speedup=None if speedup is None else Interval(estimate=speedup, low=0, high=9)
            ),
        )
        for value, speedup in zip(cpu, speedups, strict=True)
    ]
    return {each.figure: each for each in relate_figures("tiny", rows)}  # type: ignore[arg-type]


def test_figure_of_the_nodes_that_goes_along_with_the_speedup_is_significant() -> None:
    speedups: list[float | None] = [1.0, 1.2, 1.1, 1.5, 1.6, 1.7, 2.0, None]
    found = figures_of([10, 20, 15, 30, 31, 32, 50, 99], speedups)
    cpu = found["cpu_percent"]
    assert (cpu.configurations, cpu.rank_correlation) == (7, pytest.approx(1.0))
    assert cpu.p_value == pytest.approx(2 / math.factorial(7))
    assert cpu.is_significant
    assert not found["ram_percent_mean"].is_significant
    assert "iowait_percent" not in found
    assert "threads_median" not in found


def test_a_few_configurations_show_nothing() -> None:
    found = figures_of([10, 20, 30, 40], [1.0, 1.2, 1.3, 1.4])
    assert not found["cpu_percent"].is_significant
    assert figures_of([10, 20], [1.0, 1.2]) == {}


def test_report_names_a_figure_only_if_it_is_significant(tmp_path: Path) -> None:
    names = ("SEQUENTIAL", "INTRAOP", "THREADS", "PROCESSES", "MPI", "TORCHRUN", "SPARK")
    ways = [
        dataclasses.replace(getattr(fabricate, name), forward_s=0.5 - 0.05 * n, cpu_percent=40 + n)
        for n, name in enumerate(names)
    ]
    comparison = compare_run(fabricate.make_run(tmp_path, ways))
    (sentence,) = node_figure_sentences(comparison, "tiny")
    assert "Over all 7 equivalent configurations, the CPU use of the nodes and speedup" in sentence
    assert {each.figure for each in comparison.node_figures} > {"cpu_percent"}
