"""The mpi4py backend in a script that mpirun starts without any variables or options."""

from __future__ import annotations

import json
import time

import pytest

from paceline.runner.launchers.base import failed_rank

pytestmark = pytest.mark.contract

GONE_WITHIN_S = 10.0  # what the project promises
SETUPS = [(2, ()), (3, ()), (3, ("staged",))]
WAYS = ["ddp", "zero", "fully_shard", "fsdp", "pipeline"]
# The checks of programs/mpi_operations.py.
CHECKS = {
    "moving_every_type", "parts_of_different_sizes", "sixteen_bits_are_rounded_once",
    "other_reductions", "groups_that_overlap", "futures_of_messages", "batches", "functional",
    "objects", "callbacks_that_wait", "tensors_of_inference_mode", "calls_that_differ",
    "wrong_arguments",
    "recording", "profile", "messages_that_nobody_sends",
    "messages_of_a_group_name_ranks_of_the_world",
}  # fmt: skip


def forget_torch(patch):
    """Remove torch's variables, as in a new shell. (Transport "plain" means: no -m mpi4py.)"""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        patch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    forget_torch(monkeypatch)


@pytest.mark.parametrize(("ranks", "options"), SETUPS, ids=str)
def test_operations_give_what_arithmetic_says(ranks, options, run_ranks, tmp_path):
    run_ranks(ranks, "plain", "mpi_operations", tmp_path, *options)
    reports = [json.loads((tmp_path / f"report.{r}.json").read_text()) for r in range(ranks)]
    for rank, report in enumerate(reports):
        assert set(report["passed"]) == {f"check_{name}" for name in CHECKS}
        assert (report["rank"], report["local_rank"]) == (rank, rank)
        assert report["algorithms"] == ["auto", "native"], "a later group has the first one's"
        assert report["listening"] == (["127.0.0.1"] if rank == 0 else [])


@pytest.fixture(scope="module", params=["mpi4py", "paceline"])
def trained(request, run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    with pytest.MonkeyPatch.context() as patch:
        forget_torch(patch)
        run_ranks(2, request.param, "mpi_training", folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_training_gives_the_weights_of_one_process(way, trained):
    reports = [json.loads((trained / f"{way}.{rank}.json").read_text()) for rank in range(2)]
    for report in reports:
        assert report["difference"] < 1e-5
        assert report["moved"] > 1e-2, "the weights that are compared were trained"
    assert len({name for report in reports for name in report["names"]}) == 6


def test_error_that_one_rank_does_not_catch_ends_all_at_once(run_ranks, tmp_path):
    # run_ranks fails after its limit, which is shorter than torch's wait of 30 minutes
    ended = run_ranks(2, "plain", "mpi_uncaught", tmp_path, orderly=False)
    ended_unix_s = time.time()
    assert {file.name for file in tmp_path.iterdir()} == {"began.0", "began.1"}
    assert ended.returncode != 0
    assert "RuntimeError: a fault of rank 1" in ended.stdout
    assert failed_rank(ended.stdout) == 1, ended.stdout
    before_unix_s = (tmp_path / "began.1").stat().st_mtime
    assert ended_unix_s - before_unix_s < GONE_WITHIN_S
