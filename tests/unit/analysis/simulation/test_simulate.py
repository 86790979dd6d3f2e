"""Simulated collectives against the formulas where nothing contends, and against contention that
can be computed by hand."""

from __future__ import annotations

import pytest

from paceline.analysis.simulation import simulate as simulation
from paceline.analysis.simulation.job import ALL_GATHER, SCHEDULES, Simulation, Topology
from paceline.analysis.simulation.simulate import contended_cost, simulate
from paceline.errors import EnvironmentLacks, UsageError

RACKS_OF_2 = Topology(rack_hosts=2, oversubscription=4.0)


def job(algorithm: str, ranks: int, **changes: object) -> Simulation:
    values = {"payload_bytes": 10**6, "latency_s": 1e-4, "bytes_per_s": 1e8, **changes}
    return Simulation(algorithm=algorithm, ranks=ranks, **values)


@pytest.mark.needs("simgrid")
def test_without_contention_the_time_is_that_of_the_formulas() -> None:
    jobs = [job(algorithm, 5) for algorithm in SCHEDULES]
    found = dict(zip(SCHEDULES, simulate(jobs), strict=True))
    # A rank beyond a power of two sends to its neighbour while all others wait.
    expected = {each.algorithm: each.formula_s for each in jobs}
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.needs("simgrid")
def test_equal_rounds_that_are_not_simulated_take_as_long_as_the_others() -> None:
    ring = job("ring", 40)
    assert ring.simulated_rounds is not None
    assert ring.simulated_messages < ring.cost.messages
    assert simulate([ring]) == pytest.approx([ring.formula_s], rel=1e-6)


@pytest.mark.needs("simgrid")
def test_chunks_in_flight_take_as_long_as_one_message_on_a_link_without_latency() -> None:
    ring = job("ring", 4, latency_s=0.0, in_chunks=True)
    assert simulate([ring]) == pytest.approx([ring.formula_s], rel=0.02)


@pytest.mark.needs("simgrid")
def test_racks_share_their_uplinks() -> None:
    """Two racks of two hosts; the uplinks are half as fast as one host's link.

    Recursive doubling: first within the racks (1), then both hosts of a rack over its uplink (4).
    """
    rounds, path = contended_cost("recursive-doubling", 4, RACKS_OF_2)
    assert path == pytest.approx(1 + 4)
    assert rounds == pytest.approx(1 + 2)  # twice the cables between racks


@pytest.mark.needs("simgrid")
def test_a_ring_over_racks_is_as_fast_as_its_slowest_link() -> None:
    _, path = contended_cost(ALL_GATHER, 4, RACKS_OF_2)
    assert path == pytest.approx(3 * 2)


def test_one_rank_needs_no_simulation() -> None:
    assert contended_cost("ring", 1, Topology()) == (0.0, 0.0)


@pytest.mark.needs("simgrid")
def test_more_messages_than_can_be_simulated_are_refused() -> None:
    with pytest.raises(UsageError, match="1024 hosts: expected at most"):
        simulate([job("naive", 1024)])


def test_missing_simgrid_is_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "why_not", lambda: "SimGrid is not installed")
    with pytest.raises(EnvironmentLacks, match="not installed"):
        simulate([job("ring", 2)])


def test_ranks_of_a_host_make_racks_larger() -> None:
    assert Topology(rack_hosts=16).of_ranks(2) == Topology(rack_hosts=32)
    assert Topology().of_ranks(2) == Topology()


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (Topology(), "one switch"),
        (
            Topology(rack_hosts=16, oversubscription=4.0),
            "racks of 16 hosts, uplinks oversubscribed 4:1",
        ),
    ],
)
def test_topology_is_described(topology: Topology, text: str) -> None:
    assert str(topology) == text
