"""Memory that the ranks of one node share, and how they find it.

Decoded photos, say, are kept once a node, not once a rank: local rank 0 makes an anonymous memory
file (memfd_create, Linux) and the others open it through /proc. It has no name in any file system,
so nothing is left behind however the ranks die.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.errors import EnvironmentLacks
from paceline.host.cgroups import memory_room_bytes

_NONCE_BYTES = 16
_LACKS = "lacks: "


class NodeShare(Protocol):
    """The ranks of a job that run on one node and see one another's /proc.

    The names published are seen by these ranks only and are new for each feed: make one NodeShare
    (say, a store with a prefix of its own) for each.
    """

    @property
    def local_rank(self) -> int: ...

    @property
    def ranks_on_node(self) -> int: ...

    def publish(self, name: str, value: str) -> None:
        """Let the node's ranks see `value` under `name`."""

    def lookup(self, name: str, timeout_s: float) -> str:
        """What was published; waits for it. Raises TimedOut after `timeout_s`."""

    def barrier(self, timeout_s: float) -> None:
        """Wait until all ranks of the node are here. Raises TimedOut after `timeout_s`."""


@dataclass(frozen=True, slots=True)
class SoloNode:
    """One rank alone."""

    local_rank: int = 0
    ranks_on_node: int = 1

    def publish(self, name: str, value: str) -> None:
        """Nobody else listens."""

    def lookup(self, name: str, timeout_s: float) -> str:  # noqa: ARG002
        """A rank alone has nobody to ask: reaching this is a defect."""
        raise LookupError(name)

    def barrier(self, timeout_s: float) -> None:
        """Everybody is here."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Memory of `size` bytes, zero at first."""

    buffer: mmap.mmap
    shared: bool  # whether all ranks of the node see the same bytes; else each has its own


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What memory is for: for the message to a user whose machine has not enough of it."""

    what: str
    advice: str


PHOTOS = MemoryUse(
    "the decoded photos", 'use data mode "stream", a smaller image size or fewer steps'
)


def node_memory(
    share: NodeShare, size: int, timeout_s: float, use: MemoryUse = PHOTOS
) -> NodeMemory:
    """Memory that all ranks of the node share, or, if any cannot, private memory for each.

    Raises EnvironmentLacks if the machine has not that much free, TimedOut if the ranks of the
    node do not answer.
    """
    if share.ranks_on_node == 1:
        _require_free(size, use)
        return NodeMemory(mmap.mmap(-1, size), shared=False)
    descriptor = -1
    if share.local_rank == 0:
        descriptor, mapped = _create(share, size, use)
    else:
        mapped = _attach(share.lookup("memory", timeout_s), size)
    share.publish(f"attached/{share.local_rank}", "yes" if mapped else "no")
    everyone = [
        share.lookup(f"attached/{rank}", timeout_s) == "yes" for rank in range(share.ranks_on_node)
    ]
    if descriptor >= 0:
        os.close(descriptor)  # the mapping keeps the memory
    if mapped is not None and all(everyone):
        return NodeMemory(mapped, shared=True)
    if mapped is not None:
        mapped.close()
    _require_free(size, use)
    return NodeMemory(mmap.mmap(-1, size), shared=False)


def _create(share: NodeShare, size: int, use: MemoryUse) -> tuple[int, mmap.mmap | None]:
    """Make the memory file and publish where it is; returns its open descriptor (-1: none).

    A nonce at its end tells whoever opens the path that it is this file: in another PID namespace
    the same path may be somebody else's.
    """
    try:
        _require_free(size, use)
    except EnvironmentLacks as error:
        share.publish("memory", f"{_LACKS}{error}")
        raise
    if not hasattr(os, "memfd_create"):
        share.publish("memory", "none")
        return -1, None
    descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    os.ftruncate(descriptor, size + _NONCE_BYTES)
    mapped = mmap.mmap(descriptor, size + _NONCE_BYTES)
    mapped[size:] = nonce
    share.publish("memory", f"/proc/{os.getpid()}/fd/{descriptor} {nonce.hex()}")
    return descriptor, mapped


def _attach(published: str, size: int) -> mmap.mmap | None:
    if published.startswith(_LACKS):
        raise EnvironmentLacks(published.removeprefix(_LACKS))
    path, _, nonce = published.partition(" ")
    try:
        with Path(path).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), size + _NONCE_BYTES)
    except (OSError, ValueError):  # no such process here, not permitted, or shorter
        return None
    if mapped[size:].hex() == nonce:
        return mapped
    mapped.close()
    return None


def _require_free(size: int, use: MemoryUse) -> None:
    free = available_bytes()
    if size > free:
        raise EnvironmentLacks(
            f"the node must have {size / 2**20:.0f} MiB of memory free for {use.what}, "
            f"{free / 2**20:.0f} MiB are; {use.advice}"
        )


def available_bytes(proc: Path = Path("/proc")) -> int:
    """Memory that can still be had, in bytes: the system's (MemAvailable of /proc/meminfo), or the
    control groups' where it is less."""
    known = [
        room
        for room in (_meminfo(proc / "meminfo"), memory_room_bytes(proc=proc))
        if room is not None
    ]
    return min(known, default=2**63)


def _meminfo(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
