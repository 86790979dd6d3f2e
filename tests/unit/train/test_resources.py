from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paceline.errors import EnvironmentLacks
from paceline.plan.trial import Placement
from paceline.train.context import RankContext
from paceline.train.resources import check_disjoint, choose_cores


def context(local_rank=0, ranks_on_node=1):
    return RankContext(
        rank=local_rank, world_size=ranks_on_node, local_rank=local_rank,
        ranks_on_node=ranks_on_node, node_index=0, host="alpha", process_started_unix_s=0.0,
    )  # fmt: skip


def placement(ranks, threads, oversubscribe=False):
    return Placement(
        nodes=1, ranks_per_node=ranks, threads_per_rank=threads, oversubscribe=oversubscribe
    )


def test_cores_are_dealt_out_in_ascending_order_without_overlap():
    allowed = [2, 3, 8, 9, 11]
    dealt = [choose_cores(allowed, context(r, 2), placement(2, 2)) for r in range(2)]
    assert dealt == [[2, 3], [8, 9]]


def test_rank_bound_by_its_launcher_keeps_its_own_cores():
    assert choose_cores([5], context(1, 2), placement(2, 1)) == [5]


def test_oversubscribed_ranks_share_all_cores():
    assert choose_cores([0, 1], context(2, 3), placement(3, 1, oversubscribe=True)) == [0, 1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_too_few_cores_names_both_numbers(ranks):
    with pytest.raises(EnvironmentLacks, match=rf"need {3 * ranks} cores.*may use 2 "):
        choose_cores([0, 1], context(0, ranks), placement(ranks, 3))


def test_shared_cores_are_found_unless_oversubscribed():
    check_disjoint(context(0, 2), placement(2, 1), [[0], [1]])
    check_disjoint(context(0, 2), placement(2, 1, oversubscribe=True), [[0, 1], [0, 1]])
    with pytest.raises(EnvironmentLacks, match="share cores 4"):
        check_disjoint(context(0, 2), placement(2, 1), [[4], [4]])


PROGRAM = """
import dataclasses, json, os, sys
from paceline.plan.trial import Trial
from paceline.train.context import RankContext
from paceline.train.resources import apply_resources, read_back, set_threads
assert "torch" not in sys.modules and "numpy" not in sys.modules
trial = Trial.model_validate_json(sys.argv[1])
context = RankContext(rank=0, world_size=1, local_rank=0, ranks_on_node=1, node_index=0,
                      host="alpha", process_started_unix_s=0.0)
apply_resources(context, trial)
assert "torch" not in sys.modules
import torch
set_threads(trial.placement.threads_per_rank)
row = read_back(context, trial, clock_offset_s=0.5, clock_error_s=0.1, initial_weights_sha256="w")
print(json.dumps(dataclasses.asdict(row)))
"""


def test_process_really_gets_what_was_asked_whatever_the_launcher_set(make_trial):
    trial = make_trial(oversubscribe=False)
    environment = {
        "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "7",
        "OMP_PROC_BIND": "close", "GOMP_CPU_AFFINITY": "0", "KMP_BLOCKTIME": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, trial.model_dump_json()],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert (row["intraop_threads"], row["interop_threads"]) == (1, 1)
    assert len(row["affinity"]) == 1
    assert row["omp_environment"] == {
        "MKL_DYNAMIC": "FALSE", "MKL_NUM_THREADS": "1", "OMP_DYNAMIC": "FALSE",
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    assert (row["clock_offset_s"], row["initial_weights_sha256"]) == (0.5, "w")
    assert row["versions"]["torch"]


ALLOCATING = """
import resource, sys
from paceline.train.resources import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("not glibc")
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(4000, 4000)  # its gradient: 64 MB, 15625 pages
for step in range(6):
    if step == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model.zero_grad()
    model(torch.ones(2, 4000)).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_large_tensors_are_not_cleared_by_the_kernel_anew_each_time():
    faults = {}
    for mode in ("keep", "usual"):
        done = subprocess.run(
            [sys.executable, "-c", ALLOCATING, mode],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if "not glibc" in done.stderr:
            pytest.skip("the C library is not glibc")
        assert done.returncode == 0, done.stderr
        faults[mode] = int(done.stdout)
    assert faults["usual"] > 3 * 15_000
    assert faults["keep"] < 3 * 1500
