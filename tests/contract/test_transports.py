"""The contract of every transport, between real processes under mpirun."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.contract

LIMIT_S = 2.0

TRANSPORTS = ("gloo", "paceline", "mpi")
SETUPS = [(t, n, "together") for t in TRANSPORTS for n in (2, 3)]
# The mpi transport uses other algorithms if ranks cannot share memory.
SETUPS.append(("mpi", 3, "apart"))
# Transport paceline reduces in two levels if ranks are on several hosts.
SETUPS.append(("paceline", 3, "apart"))
# The checks of programs/collectives.py, and those that torch's Gloo cannot pass.
CHECKS = {
    "allreduce", "average", "bool", "long_and_empty", "not_contiguous", "channels_last",
    "broadcast", "gathering", "root", "reduce_scatter", "objects", "messages", "asynchronous",
    "early_start", "subgroup",
}  # fmt: skip
NOT_IN_GLOO = {"average", "bool", "not_contiguous", "channels_last"}


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def reports(request, run_ranks, tmp_path_factory):
    """Return the transport, the report of each rank, and the folder of programs/collectives.py."""
    transport, ranks, hosts = request.param
    folder = tmp_path_factory.mktemp("collectives")
    run_ranks(ranks, transport, "collectives", folder, hosts)
    found = [json.loads((folder / f"report.{rank}.json").read_text()) for rank in range(ranks)]
    return transport, found, folder


@pytest.fixture
def recorded(reports):
    """Return the rows of communication.jsonl by rank."""
    _, ranks, folder = reports
    files = [folder / f"communication.{rank}.jsonl" for rank in range(len(ranks))]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def _equivalences(rows, group):
    """Return the part of rows that ranks of a group must agree on; payloads differ."""
    return sorted((r["sequence"], r["operation"]) for r in rows if r["group"] == group)


def test_collectives_agree_with_numpy_on_every_rank(reports):
    transport, ranks, _ = reports
    expected = CHECKS - NOT_IN_GLOO if transport == "gloo" else CHECKS
    for report in ranks:
        assert set(report["passed"]) == {f"check_{name}" for name in expected}


def test_operations_are_recorded_alike_on_every_rank(recorded):
    rows, size = recorded, len(recorded)
    world = [row for row in rows[0] if row["ranks"] == size and row["group"] == rows[0][0]["group"]]
    assert {
        "allreduce", "broadcast", "allgather", "gather", "scatter", "reduce", "reduce_scatter",
        "barrier",
    } <= {row["operation"] for row in world}  # fmt: skip
    for other in rows[1:]:
        assert _equivalences(other, world[0]["group"]) == _equivalences(rows[0], world[0]["group"])
    sub_groups = {row["group"] for row in rows[0] if "/" not in row["group"]} - {world[0]["group"]}
    assert len(sub_groups) == 1, "check_subgroup makes one"


def test_messages_are_recorded_by_sender_and_receiver(recorded):
    rows = [row for rank in recorded for row in rank]
    sent, received = (
        {(r["group"], r["sequence"], r["payload_bytes"]) for r in rows if r["operation"] == name}
        for name in ("send", "recv")
    )
    from_a_named_rank = {each for each in received if "/*->" not in each[0]}
    # the ring of check_messages, and what rank 0 sends in check_early_start
    assert len(from_a_named_rank) == 2 * len(recorded) - 1
    assert from_a_named_rank <= sent
    assert received - from_a_named_rank  # rank 0 receives from any rank


def test_recorded_operations_end_after_they_were_asked_for(recorded):
    for row in (row for rank in recorded for row in rank):
        assert row["arrived_unix_s"] <= (row["started_unix_s"] or row["arrived_unix_s"])
        assert (row["started_unix_s"] or row["arrived_unix_s"]) <= row["ended_unix_s"]


def test_nothing_listens_beyond_loopback(reports):
    _, ranks, _ = reports
    for report in ranks:
        assert set(report["listening"]) <= {"0100007F"}
    assert ranks[0]["listening"], "rank 0 serves the store"


def test_mpi_is_loaded_only_where_it_carries(reports):
    transport, ranks, _ = reports
    assert {report["mpi4py_loaded"] for report in ranks} == {transport == "mpi"}


def test_transport_says_what_it_is(reports):
    transport, ranks, _ = reports
    assert transport in ranks[0]["describe"]["library"].lower().replace(" ", "")


@pytest.mark.parametrize(
    ("transport", "collective"),
    [
        *((transport, "all-reduce") for transport in TRANSPORTS),
        ("gloo", "factors"),
        ("mpi", "factors"),
    ],
)
def test_rank_that_does_not_come_is_a_time_out_within_the_limit(
    transport, collective, run_ranks, tmp_path
):
    run_ranks(2, transport, "late", tmp_path, LIMIT_S, collective, orderly=False)
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["kind"] == "TimedOut", outcome
    assert LIMIT_S * 0.9 <= outcome["waited_s"] <= LIMIT_S * 3
    assert outcome["leaving_s"] < 5
    assert "rank 0" in outcome["message"]
    assert f"{LIMIT_S:g} s" in outcome["message"]
    assert "rank 1 (testhost0) is alive, but not at this operation" in outcome["message"]
