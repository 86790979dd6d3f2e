"""The same strategy is found again under other launchers, and orders are compared honestly."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from paceline.analysis.compare.run import compare_run

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from paceline.analysis.compare.local_global import LocalGlobal


def _under(way: Any, launcher: str, **changes: object) -> Any:
    return dataclasses.replace(way, launcher=launcher, **changes)


def _related(fabricate: ModuleType, root: Path, ways: list[object], **run: object) -> LocalGlobal:
    (found,) = compare_run(fabricate.make_run(root, ways, **run)).local_global
    return found


def test_strategies_are_matched_and_their_orders_compared(
    fabricate: ModuleType, tmp_path: Path
) -> None:
    local = [fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.THREADS, fabricate.PROCESSES]
    # under mpi everything is half as fast, but processes, which are slower still
    mpi = [_under(w, "mpi", forward_s=2 * w.forward_s, backward_s=2 * w.backward_s) for w in local]
    mpi[3] = _under(fabricate.PROCESSES, "mpi", transfer_s=0.5)
    found = _related(fabricate, tmp_path, [*local, *mpi], repeats=2)
    (relation,) = found.relations
    assert (relation.launcher, relation.nodes, relation.strategies) == ("mpi", 1, 4)
    assert ".processes." in relation.fastest_alone
    assert ".intraop." in relation.fastest_there
    assert relation.same_fastest is False
    # alone: processes, intraop, threads, sequential; there: intraop, threads, processes, sequential
    assert relation.rank_correlation == pytest.approx(1 - 6 * (4 + 1 + 1) / (4 * 15))
    sequential = next(li for li in found.lines if ".sequential." in li.configuration)
    assert sequential.elsewhere[0].ratio is not None
    assert sequential.elsewhere[0].ratio.median == pytest.approx(0.635 / 1.235)


def test_the_fastest_transport_counts_and_nodes_are_places_of_their_own(
    fabricate: ModuleType, tmp_path: Path
) -> None:
    ways = [
        fabricate.SEQUENTIAL,
        fabricate.PROCESSES,
        _under(fabricate.SEQUENTIAL, "mpi"),
        _under(fabricate.PROCESSES, "mpi"),
        _under(fabricate.PROCESSES, "mpi", transport="gloo", transfer_s=0.2),
        _under(fabricate.SEQUENTIAL, "mpi", nodes=2, transport="mpi"),
        _under(fabricate.PROCESSES, "mpi", nodes=2, transport="mpi"),
    ]
    found = _related(fabricate, tmp_path, ways)
    assert [(r.launcher, r.nodes) for r in found.relations] == [("mpi", 1), ("mpi", 2)]
    processes = next(li for li in found.lines if ".processes." in li.configuration)
    there = processes.under("mpi", 1)
    assert there is not None
    assert ".mpi.shared." in there.configuration
    assert all(r.rank_correlation is None for r in found.relations)  # of two strategies


def test_pipelines_of_other_micro_batches_are_other_strategies(
    fabricate: ModuleType, tmp_path: Path
) -> None:
    ways = [
        fabricate.SEQUENTIAL,
        fabricate.PIPELINE,
        _under(fabricate.SEQUENTIAL, "mpi"),
        _under(fabricate.PIPELINE, "mpi", micro_batches=2),
    ]
    assert compare_run(fabricate.make_run(tmp_path, ways)).local_global == ()


def test_a_tie_for_the_fastest_is_left_open(fabricate: ModuleType, tmp_path: Path) -> None:
    twin = dataclasses.replace(fabricate.PROCESSES, local_strategy="threads", ranks=1, threads=2)
    twin = dataclasses.replace(twin, transport="none", thread_replicas=2, transfer_s=0.0081)
    ways = [fabricate.SEQUENTIAL, fabricate.PROCESSES, twin]
    ways += [_under(w, "mpi") for w in ways]
    found = _related(fabricate, tmp_path, ways, repeats=3, jitter=0.05)
    assert found.relations[0].same_fastest is None


def test_what_is_another_training_is_left_out(fabricate: ModuleType, tmp_path: Path) -> None:
    broken = _under(fabricate.PROCESSES, "mpi", weights_error=1.0, gradient_error=1.0)
    ways = [fabricate.SEQUENTIAL, fabricate.PROCESSES, _under(fabricate.SEQUENTIAL, "mpi"), broken]
    assert compare_run(fabricate.make_run(tmp_path, ways)).local_global == ()


def test_precisions_are_not_mixed(fabricate: ModuleType, tmp_path: Path) -> None:
    fp32 = [fabricate.SEQUENTIAL, fabricate.PROCESSES]
    fp32 += [_under(w, "mpi") for w in fp32]
    bf16 = [dataclasses.replace(w, precision="bf16") for w in fp32]
    comparison = compare_run(fabricate.make_run(tmp_path, [*fp32, *bf16]))
    assert {f.precision: f.relations[0].strategies for f in comparison.local_global} == {
        "fp32": 2,
        "bf16": 2,
    }
    assert len(comparison.to_json()["local_global"]) == 2
