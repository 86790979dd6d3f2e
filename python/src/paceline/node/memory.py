"""Memory that the ranks of one node share.

Decoded samples, for example, are kept once per node instead of once per rank. Local rank 0 creates
an anonymous memory file (memfd_create, Linux) and the others open it through /proc. The file has
no name in any file system, so nothing is left behind however the ranks end.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.errors import EnvironmentLacks
from paceline.host.memory import available_bytes

_NONCE_BYTES = 16
_LACKS = "lacks: "


class NodeShare(Protocol):
    """The ranks of a job that run on one node and see each other's /proc.

    Only these ranks see the published names, and each use needs its own NodeShare, for example a
    store with its own prefix.
    """

    @property
    def local_rank(self) -> int: ...

    @property
    def ranks_on_node(self) -> int: ...

    def publish(self, name: str, value: str) -> None:
        """Publish `value` under `name` to the node's ranks."""

    def lookup(self, name: str, timeout_s: float) -> str:
        """Wait for a published value and return it. Raises TimedOut after `timeout_s`."""

    def barrier(self, timeout_s: float) -> None:
        """Wait until all ranks of the node have called it. Raises TimedOut after `timeout_s`."""


@dataclass(frozen=True, slots=True)
class SoloNode:
    """A node with a single rank."""

    local_rank: int = 0
    ranks_on_node: int = 1

    def publish(self, name: str, value: str) -> None:
        """Do nothing: there is no other rank."""

    def lookup(self, name: str, timeout_s: float) -> str:  # noqa: ARG002
        """Raise LookupError: a single rank must not look anything up."""
        raise LookupError(name)

    def barrier(self, timeout_s: float) -> None:
        """Return at once."""


def gather(share: NodeShare, value: str, timeout_s: float) -> list[str]:
    """Return the values of all ranks of `share`, which is used for nothing else; collective.

    Raises TimedOut if a rank publishes none within `timeout_s`.
    """
    share.publish(str(share.local_rank), value)
    return [share.lookup(str(rank), timeout_s) for rank in range(share.ranks_on_node)]


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Memory of `size` bytes, zero at first."""

    buffer: mmap.mmap
    shared: bool  # all ranks of the node see the same bytes; otherwise each rank has its own


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Purpose of the memory, for the message to a user whose machine has too little."""

    what: str
    advice: str


SAMPLES = MemoryUse(
    "the decoded samples", 'use reading = "stream", a smaller image size or fewer steps'
)


def node_memory(
    share: NodeShare, size: int, timeout_s: float, use: MemoryUse = SAMPLES
) -> NodeMemory:
    """Return memory that all ranks of the node share, or private memory if any rank cannot.

    size: in bytes. Raises EnvironmentLacks if less memory is free, TimedOut if the ranks of the
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
    """Create the memory file and publish its path; return its open descriptor (-1: none).

    A nonce at its end identifies the file: in another PID namespace the same path may lead to a
    different file.
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
            f"expected {size / 2**20:.0f} MiB of free memory on the node for {use.what}, got "
            f"{free / 2**20:.0f} MiB; {use.advice}"
        )
