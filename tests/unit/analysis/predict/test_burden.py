"""The addition of an exchange to a node's own step equals values computed by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from paceline.analysis.predict.exchange import (
    Burden,
    ExchangeProfile,
    NodeOperation,
    Replay,
    added_s,
)

SUM = NodeOperation(operation="allreduce", payload_bytes=10e6, lead=0.5, samples=8.0)
SUMS = ExchangeProfile(messages=(SUM,))
FACTORS = ExchangeProfile(messages=(SUM,), products_s=0.04, after_s=0.06, global_samples=16.0)
LATE = dataclasses.replace(SUM, lead=-1.0)  # requested after the own work


def replay_of(
    profile: ExchangeProfile, own_s: float, *, nodes: int = 2, samples: float = 8.0,
    bytes_per_s: float = 25e6, draws: int = 1,
) -> Replay:  # fmt: skip
    """Messages over a link without latency: 10 MB take 0.4 s on two nodes."""
    return Replay(
        profile=profile,
        algorithms=("ring",),
        nodes=np.array([nodes]),
        samples=np.array([samples]),
        own_s=np.full((draws, 1), own_s),
        latency_s=np.zeros((2, 1, 1)),
        bytes_per_s=np.full((2, 1, 1), bytes_per_s),
    )


def added(
    profile: ExchangeProfile,
    recorded: ExchangeProfile | None = None,
    *,
    own_s: float = 1.0,
    several_s: tuple[float, ...] = (1.1,),
    **link: Any,
) -> np.ndarray:
    """Return draws of the addition to a step of `own_s`.

    recorded: of a trial on two nodes with steps of `several_s` in place of 1 s.
    """
    burden = Burden(
        replay=replay_of(recorded or profile, 1.1),
        several_s=np.array(several_s)[:, None],
        alone_s=np.ones((len(several_s), 1)),
    )
    return added_s(replay_of(profile, own_s, **link), burden, np.random.default_rng(1))[:, 0]


def test_the_same_exchange_adds_the_same() -> None:
    assert added(SUMS) == pytest.approx(0.1)
    assert added(FACTORS) == pytest.approx(0.1)


def test_what_is_not_known_of_several_nodes_is_not_known_of_the_addition() -> None:
    drawn = (1.02, 1.1, 1.18)
    assert added(SUMS, several_s=drawn, draws=3) == pytest.approx([0.02, 0.1, 0.18])
    assert added(SUMS, several_s=(0.9,)) == 0


def test_one_node_has_no_burden() -> None:
    assert added(SUMS, nodes=1) == 0


def test_on_another_link_it_lies_between_bytes_and_time() -> None:
    # at 6.25 MB/s half of the bytes move within the 0.8 s to the last gradient, twice as long as
    # before: 0.05 to 0.2 s, on a logarithmic scale
    found = added(SUMS, own_s=1.6 / 1.1, bytes_per_s=6.25e6, draws=2000)
    assert 0.05 <= found.min() < 0.052
    assert 0.195 < found.max() <= 0.2
    assert np.median(found) == pytest.approx(0.1, rel=0.05)


def test_products_grow_with_other_nodes_and_with_samples() -> None:
    late = dataclasses.replace(FACTORS, messages=(LATE,))
    # half of 0.04 s are products of other nodes' samples; 0.08 s belong to the own step
    assert added(FACTORS, late, nodes=4, samples=4.0) == pytest.approx(0.08 + 0.04 * 3 / 4)
    assert added(FACTORS, late, nodes=4, samples=8.0) == pytest.approx(0.08 + 0.04 * 3 / 4 * 2)


def test_more_than_half_of_the_active_time_is_no_transfer() -> None:
    # 0.05 of 0.1 s are transfer; now 5 MB move in 0.2 s, and the own step is half as long
    assert added(SUMS.scaled(0.5), SUMS.scaled(0.25), own_s=0.5) == pytest.approx(
        0.05 * 2 + 0.05 / 2
    )


def test_messages_after_the_own_work_have_no_transfer_in_it() -> None:
    assert added(SUMS, ExchangeProfile(messages=(LATE,)), own_s=0.5) == pytest.approx(0.05)
