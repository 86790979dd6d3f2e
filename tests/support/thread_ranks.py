"""The ranks of one node as threads of this process: what they publish, and their barrier."""

from __future__ import annotations

import threading

from paceline.base.errors import TimedOut


class ThreadNode:
    """Values and a barrier that the ranks of a node share."""

    def __init__(self, ranks: int) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.line = threading.Barrier(ranks)
        self.ranks = ranks

    def of(self, rank: int) -> ThreadRank:
        return ThreadRank(self, rank)


class ThreadRank:
    """The view of one rank: a paceline.collectives.node.memory.NodeShare."""

    def __init__(self, node: ThreadNode, rank: int) -> None:
        self._node, self.local_rank, self.ranks_on_node = node, rank, node.ranks

    def publish(self, name: str, value: str) -> None:
        with self._node.changed:
            self._node.values[name] = value
            self._node.changed.notify_all()

    def lookup(self, name: str, timeout_s: float) -> str:
        with self._node.changed:
            if not self._node.changed.wait_for(lambda: name in self._node.values, timeout_s):
                raise TimedOut(name)
            return self._node.values[name]

    def barrier(self, timeout_s: float) -> None:
        self._node.line.wait(timeout_s)
