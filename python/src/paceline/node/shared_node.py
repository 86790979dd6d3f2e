"""Memory and signals that the ranks of one node share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import EnvironmentLacks
from paceline.host.processes import Process
from paceline.node.barrier import Barrier
from paceline.node.channel import Channel
from paceline.node.memory import MemoryUse, gather, node_memory
from paceline.node.peer_monitor import PeerMonitor
from paceline.node.semaphores import LINE_BYTES, Semaphores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.node.memory import NodeShare

_ADVICE = "use a smaller batch, image or model, or fewer workers on the node"


@dataclass(frozen=True, slots=True)
class _Prefixed:
    """A NodeShare whose names are distinct from those of others made from the same one."""

    share: NodeShare
    prefix: str

    @property
    def local_rank(self) -> int:
        return self.share.local_rank

    @property
    def ranks_on_node(self) -> int:
        return self.share.ranks_on_node

    def publish(self, name: str, value: str) -> None:
        self.share.publish(f"{self.prefix}/{name}", value)

    def lookup(self, name: str, timeout_s: float) -> str:
        return self.share.lookup(f"{self.prefix}/{name}", timeout_s)

    def barrier(self, timeout_s: float) -> None:
        self.share.barrier(timeout_s)


class SharedNode:
    """Shared objects of the ranks of a node. Creating it, memory, barriers and channels is
    collective: all ranks of the node make the same calls in the same order.

    Objects live as long as they are used: arrays remain valid after close(), and no memory outlives
    its processes.
    """

    def __init__(self, node: NodeShare, limit_s: float) -> None:
        """limit_s: limit of each wait, here and in all objects created from this.

        Raises EnvironmentLacks if the ranks cannot share memory or there is too little of it,
        TimedOut if a rank does not take part.
        """
        self.local_rank = node.local_rank
        self.ranks_on_node = node.ranks_on_node
        self._node = node
        self._limit_s = limit_s
        self._made = 0
        self._signals: list[Semaphores] = []
        states = self.memory("signals", self.ranks_on_node)
        self._peers = PeerMonitor(self.local_rank, self._processes(), states, limit_s)

    def memory(self, name: str, size_bytes: int) -> NDArray[np.uint8]:
        """Return shared memory of shape (size_bytes,), initially zero, aligned to a page;
        collective.

        Pages are allocated at first touch, on the NUMA node of the rank that touches them. `name`
        tells the user the purpose, for example "the weights". Raises the errors of the constructor.
        """
        padded = max(1, -(-size_bytes // LINE_BYTES)) * LINE_BYTES
        memory = node_memory(
            self._next(name), padded, self._limit_s, MemoryUse(f"{name} (shared)", _ADVICE)
        )
        if self.ranks_on_node > 1 and not memory.shared:
            raise EnvironmentLacks(
                f"the {self.ranks_on_node} ranks of this node must share memory for {name}, but "
                "cannot open one another's through /proc (different containers or users, or /proc "
                "hidden); start them in one container as one user. Without shared memory there is "
                'local strategy "processes" with transport "gloo"'
            )
        return np.frombuffer(memory.buffer, dtype=np.uint8)[:size_bytes]

    def barrier(self, members: Sequence[int]) -> Barrier:
        """Return a barrier among `members` (local ranks); collective over all ranks of the node."""
        self._check(members)
        signals = self._semaphores("barriers", Barrier.semaphores_needed(len(members)))
        return Barrier(members, signals, self._peers)

    def channel(self, sender: int, receiver: int, slots: int, slot_bytes: int) -> Channel:
        """Return slots from local rank `sender` to `receiver`; collective over all ranks of the
        node."""
        self._check([sender, receiver])
        line = -(-slot_bytes // LINE_BYTES) * LINE_BYTES
        memory = self.memory("what crosses between stages", slots * line)
        signals = self._semaphores("channels", Channel.semaphores_needed(slots))
        views = [memory[slot * line :][:slot_bytes] for slot in range(slots)]
        return Channel(sender, receiver, views, signals, self._peers)

    def check_peers(self) -> None:
        """Raise PeerLost if a rank of the node has failed or died, without waiting."""
        self._peers.check()

    def fail(self) -> None:
        """Announce that this rank failed: all current and later waits raise PeerLost. It does not
        wait."""
        self._peers.announce_failure()
        for semaphores in self._signals:
            for index in range(len(semaphores)):
                semaphores.post(index)

    def close(self, *, failed: bool = False) -> None:
        """Announce that this rank leaves, or that it failed; it does not wait, and a second call
        does nothing.

        Ranks that wait for this rank get PeerLost. Memory is freed with the last object that uses
        it.
        """
        if failed:
            self.fail()
        self._peers.announce_leave()
        self._signals.clear()

    def _next(self, name: str) -> _Prefixed:
        self._made += 1
        return _Prefixed(self._node, f"{self._made} {name}")

    def _processes(self) -> dict[int, Process]:
        """Return the processes of all ranks of the node by local rank; collective."""
        if self.ranks_on_node == 1:
            return {}
        own = Process.current()
        processes = gather(self._next("processes"), f"{own.pid} {own.start_ticks}", self._limit_s)
        words = [process.split() for process in processes]
        return {rank: Process(int(pid), int(ticks)) for rank, (pid, ticks) in enumerate(words)}

    def _semaphores(self, name: str, count: int) -> Semaphores:
        """Create semaphores; collective. They are ready on all ranks when this returns."""
        semaphores = Semaphores(
            self.memory(name, count * LINE_BYTES), initialise=self.local_rank == 0
        )
        if self.ranks_on_node > 1:
            share = self._next(name)
            if self.local_rank == 0:
                share.publish("ready", "")
            share.lookup("ready", self._limit_s)
        self._signals.append(semaphores)
        return semaphores

    def _check(self, members: Sequence[int]) -> None:
        known = range(self.ranks_on_node)
        if len(set(members)) != len(members) or not all(rank in known for rank in members):
            raise ValueError(f"{list(members)} are not different local ranks of {known}")
