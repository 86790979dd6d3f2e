"""What an exchange adds to a node's own step, against values computed by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paceline.analysis.predict.burden import Burden
from paceline.analysis.predict.overlap import Message, Profile, Replay

GATHER = Message(operation="allgather", payload_bytes=1e6, lead=0.5, samples=8.0, ranks_per_node=1)
SUMS = Profile(messages=(dataclasses.replace(GATHER, operation="allreduce"),))
FACTORS = Profile(messages=(GATHER,), products_s=0.04, after_s=0.06, global_samples=16.0)
# two nodes: 1.1 s in place of 1 s, while 10 MB moved in 0.4 s
BURDEN = Burden(own_s=1.0, added_s=0.1, others=0.5, active_s=0.4, moved_bytes=10e6)
SAME = Replay(
    exposed_s=np.zeros((1, 1)), active_s=np.full((1, 1), 0.4), moved_bytes=np.full((1, 1), 10e6)
)


def added(
    profile: Profile,
    burden: Burden = BURDEN,
    replayed: Replay = SAME,
    nodes: int = 2,
    samples: float = 8.0,
    own_s: float = 1.0,
    draws: int = 1,
) -> np.ndarray:
    def many(values: np.ndarray) -> np.ndarray:
        return np.tile(values, (draws, 1))

    replayed = Replay(
        exposed_s=many(replayed.exposed_s),
        active_s=many(replayed.active_s),
        moved_bytes=many(replayed.moved_bytes),
    )
    setup = np.array([nodes]), np.array([samples]), np.full((draws, 1), own_s)
    return burden.seconds(profile, *setup, replayed, np.random.default_rng(1))[:, 0]


def test_the_same_exchange_adds_the_same() -> None:
    assert added(SUMS) == pytest.approx(0.1)
    assert added(FACTORS) == pytest.approx(0.1)
    assert pytest.approx(1.1) == BURDEN.ratio


def test_one_node_has_no_burden() -> None:
    assert added(SUMS, nodes=1) == 0


def test_on_another_link_it_lies_between_bytes_and_time() -> None:
    # half of the bytes move, in twice the time: 0.05 to 0.2 s, on a logarithmic scale
    slower = Replay(
        exposed_s=np.zeros((1, 1)), active_s=np.full((1, 1), 0.8), moved_bytes=np.full((1, 1), 5e6)
    )
    found = added(SUMS, replayed=slower, draws=2000)
    assert 0.05 <= found.min() < 0.052
    assert 0.195 < found.max() <= 0.2
    assert np.median(found) == pytest.approx(0.1, rel=0.05)


def test_products_grow_with_other_nodes_and_with_samples() -> None:
    # half of 0.04 s are products of other nodes' samples; 0.08 s are transfer
    assert added(FACTORS, nodes=4, samples=4.0) == pytest.approx(0.08 + 0.04 * 3 / 4)
    assert added(FACTORS, nodes=4, samples=8.0) == pytest.approx(0.08 + 0.04 * 3 / 4 * 2)


def test_more_than_half_of_the_active_time_is_no_transfer() -> None:
    # 0.05 s are transfer, and 0.05 s grow with the node's own step
    brief = dataclasses.replace(BURDEN, active_s=0.1)
    slower = Replay(
        exposed_s=np.zeros((1, 1)), active_s=np.full((1, 1), 0.2), moved_bytes=np.full((1, 1), 20e6)
    )
    assert added(SUMS, brief, slower, own_s=0.5) == pytest.approx(0.05 * 2 + 0.05 / 2)


def test_messages_after_the_own_work_have_no_transfer_in_it() -> None:
    late = dataclasses.replace(BURDEN, active_s=0.0, moved_bytes=0.0)
    assert added(SUMS, late, own_s=0.5) == pytest.approx(0.05)
