from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from paceline.errors import EnvironmentLacks, TimedOut, UsageError
from paceline.plan.rank_context import StoreAddress
from paceline.transports import create_transport
from paceline.transports.base import PeerLost
from paceline.transports.gloo.transport import GlooTransport
from paceline.transports.store import open_store, store_barrier


def served():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return StoreAddress(host="127.0.0.1", port=port, listen_fd=listener.detach())


def test_peer_reads_what_the_first_rank_wrote(context_of):
    address = served()
    first = open_store(context_of(0, 2, store=address), 5.0)
    first.set("key", "value")
    peer = StoreAddress(host="127.0.0.1", port=address.port)
    assert open_store(context_of(1, 2, store=peer), 5.0).get("key") == b"value"


def test_store_that_nobody_serves_is_a_time_out(context_of):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    address = StoreAddress(host="127.0.0.1", port=port)
    with pytest.raises(TimedOut, match=rf"rank 1: rank 0's store at 127\.0\.0\.1:{port}"):
        open_store(context_of(1, 2, store=address), 1.0)


def test_rank_without_an_address_is_told_how_to_start(context_of):
    with pytest.raises(EnvironmentLacks, match="address of rank 0's store"):
        open_store(context_of(1, 2), 1.0)


def test_barrier_names_the_ranks_that_did_not_come():
    store = dist.HashStore()
    store.set("start/2", "here")
    with pytest.raises(TimedOut, match=r"ranks \[1\] at 'start'"):
        store_barrier(store, "start", 0, range(3), 0.1)


def test_single_rank_has_no_transport(make_trial):
    assert create_transport(make_trial()) is None


def test_no_transport_for_several_ranks_is_refused(make_trial):
    trial = make_trial(ranks=2).model_copy(update={"transport": "none"})
    with pytest.raises(UsageError, match='use "gloo", "mpi" or "spark-allgather"'):
        create_transport(trial)


def test_missing_interface_is_answered_with_those_there_are(make_trial, context_of, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # so that it is restored: the transport sets it
    trial = make_trial(ranks=2).model_copy(update={"interface": "eth77"})
    with pytest.raises(EnvironmentLacks, match=r"'eth77'.*it has .*lo"):
        GlooTransport().open(context_of(0, 2), trial, dist.HashStore())


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("Timed out waiting 2000ms for recv operation to complete", TimedOut),
        ("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1", PeerLost),
        ("Connection reset by peer", PeerLost),
        ("shape mismatch", None),
    ],
)
def test_gloo_errors_are_told_apart(text, meaning):
    explained = GlooTransport().explain(RuntimeError(text))
    assert explained is None if meaning is None else type(explained) is meaning
