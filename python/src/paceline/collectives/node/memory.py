"""Memory that the ranks of one node share.

Weights, for example, are kept once per node instead of once per rank. Local rank 0 creates
an anonymous memory file (memfd_create, Linux) and the others open it through /proc. The file has
no name in any file system, so nothing is left behind however the ranks end. It is sparse: a page
exists once a rank has touched it, so one file is large enough for everything that the ranks share.

The path comes from the trial's store, which every account of the machine can reach. So a rank maps
only what the kernel says is a memory file of its own user, and never a file of a file system.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.collectives.host import available_bytes

_NONCE_BYTES = 16
_FILE_BYTES = 1 << 44
_NAME = "paceline"
_LINK = re.compile(rf"/memfd:{_NAME} \(deleted\)")  # as /proc shows it (man 2 memfd_create)
_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


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


def gather(share: NodeShare, value: str, timeout_s: float, name: str = "value") -> list[str]:
    """Return the values of all ranks of `share`, which uses `name` for nothing else; collective.

    Rank 0 collects them for all, so that the messages grow with the number of ranks, not with its
    square. Raises TimedOut if a rank publishes none within `timeout_s`.
    """
    if share.local_rank != 0:
        share.publish(f"{name}/{share.local_rank}", value)
        values: list[str] = json.loads(share.lookup(f"{name}/all", timeout_s))
        return values
    others = range(1, share.ranks_on_node)
    values = [value, *(share.lookup(f"{name}/{rank}", timeout_s) for rank in others)]
    share.publish(f"{name}/all", json.dumps(values))
    return values


def of_first(share: NodeShare, value: str, timeout_s: float, name: str = "value") -> str:
    """Return the value of rank 0 on all ranks of `share`, which uses `name` for nothing else;
    collective. Raises TimedOut if rank 0 publishes none within `timeout_s`."""
    if share.local_rank != 0:
        return share.lookup(name, timeout_s)
    share.publish(name, value)
    return value


class SharedFile:
    """A memory file that all ranks of a node have open, made by `open_shared_file`.

    All ranks map the same sizes in the same order, and so get the same parts.
    """

    def __init__(self, descriptor: int, reserved: mmap.mmap | None = None) -> None:
        """reserved: the first bytes of the file, mapped."""
        self._descriptor = descriptor
        self._reserved = reserved
        self._used = mmap.ALLOCATIONGRANULARITY  # the first page has the nonce

    def map(self, size: int) -> memoryview:
        """Return the next `size` bytes, zero at first; they stay valid while they are referenced.

        What was reserved costs no further mapping, each of which has a descriptor of its own.
        """
        start = self._used
        self._used += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if self._reserved is not None and start + size <= len(self._reserved):
            return memoryview(self._reserved)[start : start + size]
        return memoryview(mmap.mmap(self._descriptor, size, offset=start))

    def close(self) -> None:
        os.close(self._descriptor)


def open_shared_file(
    share: NodeShare, timeout_s: float, reserved_bytes: int = 0
) -> SharedFile | None:
    """Open one file on all ranks of a node, which are several; None if any rank cannot. Collective.

    reserved_bytes: mapped at once, so that `map` cannot fail for them. Raises TimedOut if the ranks
    do not answer.
    """
    if share.local_rank == 0:
        descriptor = _create(share)
    else:
        descriptor = _attach(share.lookup("memory", timeout_s))
    reserved = _reserve(descriptor, reserved_bytes)
    can = descriptor is not None and (reserved is not None or not reserved_bytes)
    answers = gather(share, "yes" if can else "no", timeout_s, "attached")
    if descriptor is None:
        return None
    if "no" in answers:
        os.close(descriptor)
        return None
    return SharedFile(descriptor, reserved)


def _reserve(descriptor: int | None, size: int) -> mmap.mmap | None:
    if descriptor is None or not size:
        return None
    try:
        return mmap.mmap(descriptor, size)
    except OSError:  # a limit of the process
        return None


def _create(share: NodeShare) -> int | None:
    """Create the memory file and publish its path.

    A nonce at its start identifies the file: in another PID namespace the same path may lead to a
    different file.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    descriptor = _create_file(nonce)
    path = "none" if descriptor is None else f"/proc/{os.getpid()}/fd/{descriptor}"
    share.publish("memory", f"{path} {nonce.hex()}")
    return descriptor


def _create_file(nonce: bytes) -> int | None:
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    except OSError:  # forbidden, or too many descriptors
        return None
    try:
        os.ftruncate(descriptor, _FILE_BYTES)
        os.pwrite(descriptor, nonce, 0)
    except OSError:  # a limit of the process on the sizes of files
        os.close(descriptor)
        return None
    return descriptor


def _attach(published: str) -> int | None:
    path, _, nonce = published.partition(" ")
    return open_memory(path, _LINK, lambda d: _is_own_memory(d) and _begins_with(d, nonce))


def open_memory(path: str, link: re.Pattern[str], is_right: Callable[[int], bool]) -> int | None:
    """Open memory of another rank by the path of its descriptor below /proc; None if that fails.

    link: what the path has to lead to. is_right: tells of the descriptor whether it is that memory;
    it may raise OSError.
    """
    if not _PATH.fullmatch(path):
        return None
    try:
        # before it is opened: a device may act on that
        if not link.fullmatch(str(Path(path).readlink())):
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no such process here, or not permitted
        return None
    with suppress(OSError):  # another process's path, which is not a file here
        if is_right(descriptor):
            return descriptor
    os.close(descriptor)
    return None


def is_unnamed_file(descriptor: int, size: int) -> bool:
    """Return whether it is a file of this user, of a size, without a name in any file system."""
    found = os.fstat(descriptor)
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and found.st_nlink == 0
        and found.st_size == size
    )


def _begins_with(descriptor: int, nonce: str) -> bool:
    return os.pread(descriptor, _NONCE_BYTES, 0).hex() == nonce


def _is_own_memory(descriptor: int) -> bool:
    """Return whether the kernel knows it as a memory file that this user made with `_create`."""
    link = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    return _LINK.fullmatch(link) is not None and is_unnamed_file(descriptor, _FILE_BYTES)


def lack_of_memory(size: int, what: str, advice: str) -> str | None:
    """Return the message to a user whose machine has not `size` bytes free; None if it has."""
    free = available_bytes()
    if size <= free:
        return None
    return (
        f"expected {size / 2**20:.0f} MiB of free memory on the node for {what}, got "
        f"{free / 2**20:.0f} MiB; {advice}"
    )
