"""The mpi4py backend in anybody's script: started by mpirun alone, nothing set, nothing given."""

from __future__ import annotations

import json
import time

import pytest

pytestmark = pytest.mark.contract

SETUPS = [(2, ()), (3, ()), (3, ("staged",))]
WAYS = ["ddp", "zero", "fully_shard", "fsdp", "pipeline"]


def forget_torch(patch):
    """As in a shell that knows nothing of torch. (Transport "plain" only says: no -m mpi4py.)"""
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
        assert len(report["passed"]) == 15
        assert (report["rank"], report["local_rank"]) == (rank, rank)
        assert report["algorithms"] == ["auto", "native"], "a later group has the first one's"
        assert report["listening"] == (["127.0.0.1"] if rank == 0 else [])


@pytest.fixture(scope="module")
def trained(run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    with pytest.MonkeyPatch.context() as patch:
        forget_torch(patch)
        run_ranks(2, "plain", "mpi_training", folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_training_gives_the_weights_of_one_process(way, trained):
    reports = [json.loads((trained / f"{way}.{rank}.json").read_text()) for rank in range(2)]
    for report in reports:
        assert report["difference"] < 1e-5
        assert report["moved"] > 1e-2, "the weights that are compared were trained"
    assert len({name for report in reports for name in report["names"]}) == 6


def test_error_that_one_rank_does_not_catch_ends_all_at_once(run_ranks, tmp_path):
    started = time.monotonic()
    run_ranks(2, "plain", "mpi_uncaught", tmp_path, orderly=False)
    assert time.monotonic() - started < 60, "the peer did not wait for torch's 30 minutes"
    assert not (tmp_path / "went_on").exists()
