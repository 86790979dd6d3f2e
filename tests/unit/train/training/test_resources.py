from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest
from tests.support.trials import changed, placement, rank_context, tiny_trial

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.machine import numa_nodes_of
from paceline.measure.records.rows import WorkerEnvironment
from paceline.train.training import resources
from paceline.train.training.resources import (
    RankCores,
    check_node,
    check_quotas,
    check_rank,
    check_workers,
)


def test_shared_cores_are_found_unless_oversubscribed():
    apart, same = [RankCores([0], {}), RankCores([1], {})], [RankCores([4], {})] * 2
    check_node(rank_context(0, 2), placement(2, 1), apart)
    check_node(rank_context(0, 2), placement(2, 1, oversubscribe=True), same)
    with pytest.raises(EnvironmentLacks, match="share cores 4"):
        check_node(rank_context(0, 2), placement(2, 1), same)


def in_groups(*quotas):
    """Ranks with cores of their own, each in control groups with these quotas."""
    return [RankCores([2 * rank, 2 * rank + 1], groups) for rank, groups in enumerate(quotas)]


def test_quota_of_a_group_is_for_all_ranks_in_it():
    together = in_groups({"job": 3.0}, {"job": 3.0})
    with pytest.raises(EnvironmentLacks, match=r"2 ranks on it of 2 threads need 4 .* allows 3;"):
        check_node(rank_context(0, 2), placement(2, 2), together)
    check_node(rank_context(0, 2), placement(2, 2, oversubscribe=True), together)
    check_node(rank_context(0, 2), placement(2, 2), in_groups({"job": 4.0}, {"job": 4.0}))


def test_ranks_with_groups_of_their_own_have_a_quota_each():
    check_node(rank_context(0, 2), placement(2, 2), in_groups({"a": 2.0}, {"b": 2.0}))
    both = in_groups({"a": 2.0, "job": 3.5}, {"b": 2.0, "job": 3.5})
    with pytest.raises(EnvironmentLacks, match=r"allows 3\.5"):
        check_node(rank_context(0, 2), placement(2, 2), both)


def test_rank_whose_own_group_allows_less_is_told_before_it_meets_the_others():
    with pytest.raises(EnvironmentLacks, match=r"rank 1 of 2 threads need 2 cores.* allows 1\.5"):
        check_quotas(rank_context(1, 2), placement(2, 2), in_groups({"a": 1.5}))


def test_what_a_rank_tells_the_others_arrives():
    own = RankCores.own()
    assert RankCores.from_json(own.to_json()) == own
    assert own.affinity == sorted(os.sched_getaffinity(0))


def worker(number, affinity, threads=2):
    return WorkerEnvironment(
        worker=number, thread_id=100 + number, intraop_threads=threads, affinity=affinity
    )


def threads_trial(**place):
    """One rank of two replicas, two threads each."""
    return tiny_trial({"threads_per_rank": 4, "replicas_per_node": 2, **place})


def test_replicas_with_cores_of_their_own_are_as_asked():
    workers = [worker(0, [0, 1]), worker(1, [2, 3])]
    check_workers(0, threads_trial(), workers, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("workers", "fault"),
    [
        ([worker(0, [0, 1])], "expected 2 threads with a replica each, found 1"),
        ([worker(0, [0, 1]), worker(1, [2, 3], 1)], "replica 1: expected 2 intra-op .* has 1"),
        ([worker(0, [0, 1]), worker(1, [1, 2])], r"replica 1: .* of its own.* have \[0, 1\]"),
        ([worker(0, [0, 1]), worker(1, [2])], r"replica 1: expected 2 cores .*is \[2\]"),
        ([worker(0, [0, 1]), worker(1, [3, 4])], r"replica 1: .* out of its rank's .*\[3, 4\]"),
    ],
)
def test_replica_without_what_was_asked_is_named(workers, fault):
    with pytest.raises(EnvironmentLacks, match=fault):
        check_workers(0, threads_trial(), workers, [0, 1, 2, 3])


def test_oversubscribed_replicas_may_share_but_not_leave_their_rank():
    trial = threads_trial(oversubscribe=True)
    check_workers(0, trial, [worker(0, [0, 1]), worker(1, [0, 1])], [0, 1])
    with pytest.raises(EnvironmentLacks, match="out of its rank"):
        check_workers(0, trial, [worker(0, [0, 1]), worker(1, [0, 2])], [0, 1])


def test_rank_without_replica_threads_has_no_workers(make_trial):
    check_workers(0, make_trial(), [], [0])
    with pytest.raises(EnvironmentLacks, match="expected 0 threads"):
        check_workers(0, make_trial(), [worker(0, [0])], [0])


def test_main_thread_of_a_rank_with_replicas_has_the_threads_of_one():
    check_rank(0, threads_trial(), (2, 1), [0, 1, 2, 3])
    with pytest.raises(EnvironmentLacks, match="expected 2 intra-op"):
        check_rank(0, threads_trial(), (4, 1), [0, 1, 2, 3])
    with pytest.raises(EnvironmentLacks, match="run on 4 cores"):
        check_rank(0, threads_trial(), (2, 1), [0, 1])


@pytest.mark.parametrize(("strategy", "keeps_all"), [("sequential", True), ("sharded", False)])
def test_ranks_that_divide_the_model_return_its_units(monkeypatch, strategy, keeps_all):
    kept = []
    monkeypatch.setattr(resources, "keep_freed_memory", kept.append)
    monkeypatch.setattr(resources, "set_thread_variables", lambda _: None)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    trial = changed(tiny_trial({"oversubscribe": True}), local_strategy=strategy)
    resources.apply_resources(rank_context(), trial)
    assert (kept == [None]) == keeps_all
    assert (kept[0] or 0) < 2_000_000  # bytes of the smallest units


PROGRAM = """
import dataclasses, json, os, sys
from paceline.plan.trials.trial import Trial
from paceline.plan.trials.trial import RankContext
from paceline.train.training.resources import actual_environment, apply_resources, check_environment
from paceline.train.training.resources import set_threads
assert "torch" not in sys.modules and "numpy" not in sys.modules
trial = Trial.model_validate_json(sys.argv[1])
context = RankContext(rank=0, world_size=1, local_rank=0, ranks_on_node=1, node_index=0,
                      host="alpha", process_started_unix_s=0.0)
apply_resources(context, trial)
assert "torch" not in sys.modules
import torch
set_threads(trial.placement.threads_per_worker)
facts = {"clock_offset_s": 0.5, "clock_error_s": 0.1, "initial_weights_sha256": "w"}
row = actual_environment(context, trial, **facts)
check_environment(row, trial)
print(json.dumps(dataclasses.asdict(row)))
"""


def test_process_really_gets_what_was_asked_whatever_the_launcher_set(make_trial):
    trial = make_trial(oversubscribe=False)
    environment = {
        "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "7",
        "OMP_PROC_BIND": "close", "GOMP_CPU_AFFINITY": "0", "KMP_BLOCKTIME": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, trial.model_dump_json()]
    row = json.loads(subprocess.check_output(command, env=environment, timeout=60))
    assert (row["intraop_threads"], row["interop_threads"]) == (1, 1)
    assert len(row["affinity"]) == 1
    assert row["omp_environment"] == {
        "MKL_DYNAMIC": "FALSE", "MKL_NUM_THREADS": "1", "OMP_DYNAMIC": "FALSE",
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    assert (row["clock_offset_s"], row["initial_weights_sha256"]) == (0.5, "w")
    assert row["versions"]["torch"]
    assert (row["device"], row["workers"]) == ("cpu", [])
    assert row["keeps_freed_memory"] is (platform.libc_ver()[0] == "glibc")
    assert row["numa_nodes"] == numa_nodes_of(row["affinity"])


ALLOCATING = """
import resource, sys
from paceline.train.training.resources import keep_freed_memory
if sys.argv[1] != "usual":
    assert keep_freed_memory(None if sys.argv[1] == "keep" else 2**20)
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(4000, 4000)  # its gradient: 64 MB, 15625 pages
for step in range(13):  # small blocks of the first steps may divide the memory that was freed
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model.zero_grad()
    model(torch.ones(2, 4000)).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_large_tensors_are_not_cleared_by_the_kernel_anew_each_time():
    faults = {}
    for mode in ("keep", "keep small blocks", "usual"):
        command = [sys.executable, "-c", ALLOCATING, mode]
        faults[mode] = int(subprocess.check_output(command, timeout=60))
    assert faults["usual"] > 3 * 15_000
    assert faults["keep small blocks"] > 3 * 15_000
    assert faults["keep"] < 3 * 1500
