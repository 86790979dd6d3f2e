from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.errors import PeerLost
from paceline.node.peer_monitor import PeerMonitor


class PeerThatLeaves:
    """A semaphore of a peer that posts `posts` times and leaves when the first slice has ended."""

    def __init__(self, states: np.ndarray, posts: int) -> None:
        self._states, self._posts, self._waited = states, posts, False

    def take(self, index: int, wait_s: float) -> bool:
        if not self._waited:
            self._waited = True
            self._peer.announce_leave()
            return False
        self._posts -= 1
        return self._posts >= 0

    @property
    def _peer(self) -> PeerMonitor:
        return PeerMonitor(1, {}, self._states, limit_s=1.0)


@pytest.mark.parametrize("posts", [0, 1])
def test_a_peer_may_leave_after_it_has_posted(posts: int) -> None:
    states = np.zeros(2, np.uint8)
    processes = {1: SimpleNamespace(pid=1, is_alive=lambda: True)}
    monitor = PeerMonitor(0, processes, states, limit_s=5.0)

    def wait() -> None:
        deadline = time.monotonic() + 5.0
        monitor.take(PeerThatLeaves(states, posts), 0, lambda: [1], deadline, lambda: "nothing")

    if posts:
        wait()
    else:
        with pytest.raises(PeerLost, match="local rank 1 of this node has left"):
            wait()
