"""A store that does not answer blocks no rank (see also test_liveness.py)."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.plan.rank_context import StoreAddress
from paceline.transports.store import open_again, open_store
from paceline.transports.store_sockets import cut, limit_answers


@pytest.fixture
def store(context_of):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    address = StoreAddress(host="127.0.0.1", port=port, listen_fd=listener.detach())
    return open_store(context_of(0, 1, store=address), 5.0)


def test_answers_that_come_are_not_held_up(store):
    limit_answers(store, 0.2)
    store.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(dist.DistStoreError):
        store.wait(["another"], timedelta(seconds=0.5))  # longer than the limit of an answer
    assert store.check(["key"])


def test_no_descriptor_is_left_open(store):
    with Path("/dev/null").open():
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            limit_answers(store, 1.0)
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_cut_connection_fails_at_once(store, context_of):
    address = StoreAddress(host="127.0.0.1", port=store.port)
    again = open_again(context_of(0, 1, store=address), 5.0)
    cut(again)
    # The end of the limit would be a DistStoreError: this error comes from the closed connection.
    with pytest.raises(dist.DistNetworkError):
        again.wait(["never"], timedelta(seconds=20))
