"""What every transport must do, between real processes under mpirun."""

from __future__ import annotations

import json

import pytest

from paceline.train.collectives import transport_names

pytestmark = pytest.mark.contract

LIMIT_S = 2.0


SETUPS = [(t, n, "together") for t in transport_names() for n in (2, 3)]
# The mpi transport takes another way where ranks cannot share memory.
SETUPS.append(("mpi", 3, "apart"))


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def reports(request, run_ranks, tmp_path_factory):
    """(transport, what each rank reported) after every check of programs/collectives.py."""
    transport, ranks, hosts = request.param
    folder = tmp_path_factory.mktemp("collectives")
    run_ranks(ranks, transport, "collectives", folder, hosts)
    return transport, [
        json.loads((folder / f"report.{rank}.json").read_text()) for rank in range(ranks)
    ]


def test_collectives_agree_with_numpy_on_every_rank(reports):
    _, ranks = reports
    for report in ranks:
        assert len(report["passed"]) == 13


def test_nothing_listens_beyond_loopback(reports):
    _, ranks = reports
    for report in ranks:
        assert set(report["listening"]) <= {"0100007F"}
    assert ranks[0]["listening"], "rank 0 serves the store"


def test_mpi_is_loaded_only_where_it_carries(reports):
    transport, ranks = reports
    assert {report["mpi4py_loaded"] for report in ranks} == {transport == "mpi"}


def test_transport_says_what_it_is(reports):
    transport, ranks = reports
    assert transport in ranks[0]["describe"]["library"].lower().replace(" ", "")


@pytest.mark.parametrize("transport", transport_names())
def test_rank_that_does_not_come_is_a_time_out_within_the_limit(transport, run_ranks, tmp_path):
    run_ranks(2, transport, "late", tmp_path, LIMIT_S, orderly=False)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["kind"] == "TimedOut", outcome
    assert LIMIT_S * 0.9 <= outcome["waited_s"] <= LIMIT_S * 3
    assert outcome["leaving_s"] < 5
    assert "rank 0" in outcome["message"]
    assert f"{LIMIT_S:g} s" in outcome["message"]
