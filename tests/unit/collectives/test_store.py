"""Waits at the store of all ranks are bounded, and name who is absent."""

from __future__ import annotations

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.base.errors import EnvironmentLacks, TimedOut
from paceline.collectives.node.memory import gather
from paceline.collectives.store import (
    GroupStore,
    cut,
    fresh_name,
    limit_answers,
    store_barrier,
    wait_for,
)
from paceline.plan.trials.trial import StoreAddress
from paceline.runner.job.job import listen_on
from paceline.train.rank.peers import open_again, open_store
from paceline.train.transports.network import GlooTransport


def test_peer_reads_what_the_first_rank_wrote(context_of):
    address = listen_on("lo")
    first = open_store(context_of(0, 2, store=address), 5.0)
    first.set("key", "value")
    peer = StoreAddress(host="127.0.0.1", port=address.port, secret="")
    assert open_store(context_of(1, 2, store=peer), 5.0).get("key") == b"value"


def test_store_that_nobody_serves_is_a_time_out(context_of):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    address = StoreAddress(host="127.0.0.1", port=port, secret="")
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


def test_barrier_calls_a_function_while_ranks_are_absent():
    store = dist.HashStore()
    store_barrier(store, "end", 0, range(2), 5.0, lambda: store.set("end/1", "here"))

    def refuse():
        raise ValueError("rank 1 will never come")

    with pytest.raises(ValueError, match="never come"):
        store_barrier(store, "late", 0, range(2), 5.0, refuse)


def test_barrier_with_a_function_says_its_whole_limit():
    with pytest.raises(TimedOut, match=r"waited 0\.1 s for ranks \[1\] at 'end'"):
        store_barrier(dist.HashStore(), "end", 0, range(2), 0.1, lambda: None)


def test_missing_interface_is_answered_with_those_there_are(make_trial, context_of, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # so that it is restored: the transport sets it
    trial = make_trial(ranks=2).model_copy(update={"interface": "eth77"})
    with pytest.raises(EnvironmentLacks, match=r"'eth77'.*interfaces here: .*lo"):
        GlooTransport().open(context_of(0, 2), trial, dist.HashStore())


@pytest.fixture
def store(context_of):
    return open_store(context_of(0, 1, store=listen_on("lo")), 5.0)


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
    address = StoreAddress(host="127.0.0.1", port=store.port, secret="")
    again = open_again(context_of(0, 1, store=address), 5.0)
    cut(again)
    # The end of the limit would be a DistStoreError: this error comes from the closed connection.
    with pytest.raises(dist.DistNetworkError):
        again.wait(["never"], timedelta(seconds=20))


@pytest.fixture
def on_signal():
    """Return a function that makes another the handler of a signal, which comes soon."""
    before = signal.getsignal(signal.SIGUSR1)

    def handle(handler):
        signal.signal(signal.SIGUSR1, lambda *_: handler())
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()

    yield handle
    signal.signal(signal.SIGUSR1, before)


def test_signal_handler_runs_during_a_wait_for_a_key(store, context_of, on_signal):
    """Otherwise the key would be missing until the end of the limit."""
    address = StoreAddress(host="127.0.0.1", port=store.port, secret="")
    again = open_again(context_of(0, 1, store=address), 5.0)
    on_signal(lambda: again.set("key", ""))
    wait_for(store, ["key"], 10.0, "the key")


def test_signal_handler_runs_during_a_wait_for_the_store(context_of, on_signal):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    served = []

    def serve():
        listener = socket.create_server(("127.0.0.1", port))
        own = StoreAddress(host="127.0.0.1", port=port, listen_fd=listener.detach(), secret="")
        served.append(open_store(context_of(0, 2, store=own), 5.0))

    on_signal(serve)
    address = StoreAddress(host="127.0.0.1", port=port, secret="")
    assert open_store(context_of(1, 2, store=address), 10.0).port == port


def test_value_published_by_one_rank_is_seen_by_another():
    store = dist.HashStore()
    one, two = (GroupStore(store, r, 2) for r in range(2))
    one.publish("memory", "here")
    assert two.lookup("memory", 1.0) == "here"
    assert (two.local_rank, two.ranks_on_node) == (1, 2)


def test_purposes_are_kept_apart():
    store = dist.HashStore()
    GroupStore(store, 0, 1, "photos").publish("memory", "here")
    with pytest.raises(TimedOut, match="rank 0 of other: 'memory'"):
        GroupStore(store, 0, 1, "other").lookup("memory", 0.1)


def test_barriers_can_be_used_again_and_name_who_is_absent():
    store = dist.HashStore()
    ranks = [GroupStore(store, r, 2) for r in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            list(pool.map(lambda rank: rank.barrier(10.0), ranks))
    with pytest.raises(TimedOut, match=r"ranks \[1\]"):
        ranks[0].barrier(0.1)


def test_values_of_all_ranks_are_gathered_in_their_order():
    store = dist.HashStore()
    ranks = [GroupStore(store, r, 3, "hosts") for r in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda rank: gather(rank, f"host{rank.local_rank}", 10.0), ranks))
    assert found == [["host0", "host1", "host2"]] * 3


def test_name_is_new_in_each_start_although_ranks_of_an_earlier_one_have_left_their_words():
    store = dist.HashStore()
    store.set("word/1", "of a rank that has gone")

    def start(rank):
        return fresh_name(store, rank, 3, 20.0)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(start, 0)
        late = [pool.submit(start, rank) for rank in (2, 1)]
        names = {first.result(), *(each.result() for each in late)}
        assert len(names) == 1
        with pytest.raises(TimedOut, match=r"rank 0 of 3 waited 0\.2 s"):
            fresh_name(store, 0, 3, 0.2)  # alone, after a failed attempt all go on
        again = set(pool.map(start, range(3)))
    assert len(again) == 1
    assert again != names
