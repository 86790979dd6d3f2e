"""Unequal resources are said in a sentence, equal ones are not mentioned."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paceline.analysis.reading import load_run
from paceline.analysis.resources import flags_between, trial_flags

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


def test_equal_trials_have_no_flags(fabricate: ModuleType, tmp_path: Path) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.MPI, fabricate.SPARK]
    records = load_run(fabricate.make_run(tmp_path, ways, repeats=2))
    assert [trial_flags(r) for r in records] == [[]] * 8
    assert flags_between(records) == []


def test_other_threads_than_planned_are_flagged(fabricate: ModuleType, tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SPARK])
    (files,) = (f for _, f in run.trials())
    fabricate.edit_json(files.rank(1).environment, intraop_threads=2)
    sentences = trial_flags(load_run(run)[0])
    assert "its ranks have different intra-op threads (rank 0: 1; rank 1: 2)" in sentences
    assert "planned 1 threads a rank, its ranks had 1, 2" in sentences


def test_too_few_cores_are_flagged_unless_asked_for(fabricate: ModuleType, tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [dataclasses.replace(fabricate.MPI, affinity=(0,))])
    (sentence,) = trial_flags(load_run(run)[0])
    assert "planned 2 cores on node0, its ranks could run on 1 only" in sentence


def test_more_cores_than_planned_are_flagged(fabricate: ModuleType, tmp_path: Path) -> None:
    way = dataclasses.replace(fabricate.SEQUENTIAL, affinity=(0, 1))
    (sentence,) = trial_flags(load_run(fabricate.make_run(tmp_path, [way]))[0])
    assert "planned 1 cores on node0, its ranks could run on 2" in sentence


def test_trials_of_one_placement_with_other_settings_are_flagged_once(
    fabricate: ModuleType, tmp_path: Path
) -> None:
    spark = dataclasses.replace(fabricate.SPARK, omp={"OMP_NUM_THREADS": "2"})
    run = fabricate.make_run(tmp_path, [fabricate.MPI, fabricate.TORCHRUN, spark], repeats=3)
    (sentence,) = flags_between(load_run(run))
    assert sentence == (
        "trials of 1 x 2 ranks x 1 threads had different OpenMP settings: "
        "OMP_NUM_THREADS=1 (mpi mpi processes, torchrun gloo processes); "
        "OMP_NUM_THREADS=2 (spark gloo processes)"
    )
