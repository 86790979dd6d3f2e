"""Memory and signals that the ranks of one node share."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.collectives.errors import EnvironmentLacks
from paceline.collectives.host import Process
from paceline.collectives.node.memory import (
    NodeShare,
    SharedFile,
    gather,
    lack_of_memory,
    open_shared_file,
)
from paceline.collectives.node.semaphores import (
    LINE_BYTES,
    LOSS_BYTES,
    Barrier,
    Channel,
    PeerMonitor,
    Semaphores,
)

_ADVICE = "use a smaller batch, image or model, or fewer workers on the node"


class SharedNode:
    """Shared objects of the ranks of a node. Creating it, memory, barriers and channels is
    collective: all ranks of the node make the same calls in the same order.

    The ranks exchange messages through the store only once, in the constructor: they open one
    memory file and learn each other's processes. Everything later is a part of the file, and they
    synchronise by semaphores in it. Arrays remain valid after close(), and the kernel frees the
    memory when no process uses it.
    """

    def __init__(
        self, node: NodeShare, limit_s: float, names: Sequence[str] = (), reserved_bytes: int = 0
    ) -> None:
        """limit_s: limit of each wait, here and in all objects created from this. node: used for
        nothing else. names: of the ranks in messages, by local rank. reserved_bytes: of memory that
        will be used for certain, mapped at once.

        Raises EnvironmentLacks if the ranks cannot share memory, TimedOut if a rank does not take
        part.
        """
        self.local_rank = node.local_rank
        self.ranks_on_node = ranks = node.ranks_on_node
        self._file = None if ranks == 1 else _open_file(node, limit_s, reserved_bytes)
        states = self._map(ranks + 1)
        self._refused = states[ranks:]  # whether rank 0 has found too little memory
        needed = Barrier.semaphores_needed(ranks)
        signals = Semaphores(self._map(needed * LINE_BYTES), initialise=self.local_rank == 0)
        self._signals = [signals]
        # Rank 0 sends its process after it has initialised the semaphores.
        processes = {} if ranks == 1 else _processes(node, limit_s)
        losses = self._map(ranks * LOSS_BYTES).reshape(ranks, LOSS_BYTES)
        self._peers = PeerMonitor(
            self.local_rank, processes, states[:ranks], losses, limit_s, names
        )
        self._everyone = Barrier(range(ranks), signals, self._arrivals(ranks), self._peers)

    def memory(self, name: str, size_bytes: int) -> NDArray[np.uint8]:
        """Return shared memory of shape (size_bytes,), initially zero, aligned to a page;
        collective.

        Pages are allocated at first touch, on the NUMA node of the rank that touches them. `name`
        tells the user the purpose, for example "the weights". Raises EnvironmentLacks on all ranks
        if less memory is free, and the errors of a barrier.
        """
        [found] = self.memories(name, [size_bytes])
        return found

    def memories(self, name: str, sizes_bytes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return several pieces of shared memory as `memory` does, with one barrier; collective.

        For example, one for each rank.
        """
        refusal = lack_of_memory(sum(sizes_bytes), f"{name} (shared)", _ADVICE)
        # Only rank 0 decides: another rank may see less, because rank 0 already uses its part.
        if self.local_rank == 0 and refusal is not None:
            self._refused[:] = 1
        self._everyone.wait()
        if self._refused.any():
            raise EnvironmentLacks(refusal or f"too little memory on the node for {name}")
        return [self._map(size) for size in sizes_bytes]

    def barrier(self, members: Sequence[int]) -> Barrier:
        """Return a barrier among `members` (local ranks); collective over all ranks of the node."""
        self._check(members)
        arrivals = self._arrivals(len(members))
        signals = self._semaphores(Barrier.semaphores_needed(len(members)))
        return Barrier(members, signals, arrivals, self._peers)

    def channel(self, sender: int, receiver: int, slots: int, slot_bytes: int) -> Channel:
        """Return slots from local rank `sender` to `receiver`; collective over all ranks of the
        node."""
        self._check([sender, receiver])
        line = -(-slot_bytes // LINE_BYTES) * LINE_BYTES
        memory = self.memory("what crosses between stages", slots * line)
        signals = self._semaphores(Channel.semaphores_needed(slots))
        views = [memory[slot * line :][:slot_bytes] for slot in range(slots)]
        return Channel(sender, receiver, views, signals, self._peers)

    def limit_waits(self, limit_s: float) -> None:
        """Limit each wait from now on, in all objects created from this."""
        self._peers.limit_s = limit_s

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

    def close(self, *, failed: bool = False, loss: str = "") -> None:
        """Announce that this rank leaves, or that it failed; it does not wait, and a second call
        does nothing.

        loss: of another rank, if that is the reason. Ranks that wait for this rank get PeerLost.
        Memory is freed with the last object that uses it.
        """
        if failed:
            self.fail()
        self._peers.announce_leave(loss)
        self._signals.clear()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _map(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return the next part of the file, which all ranks get."""
        size = max(1, size_bytes)  # nothing of size 0 can be mapped
        mapped = mmap.mmap(-1, size) if self._file is None else self._file.map(size)
        return np.frombuffer(mapped, dtype=np.uint8)[:size_bytes]

    def _arrivals(self, members: int) -> NDArray[np.int64]:
        return self._map(members * np.dtype(np.int64).itemsize).view(np.int64)

    def _semaphores(self, count: int) -> Semaphores:
        """Create semaphores; collective. They are ready on all ranks when this returns."""
        memory = self._map(count * LINE_BYTES)
        semaphores = Semaphores(memory, initialise=self.local_rank == 0)
        self._everyone.wait()
        self._signals.append(semaphores)
        return semaphores

    def _check(self, members: Sequence[int]) -> None:
        known = range(self.ranks_on_node)
        if len(set(members)) != len(members) or not all(rank in known for rank in members):
            raise ValueError(f"{list(members)} are not different local ranks of {known}")


def _open_file(node: NodeShare, limit_s: float, reserved_bytes: int) -> SharedFile:
    file = open_shared_file(node, limit_s, reserved_bytes)
    if file is None:
        raise EnvironmentLacks(
            f"the {node.ranks_on_node} ranks of this node must share memory, but cannot open one "
            "another's through /proc (different containers or users, /proc hidden, or a limit of "
            "the process on files or memory, see ulimit -a); start them in one container as one "
            'user. Without shared memory there is local strategy "processes" with transport "gloo"'
        )
    return file


def _processes(node: NodeShare, limit_s: float) -> dict[int, Process]:
    """Return the processes of all ranks of the node by local rank; collective."""
    own = Process.current()
    processes = gather(node, f"{own.pid} {own.start_ticks}", limit_s)
    words = [process.split() for process in processes]
    return {rank: Process(int(pid), int(ticks)) for rank, (pid, ticks) in enumerate(words)}
