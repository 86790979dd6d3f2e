"""Limits on what torch's TCPStore waits for without one.

A client waits for ever for the store's answer to `check`, `add` and `get`, and even for its answer
that a wait has timed out (TCPStore.cpp: recvValue; seen with torch 2.13): on a link that is down,
until TCP gives up a quarter of an hour later. torch cannot be told otherwise, the kernel can: a
receive that reaches SO_RCVTIMEO is a DistNetworkError, "Socket Timeout".
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
    """From now on the store's answers are waited for no longer than that, on all connections."""
    whole_s = int(limit_s)
    limit = struct.pack("ll", whole_s, max(1, int((limit_s - whole_s) * 1e6)))  # a timeval
    for connection in _connections(store):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def cut(store: TCPStore) -> None:
    """End all connections of this process to the store: what waits for it fails at once."""
    for connection in _connections(store):
        with suppress(OSError):  # the other end was first
            connection.shutdown(socket.SHUT_RDWR)


def _connections(store: TCPStore) -> Iterator[socket.socket]:
    """Of this process to the store, known by the port: torch does not give its descriptors out."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not str(link.readlink()).startswith("socket:"):
                continue
            connection = socket.fromfd(int(link.name), socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            continue  # closed meanwhile
        with connection:
            if _peer_port(connection) == store.port:
                yield connection


def _peer_port(connection: socket.socket) -> int | None:
    """None if it is no TCP connection."""
    try:
        peer = connection.getpeername()
    except OSError:
        return None  # it listens
    return peer[1] if isinstance(peer, tuple) else None  # a path: it is of this host's
