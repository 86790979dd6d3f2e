from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.base.errors import PeerLost
from paceline.collectives.node.semaphores import LOSS_BYTES, PeerMonitor


class PeerThatLeaves:
    """A semaphore of a peer that posts `posts` times and leaves when the first slice has ended."""

    def __init__(self, states: np.ndarray, posts: int) -> None:
        self._states, self._posts, self._waited = states, posts, False

    def take(self, index: int, wait_s: float) -> bool:
        if not self._waited:
            self._waited = True
            PeerMonitor(1, {}, self._states, no_losses(), limit_s=1.0).announce_leave()
            return False
        self._posts -= 1
        return self._posts >= 0


def no_losses() -> NDArray[np.uint8]:
    return np.zeros((3, LOSS_BYTES), np.uint8)


@pytest.mark.parametrize("posts", [0, 1])
def test_a_peer_may_leave_after_it_has_posted(posts: int) -> None:
    states = np.zeros(2, np.uint8)
    processes = {1: SimpleNamespace(pid=1, is_alive=lambda: True)}
    monitor = PeerMonitor(0, processes, states, no_losses(), limit_s=5.0)

    def wait() -> None:
        deadline = time.monotonic() + 5.0
        monitor.take(PeerThatLeaves(states, posts), 0, lambda: [1], deadline, lambda: "nothing")

    if posts:
        wait()
    else:
        with pytest.raises(PeerLost, match="local rank 1 of this node has left"):
            wait()


def _message(monitor: PeerMonitor, awaited: list[int]) -> str:
    never_posted = SimpleNamespace(take=lambda *_: False)
    with pytest.raises(PeerLost) as raised:
        monitor.take(never_posted, 0, lambda: awaited, time.monotonic() + 5.0, lambda: "")
    return str(raised.value)


def test_a_dead_peer_is_named_rather_than_one_that_left_because_of_it() -> None:
    states = np.zeros(3, np.uint8)
    processes = {
        1: SimpleNamespace(pid=1, is_alive=lambda: True),
        2: SimpleNamespace(pid=2, is_alive=lambda: False),
    }
    PeerMonitor(1, {}, states, no_losses(), limit_s=1.0).announce_leave()
    message = _message(PeerMonitor(0, processes, states, no_losses(), limit_s=5.0), [1, 2])
    assert message.startswith("local rank 2 of this node (process 2) has died")


def test_a_peer_that_leaves_says_who_was_lost_in_another_group() -> None:
    states, losses = np.zeros(2, np.uint8), no_losses()
    processes = {1: SimpleNamespace(pid=1, is_alive=lambda: True)}
    PeerMonitor(1, {}, states, losses, limit_s=1.0).announce_leave("rank 7 (process 9) has died")
    monitor = PeerMonitor(0, processes, states, losses, limit_s=5.0, names=["rank 3", "rank 5"])
    assert _message(monitor, [1]) == (
        "rank 7 (process 9) has died, so rank 5 has left while rank 3 waited; the cause is in its "
        "log"
    )
