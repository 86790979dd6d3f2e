"""The key-value store of all ranks, with a limit on every wait.

It is torch's TCPStore, served by rank 0 on a socket that the launcher's job bound to one address.
With a given listening descriptor TCPStore opens no other socket (checked against /proc/net/tcp with
torch 2.13).

A client waits without limit for the store's answer to `check`, `add` and `get`, and even for the
answer that a wait has timed out (TCPStore.cpp: recvValue; observed with torch 2.13). On a broken
link it waits until TCP gives up after 15 minutes. torch has no setting for it, but the kernel has:
a receive that reaches SO_RCVTIMEO becomes a DistNetworkError, "Socket Timeout".

Python's signal handlers do not run during a call of torch. A rank that waits for a killed one would
not notice SIGTERM, and torchrun kills it only after 30 s. So the main thread lets another one wait.
"""

from __future__ import annotations

import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from paceline.collectives.errors import PeerLost, TimedOut
from paceline.collectives.signatures import authentic, signed
from paceline.collectives.torch_internals import Store, TCPStore

# Texts with which c10d reports a connection that was lost.
_SERVER_GONE = re.compile(r"likely closed|reset by peer|broken pipe", re.IGNORECASE)
_LOOK_S = 0.5
_WORD_BYTES = 8
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.5e-3, 20e-3
_Result = TypeVar("_Result")
ANSWER_SHARE = 1 / 4  # share of a limit by which a wait may exceed it if the store does not answer


def connect_store(
    host: str, port: int, rank: int, world_size: int, limit_s: float, listen_fd: int | None = None
) -> TCPStore:
    """Connect to rank 0's store; later waits on the connection have the same limit.

    listen_fd: rank 0's socket, which listens there, to serve the store. Without it, a rank may open
    several connections: a wait blocks only its own one. Raises TimedOut if the store does not
    answer in `limit_s`.
    """
    with limited(f"rank {rank}: rank 0's store at {host}:{port}", limit_s):
        connect = partial(
            TCPStore,
            host,
            port,
            world_size,
            is_master=listen_fd is not None,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
        store = _beside_signals(connect)
    limit_answers(store, limit_s * ANSWER_SHARE)
    return store


@contextmanager
def limited(what: str, limit_s: float) -> Iterator[None]:
    """Translate errors of the store to TimedOut or PeerLost with the given text."""
    try:
        yield
    except dist.DistStoreError as error:
        raise TimedOut(f"{what} did not answer within {limit_s:g} s ({error})") from error
    except dist.DistNetworkError as error:
        lost = server_lost(error, what)
        if lost is not None:
            raise lost from error
        raise TimedOut(f"{what} could not be reached within {limit_s:g} s ({error})") from error


def server_lost(error: Exception, what: str) -> PeerLost | None:
    """Return PeerLost if the error means that rank 0 ended while its store was in use, else
    None."""
    if isinstance(error, dist.DistNetworkError) and _SERVER_GONE.search(str(error)):
        return PeerLost(f"{what}: rank 0, which serves it, has ended; look at its log", 0)
    return None


def wait_for(store: Store, keys: Sequence[str], limit_s: float, what: str) -> None:
    """Wait until all `keys` are set. Raises TimedOut naming `what` after `limit_s`."""
    if keys:
        with limited(what, limit_s):
            _beside_signals(partial(store.wait, list(keys), timedelta(seconds=limit_s)))


def put(store: Store, key: str, text: str) -> None:
    """Store a text as one of this trial's ranks."""
    store.set(key, signed(key, text))


def take(store: Store, key: str) -> str:
    """Return a text that a rank has put; it waits for the key up to the store's limit.

    Raises EnvironmentLacks if the text is not of a rank of this trial.
    """
    return authentic(key, bytes(store.get(key)))


def _beside_signals(call: Callable[[], _Result]) -> _Result:
    """Return the result of `call`; signal handlers run while it waits. `call` limits its wait."""
    if threading.current_thread() is not threading.main_thread():
        return call()  # handlers run in the main thread
    result: Future[_Result] = Future()

    def carry_out() -> None:
        try:
            result.set_result(call())
        except Exception as error:  # noqa: BLE001  (raised in the main thread)
            result.set_exception(error)

    # A daemon: after an exception of a handler, the process need not wait for the limit.
    threading.Thread(target=carry_out, name="store", daemon=True).start()
    return result.result()


def store_barrier(
    store: Store,
    name: str,
    rank: int,
    ranks: Sequence[int],
    limit_s: float,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Wait for all `ranks`, under a name that is used once. Raises TimedOut naming the absent
    ranks.

    meanwhile: called twice a second while ranks are absent; what it raises ends the wait.
    """
    store.set(f"{name}/{rank}", "here")
    keys = [f"{name}/{peer}" for peer in ranks]
    try:
        if meanwhile is None:
            wait_for(store, keys, limit_s, name)
        else:
            _poll_for(store, keys, limit_s, name, meanwhile)
    except TimedOut as error:
        with limited(f"rank {rank}: rank 0's store, asked which ranks are absent,", limit_s):
            absent = [peer for peer, key in zip(ranks, keys, strict=True) if not store.check([key])]
        raise TimedOut(
            f"rank {rank} waited {limit_s:g} s for ranks {absent} at {name!r}; look at the logs of "
            "those ranks, or raise limits"
        ) from error


def _poll_for(
    store: Store, keys: Sequence[str], limit_s: float, what: str, meanwhile: Callable[[], None]
) -> None:
    """Do the same as `wait_for`, and call `meanwhile` between looks at the store."""
    deadline = time.monotonic() + limit_s
    with limited(what, limit_s):
        while not store.check(list(keys)):
            meanwhile()
            if time.monotonic() > deadline:
                raise TimedOut(f"{what} did not answer within {limit_s:g} s")
            time.sleep(_LOOK_S)


def fresh_name(store: Store, rank: int, ranks: int, limit_s: float) -> str:
    """Return a new name on which all ranks of a group have agreed; collective.

    A store can outlive its ranks: torchrun keeps it over a restart, and a script may initialise
    again. Each rank publishes a word of its own, rank 0 offers the words that it reads, and what it
    has read of an earlier time is never accepted. Raises TimedOut if a rank does not take part.
    """
    own, deadline = secrets.token_hex(_WORD_BYTES), time.monotonic() + limit_s
    keys = [f"word/{other}" for other in range(ranks)]
    store.set(keys[rank], own)
    wait_for(store, keys if rank == 0 else keys[:1], limit_s, f"rank {rank}: start of a group")
    offer, pause_s = "", _SHORTEST_POLL_S
    while True:
        if rank == 0:
            words = " ".join(_text(store, key) for key in keys)
            if words != offer:
                offer = words
                store.set("offer", offer)
            if all(_text(store, f"accepted/{other}") == offer for other in range(1, ranks)):
                store.set("begun", offer)
                return own
        else:
            words = _text(store, "offer")
            if words != offer and words.split(" ")[rank:][:1] == [own]:
                offer = words
                store.set(f"accepted/{rank}", offer)
            if offer and _text(store, "begun") == offer:
                return offer.split(" ")[0]
        if time.monotonic() > deadline:
            raise TimedOut(
                f"rank {rank} of {ranks} waited {limit_s:g} s for the others to start a group; "
                "look at their logs"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)


def _text(store: Store, key: str) -> str:
    return bytes(store.get(key)).decode() if store.check([key]) else ""


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


@dataclass(slots=True)
class GroupStore:
    """The ranks of one node as a `collectives.node.memory.NodeShare`.

    Names are visible to all objects with the same `prefix`. Each use needs an object with a prefix
    of its own.
    """

    store: Store
    local_rank: int
    ranks_on_node: int
    prefix: str = "node"
    _barriers: Iterator[int] = field(default_factory=count)

    def publish(self, name: str, value: str) -> None:
        put(self.store, f"{self.prefix}/{name}", value)

    def lookup(self, name: str, timeout_s: float) -> str:
        """Return the value published under `name`.

        Raises TimedOut after `timeout_s`, EnvironmentLacks if no rank of this trial published it.
        """
        key = f"{self.prefix}/{name}"
        wait_for(self.store, [key], timeout_s, f"rank {self.local_rank} of {self.prefix}: {name!r}")
        return take(self.store, key)

    def barrier(self, timeout_s: float) -> None:
        """Wait for all ranks of the node. Raises TimedOut naming the absent ranks."""
        name = f"{self.prefix}/barrier/{next(self._barriers)}"
        store_barrier(self.store, name, self.local_rank, range(self.ranks_on_node), timeout_s)
