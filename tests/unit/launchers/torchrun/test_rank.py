"""Ranks that torchrun started find rank 0, and only the rank 0 of their own start."""

import os

import pytest

from paceline.errors import EnvironmentLacks, TimedOut
from paceline.job.rendezvous import close_listener
from paceline.launchers.torchrun.rank import started_by_torchrun, torchrun_context, torchrun_world
from paceline.records.files import write_json

STARTED = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}


@pytest.fixture
def as_rank(monkeypatch):
    def become(rank):
        for name, value in {**STARTED, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
            monkeypatch.setenv(name, value)

    return become


def test_torchrun_is_told_by_its_variables():
    assert started_by_torchrun(STARTED)
    assert not started_by_torchrun({k: v for k, v in STARTED.items() if k != "RANK"})
    assert not started_by_torchrun({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})


def test_several_nodes_are_refused():
    assert torchrun_world(STARTED) == (1, 2)
    with pytest.raises(EnvironmentLacks, match="4 in all and 2 here"):
        torchrun_world({**STARTED, "WORLD_SIZE": "4"})


def test_rank_1_finds_the_socket_of_rank_0(make_job, as_rank):
    job = make_job(launcher="torchrun")
    as_rank(0)
    first = torchrun_context(job)
    as_rank(1)
    second = torchrun_context(job)
    close_listener(first.store)
    assert first.store.listen_fd is not None
    assert (second.store.host, second.store.port) == ("127.0.0.1", first.store.port)
    assert (second.rank, second.local_rank, second.ranks_on_node) == (1, 1, 2)


def test_address_of_an_earlier_start_is_not_taken(make_job, as_rank):
    job = make_job("--rendezvous-timeout", "0.2", launcher="torchrun")
    earlier = {"agent": os.getppid() + 1, "host": "127.0.0.1", "port": 1}
    write_json(job.files.root / "rendezvous.json", earlier)
    as_rank(1)
    with pytest.raises(TimedOut, match=r"rank 1 waited 0\.2 s for rank 0"):
        torchrun_context(job)
