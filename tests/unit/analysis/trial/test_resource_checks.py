"""Unequal resources are said in a sentence, equal ones are not mentioned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.unit.analysis import fabricate

from paceline.analysis.trial.reading import load_run, load_trial
from paceline.analysis.trial.resource_checks import (
    allocated_cores_flags,
    clock_flags,
    flags_between,
    shared_machine_flags,
    trial_flags,
    turns_flags,
)
from paceline.measure.records.rows import RankStatus


def test_equal_trials_have_no_flags(tmp_path: Path) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.MPI, fabricate.SPARK]
    records = load_run(fabricate.make_run(tmp_path, ways, repeats=2))
    assert [trial_flags(r) for r in records] == [[]] * 8
    assert flags_between(records) == []


def test_unequal_ranks_are_flagged(tmp_path):
    files = fabricate.make_one(tmp_path, fabricate.SPARK)
    fabricate.edit_json(files.rank(1).environment, intraop_threads=2)
    assert trial_flags(load_trial(files)) == [
        "its ranks have different intra-op threads (rank 0: 1; rank 1: 2)"
    ]


def test_more_cores_than_planned_are_flagged(tmp_path):
    files = fabricate.make_one(tmp_path, fabricate.SEQUENTIAL, affinity=(0, 1))
    (sentence,) = trial_flags(load_trial(files))
    assert "planned 1 cores on node0, found 2" in sentence


def test_trials_of_one_placement_with_other_settings_are_flagged_once(tmp_path: Path) -> None:
    spark = dataclasses.replace(fabricate.SPARK, omp={"OMP_NUM_THREADS": "2"})
    run = fabricate.make_run(tmp_path, [fabricate.MPI, fabricate.TORCHRUN, spark], repeats=3)
    (sentence,) = flags_between(load_run(run))
    assert sentence == (
        "trials of 1 x 2 ranks x 1 threads had different OpenMP settings: "
        "OMP_NUM_THREADS=1 (mpi mpi processes, torchrun gloo processes); "
        "OMP_NUM_THREADS=2 (spark gloo processes)"
    )


def test_strategies_of_one_budget_have_no_flags(tmp_path: Path) -> None:
    records = load_run(fabricate.make_run(tmp_path, fabricate.LOCAL_WAYS))
    assert [trial_flags(r) for r in records] == [[]] * len(fabricate.LOCAL_WAYS)
    assert flags_between(records) == []
    assert allocated_cores_flags(records) == []


def test_unequal_allocated_cores_are_flagged(tmp_path: Path) -> None:
    wide = dataclasses.replace(fabricate.HYBRID, allocated_cores=None, affinity=None)
    ways = [fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.THREADS, wide]
    (sentence,) = allocated_cores_flags(load_run(fabricate.make_run(tmp_path, ways, repeats=2)))
    assert sentence == (
        "workload tiny: local intraop and local threads had 2 cores, local hybrid had 4 cores: "
        "allocated cores differ"
    )


def test_more_nodes_are_no_other_budget(tmp_path: Path) -> None:
    two = dataclasses.replace(fabricate.MPI, nodes=2)
    records = load_run(fabricate.make_run(tmp_path, [fabricate.INTRAOP, fabricate.MPI, two]))
    assert allocated_cores_flags(records) == []


def record_of(*ranks: tuple[str, str | None]) -> Any:
    """Return a trial whose ranks have these hosts and boots."""
    statuses = [
        RankStatus(
            rank=rank, host=host, pid=7, process_started_unix_s=0.0, state="done", boot_id=boot
        )
        for rank, (host, boot) in enumerate(ranks)
    ]
    return SimpleNamespace(ranks=[SimpleNamespace(status=status) for status in statuses])


def test_hosts_that_are_one_machine_are_named_once() -> None:
    twice = [record_of(("pod-a", "1"), ("pod-b", "1"), ("pod-c", "2"))] * 2
    (sentence,) = shared_machine_flags(twice)
    assert sentence.startswith("hosts pod-a, pod-b of 2 trials are parts of one machine")


def test_several_machines_and_several_ranks_of_one_are_not_flagged() -> None:
    several = record_of(("a", "1"), ("a", "1"), ("b", "2"))
    unknown = record_of(("a", "unknown"), ("b", "unknown"))
    older = record_of(("a", None), ("b", None))
    assert shared_machine_flags([several, unknown, older]) == []


def clocks_of(*ranks: tuple[str, float, float]) -> Any:
    """Return a trial whose ranks have these hosts, clock offsets and uncertainties."""
    return SimpleNamespace(
        ranks=[
            SimpleNamespace(environment=SimpleNamespace(host=h, clock_offset_s=o, clock_error_s=e))
            for h, o, e in ranks
        ]
        + [SimpleNamespace(environment=None)]
    )


def test_host_with_another_clock_is_named_once() -> None:
    trials = [clocks_of(("a", 0.0, 0.0), ("b", -30.0, 1e-4)), clocks_of(("b", 2.0, 1e-4))]
    (sentence,) = clock_flags(trials)
    assert sentence.startswith("the clock of host b differs by 30 s from that of rank 0")


def test_clock_within_its_uncertainty_is_not_flagged() -> None:
    assert clock_flags([clocks_of(("a", 0.0, 0.0), ("b", 0.5, 0.45), ("c", 0.09, 0.0))]) == []


def test_hosts_that_took_turns_are_named_with_their_dilation() -> None:
    emulated: Any = SimpleNamespace(dilation=2)
    (sentence,) = turns_flags([emulated, emulated])
    assert sentence.startswith("hosts of 2 trials were emulated: 2 hosts took turns")
    assert "not compared with real cores" not in sentence


def test_more_than_two_hosts_in_turns_are_marked() -> None:
    emulated: Any = SimpleNamespace(dilation=4)
    (sentence,) = turns_flags([emulated])
    assert sentence.endswith("More than two hosts were not compared with real cores")


def test_ratios_between_hosts_with_and_without_turns_are_warned_of() -> None:
    both: Any = [SimpleNamespace(dilation=1), SimpleNamespace(dilation=2)]
    mixed, emulated = turns_flags(both)
    assert mixed.startswith("trials on different hosts")
    assert emulated.startswith("hosts of 1 trial were emulated")


def test_runs_on_hosts_of_their_own_have_no_dilation(tmp_path: Path) -> None:
    assert turns_flags(load_run(fabricate.make_run(tmp_path, [fabricate.MPI]))) == []
