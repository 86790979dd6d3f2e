"""The addition of an exchange to a node's own step equals values computed by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paceline.analysis.predict.exchange import Burden, Message, Profile, Replay

SUM = Message(operation="allreduce", payload_bytes=10e6, lead=0.5, samples=8.0)
SUMS = Profile(messages=(SUM,))
FACTORS = Profile(messages=(SUM,), products_s=0.04, after_s=0.06, global_samples=16.0)
# two nodes: 1.1 s in place of 1 s, while 10 MB moved in 0.4 s
BURDEN = Burden(own_s=1.0, added_s=0.1, others=0.5, active_s=0.4, moved_bytes=10e6)
LATE = dataclasses.replace(BURDEN, active_s=0.0, moved_bytes=0.0)  # messages after the own work


def added(
    profile: Profile,
    burden: Burden = BURDEN,
    *,
    nodes: int = 2,
    samples: float = 8.0,
    own_s: float = 1.0,
    bytes_per_s: float = 25e6,
    draws: int = 1,
) -> np.ndarray:
    """Return draws of the addition to a step of `own_s`, over a link without latency."""
    own = np.full((draws, 1), own_s)
    replay = Replay(
        profile=profile,
        algorithms=("ring",),
        nodes=np.array([nodes]),
        samples=np.array([samples]),
        own_s=own,
        latency_s=np.zeros((1, 1)),
        bytes_per_s=np.full((1, 1), bytes_per_s),
    )
    return burden.seconds(own, replay, np.random.default_rng(1))[:, 0]


def test_the_same_exchange_adds_the_same() -> None:
    assert added(SUMS) == pytest.approx(0.1)
    assert added(FACTORS) == pytest.approx(0.1)
    assert pytest.approx(1.1) == BURDEN.ratio


def test_one_node_has_no_burden() -> None:
    assert added(SUMS, nodes=1) == 0


def test_on_another_link_it_lies_between_bytes_and_time() -> None:
    # at 6.25 MB/s half of the bytes move within the 0.8 s to the last gradient, twice as long as
    # before: 0.05 to 0.2 s, on a logarithmic scale
    found = added(SUMS, own_s=1.6, bytes_per_s=6.25e6, draws=2000)
    assert 0.05 <= found.min() < 0.052
    assert 0.195 < found.max() <= 0.2
    assert np.median(found) == pytest.approx(0.1, rel=0.05)


def test_products_grow_with_other_nodes_and_with_samples() -> None:
    # half of 0.04 s are products of other nodes' samples; 0.08 s belong to the own step
    assert added(FACTORS, LATE, nodes=4, samples=4.0) == pytest.approx(0.08 + 0.04 * 3 / 4)
    assert added(FACTORS, LATE, nodes=4, samples=8.0) == pytest.approx(0.08 + 0.04 * 3 / 4 * 2)


def test_more_than_half_of_the_active_time_is_no_transfer() -> None:
    # 0.05 of 0.1 s are transfer; now 5 MB move in 0.2 s, and the own step is half as long
    brief = dataclasses.replace(BURDEN, active_s=0.1, moved_bytes=2.5e6)
    profile = SUMS.scaled(0.5)
    assert added(profile, brief, own_s=0.5) == pytest.approx(0.05 * 2 + 0.05 / 2)


def test_messages_after_the_own_work_have_no_transfer_in_it() -> None:
    assert added(SUMS, LATE, own_s=0.5) == pytest.approx(0.05)
