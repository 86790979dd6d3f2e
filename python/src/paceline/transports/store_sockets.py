"""Limits on waits of torch's TCPStore that have none.

A client waits without limit for the store's answer to `check`, `add` and `get`, and even for the
answer that a wait has timed out (TCPStore.cpp: recvValue; observed with torch 2.13). On a broken
link it waits until TCP gives up after 15 minutes. torch has no setting for it, but the kernel has:
a receive that reaches SO_RCVTIMEO becomes a DistNetworkError, "Socket Timeout".
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import TCPStore


def limit_answers(store: TCPStore, limit_s: float) -> None:
    """Limit the wait for the store's answers to `limit_s`, on all connections of this process."""
    whole_s = int(limit_s)
    limit = struct.pack("ll", whole_s, max(1, int((limit_s - whole_s) * 1e6)))  # a timeval
    for connection in _connections(store):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def cut(store: TCPStore) -> None:
    """Close all connections of this process to the store, so that waits on them fail at once."""
    for connection in _connections(store):
        with suppress(OSError):  # the other side has already closed it
            connection.shutdown(socket.SHUT_RDWR)


def _connections(store: TCPStore) -> Iterator[socket.socket]:
    """Yield this process's connections to the store, found by port: torch does not expose them."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not str(link.readlink()).startswith("socket:"):
                continue
            connection = socket.fromfd(int(link.name), socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            continue  # closed in the meantime
        with connection:
            if _peer_port(connection) == store.port:
                yield connection


def _peer_port(connection: socket.socket) -> int | None:
    """Return the port of the peer; None if it is not a connected TCP socket."""
    try:
        peer = connection.getpeername()
    except OSError:
        return None  # a listening socket
    return peer[1] if isinstance(peer, tuple) else None  # a path: a Unix socket
