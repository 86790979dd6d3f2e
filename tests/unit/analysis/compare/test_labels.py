"""Names are short, and no two configurations of a workload have the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.unit.analysis import fabricate

from paceline.analysis.compare.row import local_name, short_name
from paceline.analysis.compare.run import compare_run


def _names(root: Path, ways: list[object], **run: object) -> list[str]:
    rows = compare_run(fabricate.make_run(root, ways, **run)).rows
    return sorted(short_name(row, rows) for row in rows)


def test_each_strategy_says_its_numbers(tmp_path: Path) -> None:
    wide = dataclasses.replace(fabricate.THREADS, threads=8, affinity=None)
    assert _names(tmp_path, [*fabricate.LOCAL_WAYS, wide]) == [
        "local · intraop 1\u00d72",
        "local · sequential",
        "local · shared · hybrid 2·2\u00d71 m4",
        "local · shared · pipeline 2\u00d71 m8",
        "local · shared · processes 2\u00d71",
        "local · threads 2\u00d71",
        "local · threads 2\u00d74",
    ]


def test_nodes_stand_before(tmp_path: Path) -> None:
    ways = [
        dataclasses.replace(w, nodes=3, launcher="mpi", transport="gloo")
        for w in fabricate.LOCAL_WAYS
    ]
    assert _names(tmp_path, ways) == [
        "mpi · gloo · hybrid 3\u00d72·2\u00d71 m4",
        "mpi · gloo · intraop 3\u00d71\u00d72",
        "mpi · gloo · pipeline 3\u00d72\u00d71 m8",
        "mpi · gloo · processes 3\u00d72\u00d71",
        "mpi · gloo · sequential 3\u00d71\u00d71",
        "mpi · gloo · threads 3\u00d72\u00d71",
    ]


def test_what_differs_is_said_only_where_names_would_be_equal(tmp_path: Path) -> None:
    def pipeline(**changes: object) -> object:
        return dataclasses.replace(fabricate.PIPELINE, **changes)

    assert _names(tmp_path / "a", [pipeline(), pipeline(schedule="gpipe")]) == [
        "local · shared · pipeline 2\u00d71 m8 · 1f1b",
        "local · shared · pipeline 2\u00d71 m8 · gpipe",
    ]
    ways = [
        pipeline(),
        pipeline(balance="size"),
        pipeline(split_points=(5,)),
        pipeline(micro_batches=4),
    ]
    assert _names(tmp_path / "b", ways) == [
        "local · shared · pipeline 2\u00d71 m4",
        "local · shared · pipeline 2\u00d71 m8 · size",
        "local · shared · pipeline 2\u00d71 m8 · split at 5",
        "local · shared · pipeline 2\u00d71 m8 · time",
    ]
    two = dataclasses.replace(fabricate.MPI, nodes=2)
    ways = [dataclasses.replace(two, reduction=r) for r in ("flat", "hierarchical")]
    assert _names(tmp_path / "c", ways) == [
        "mpi · mpi · processes 2\u00d72\u00d71 · flat",
        "mpi · mpi · processes 2\u00d72\u00d71 · hierarchical",
    ]


def test_the_same_way_has_one_name_in_all_workloads(tmp_path: Path) -> None:
    cases = [fabricate.Case(), fabricate.Case(workload="simple-big", model="alexnet")]
    assert (
        _names(tmp_path, [fabricate.PIPELINE], cases=cases)
        == ["local · shared · pipeline 2\u00d71 m8"] * 2
    )


def test_what_is_unusual_comes_last(tmp_path: Path) -> None:
    rows = compare_run(fabricate.make_run(tmp_path, [fabricate.MPI])).rows
    setup = dataclasses.replace(rows[0].setup, labels=("cuda", "bf16", "4 MB buckets"))
    row = dataclasses.replace(rows[0], setup=setup)
    assert short_name(row, [row]) == "mpi · mpi · processes 2\u00d71 · cuda · bf16 · 4 MB buckets"


def test_locally_only_a_transport_with_sockets_is_said(tmp_path: Path) -> None:
    gloo = dataclasses.replace(fabricate.PROCESSES, transport="gloo")
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.PROCESSES, gloo])
    rows = compare_run(run).rows
    assert sorted(local_name(row, rows) for row in rows) == [
        "processes 2\u00d71",
        "processes 2\u00d71 over gloo",
        "sequential",
    ]
