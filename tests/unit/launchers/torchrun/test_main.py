"""Ranks that torchrun started find rank 0, and only the rank 0 of their own start."""

import os

import pytest

from paceline.errors import EnvironmentLacks, TimedOut, UsageError
from paceline.job.rendezvous import close_listener
from paceline.launchers.torchrun.__main__ import exchange_address, torchrun_place
from paceline.records.files import write_json

STARTED = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}


def test_place_comes_from_torchruns_variables():
    assert torchrun_place(STARTED) == (1, 2)


def test_process_that_torchrun_did_not_start_is_refused():
    with pytest.raises(UsageError, match="expected torchrun to start this process"):
        torchrun_place({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})


def test_several_nodes_are_refused():
    with pytest.raises(EnvironmentLacks, match=r"expected 2 ranks .* torchrun started 4"):
        torchrun_place({**STARTED, "WORLD_SIZE": "4"})


def test_rank_1_finds_the_socket_of_rank_0(make_job):
    job = make_job(launcher="torchrun")
    first = exchange_address(job, 0)
    second = exchange_address(job, 1)
    close_listener(first)
    assert first.listen_fd is not None
    assert (second.host, second.port, second.listen_fd) == ("127.0.0.1", first.port, None)


def test_address_of_an_earlier_start_is_not_used(make_job):
    job = make_job("--rendezvous-timeout", "0.2", launcher="torchrun")
    earlier = {"agent": os.getppid() + 1, "host": "127.0.0.1", "port": 1}
    write_json(job.files.root / "rendezvous.json", earlier)
    with pytest.raises(TimedOut, match=r"rank 1 waited 0\.2 s for rank 0"):
        exchange_address(job, 1)
