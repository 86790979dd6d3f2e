"""Some of PyTorch's own distributed tests; benchmarks/torch_distributed/run.py runs all."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.contract

BENCHMARKS = Path(__file__).parents[2] / "python/benchmarks"

# One of each kind; and one for GPUs, which PyTorch skips.
TESTS = [
    "test_get_backend", "test_get_rank_size_group", "test_send_recv", "test_send_recv_any_source",
    "test_send_recv_with_tag", "test_isend", "test_irecv", "test_broadcast", "test_reduce_sum",
    "test_reduce_full_group_max", "test_all_reduce_sum_async", "test_all_reduce_sum_complex",
    "test_all_reduce_complex_unsupported_ops", "test_all_reduce_full_group_min", "test_scatter",
    "test_scatter_checks", "test_gather", "test_all_gather_complex",
    "test_all_to_all_single_unequal_split", "test_all_to_all_full_group", "test_barrier",
    "test_DistributedDataParallelCPU", "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_broadcast_cuda",
]  # fmt: skip


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program that runs them."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("torch_distributed.run")


OF_GPUS = "test_broadcast_cuda"
OF_MPI = {"test_all_to_all_single_unequal_split", "test_all_to_all_full_group"}


@pytest.mark.parametrize(
    ("backend", "ranks", "like", "skipped"),
    [("mpi4py", 2, "mpi", {OF_GPUS}), ("paceline", 3, "gloo", {OF_GPUS, *OF_MPI})],
)
def test_tests_that_pytorch_runs_for_its_own_back_end_pass(
    program, backend, ranks, like, skipped, forks, tmp_path
):
    rows = program.run_job(TESTS, ranks, like, tmp_path / "job", backend, forks.python_m_mpi4py)
    assert set(rows) == set(TESTS), (tmp_path / "job" / "log.txt").read_text()[-3000:]
    failed = {name: row["detail"] for name, row in rows.items() if row["outcome"] == "failed"}
    assert failed == {}
    assert {name for name, row in rows.items() if row["outcome"] == "skipped"} == skipped


def test_summary_counts_what_ran_anywhere_and_passed_everywhere(program):
    passed, failed, skipped = ({"outcome": kind} for kind in ("passed", "failed", "skipped"))
    found = program.summary(
        {
            "2": {"a": passed, "b": skipped, "c": passed, "d": skipped},
            "3": {"a": passed, "b": passed, "c": failed, "d": skipped},
        }
    )
    assert (found["ran"], found["passed"], found["share"]) == (3, 2, 0.6667)
    assert list(found["failed"]) == ["c"]
