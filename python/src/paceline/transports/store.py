"""The key-value store of all ranks, with a limit on every wait.

It is torch's TCPStore, served by rank 0 on a socket that the launcher's job bound to one address.
With a given listening descriptor TCPStore opens no other socket (checked against /proc/net/tcp with
torch 2.13).
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from paceline.errors import EnvironmentLacks, TimedOut
from paceline.transports.base import PeerLost
from paceline.transports.store_sockets import limit_answers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._C._distributed_c10d import Store

    from paceline.plan.rank_context import RankContext, StoreAddress

# Texts with which c10d reports a connection that was lost.
_SERVER_GONE = re.compile(r"likely closed|reset by peer|broken pipe", re.IGNORECASE)
ANSWER_SHARE = 1 / 4  # share of a limit by which a wait may exceed it if the store does not answer


def open_store(context: RankContext, limit_s: float) -> TCPStore:
    """Connect to rank 0's store, or serve it; later waits have the same limit.

    Raises EnvironmentLacks without an address, TimedOut if the store does not answer in `limit_s`.
    """
    address = context.store
    if address is None:
        raise EnvironmentLacks(
            f"rank {context.rank} of {context.world_size}: expected the address of rank 0's store, "
            "got none; start the ranks with paceline's job scripts"
        )
    return _connect(context, address, limit_s, listen_fd=address.listen_fd)


def open_again(context: RankContext, limit_s: float) -> TCPStore:
    """Open another connection to the store, so that a wait blocks only its own connection."""
    assert context.store is not None
    return _connect(context, context.store, limit_s, listen_fd=None)


def _connect(
    context: RankContext, address: StoreAddress, limit_s: float, listen_fd: int | None
) -> TCPStore:
    with limited(f"rank {context.rank}: rank 0's store at {address.host}:{address.port}", limit_s):
        store = TCPStore(
            address.host,
            address.port,
            context.world_size,
            is_master=listen_fd is not None,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
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
            store.wait(list(keys), timedelta(seconds=limit_s))


def store_barrier(store: Store, name: str, rank: int, ranks: Sequence[int], limit_s: float) -> None:
    """Wait for all `ranks`, under a name that is used once. Raises TimedOut naming the absent
    ranks."""
    store.set(f"{name}/{rank}", "here")
    keys = [f"{name}/{peer}" for peer in ranks]
    try:
        wait_for(store, keys, limit_s, name)
    except TimedOut as error:
        with limited(f"rank {rank}: rank 0's store, asked which ranks are absent,", limit_s):
            absent = [peer for peer, key in zip(ranks, keys, strict=True) if not store.check([key])]
        raise TimedOut(
            f"rank {rank} waited {limit_s:g} s for ranks {absent} at {name!r}; look at the logs of "
            "those ranks, or raise limits"
        ) from error
