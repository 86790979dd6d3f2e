"""Servers and clients of several workers in threads, over a network that can lose and repeat."""

from __future__ import annotations

import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

from paceline.base.errors import RankFailed, TimedOut
from paceline.train.strategies.parameter_server.descriptor import ParameterServerOptions
from paceline.train.strategies.parameter_server.messages import (
    RequestHeader,
    Server,
    ServerShard,
    place_of,
)
from paceline.train.strategies.parameter_server.strategy import ServerClient
from paceline.train.strategies.reduction.flat_layout import FlatLayout
from paceline.train.training.task import Task, TaskSettings

ELEMENTS = 64
LIMIT_S = 20.0
STEPS = 10
PLAIN_SGD = Task(TaskSettings(learning_rate=1.0, momentum=0.0))


@dataclass
class Network:
    """Queues in place of a process group; `copies` of the push with this number arrive."""

    ranks: int
    faulty_push: tuple[int, int, int] | None = None  # worker, server, sequence
    copies: int = 1
    requests: dict = field(default_factory=dict)
    answers: dict = field(default_factory=dict)

    def __post_init__(self):
        self.requests = {rank: queue.Queue() for rank in range(self.ranks)}
        pairs = [(s, w) for s in range(self.ranks) for w in range(self.ranks)]
        self.answers = {pair: queue.Queue() for pair in pairs}


class QueueMessages:
    """The messages of one thread of a rank."""

    def __init__(self, network, rank, limit_s=LIMIT_S):
        self.network, self.rank, self.limit_s = network, rank, limit_s

    def next_request(self):
        worker, request, self.gradient = self.network.requests[self.rank].get(timeout=LIMIT_S)
        return worker, request

    def receive_gradient(self, worker, into):
        into.copy_(self.gradient)

    def answer(self, worker, version, weights):
        self.network.answers[self.rank, worker].put((version, weights))

    def request(self, server, request, gradient):
        is_faulty = request.pushes and (
            (self.rank, server, request.pushed) == self.network.faulty_push
        )
        message = (self.rank, request, None if gradient is None else gradient.clone())
        if is_faulty and not self.network.copies:  # the gradient is lost, the fetch arrives
            fetch = replace(request, pushes=False, pushed=request.pushed + 1)
            message = (self.rank, fetch, None)
        for _ in range(max(1, self.network.copies) if is_faulty else 1):
            self.network.requests[server].put(message)

    def receive_weights(self, server, into):
        version, weights = self.network.answers[server, self.rank].get(timeout=self.limit_s)
        into.copy_(weights)
        return version

    def finish(self):
        pass


def start(network, rank, *, bound_steps=None, limit_s=LIMIT_S):
    """Return the server and the client of a rank; the weights are zeros."""
    parameter = nn.Parameter(torch.zeros(ELEMENTS))
    layout = FlatLayout.of([("w", parameter)])
    shards = layout.shards(network.ranks)
    shard = ServerShard(
        layout, shards[rank], torch.zeros(ELEMENTS), PLAIN_SGD, rank=rank,
        workers=network.ranks,
        options=ParameterServerOptions(
            update_mode="asynchronous", staleness_bound_steps=bound_steps
        ),
    )  # fmt: skip
    server = Server(
        shard, QueueMessages(network, rank), rank=rank, ranks=network.ranks, limit_s=limit_s
    )
    places = [place_of(each) for each in shards]
    return server, ServerClient(rank, places, server, QueueMessages(network, rank, limit_s=0.5))


def rows_of(server):
    with server.locked() as shard:
        return shard.take_rows()


def train(client, weights, *, needed=lambda step: 0, before_step=lambda step: None):
    """Push ones in every step and fetch; return the missed updates of each fetch."""
    missed = []
    for step in range(STEPS):
        before_step(step)
        is_last = step == STEPS - 1
        clock = STEPS if is_last else needed(step)
        request = RequestHeader(
            pushes=True, fetches=True, clock=step + 1, needed_clock=clock, share=1.0
        )
        client.send(request, torch.ones(ELEMENTS))
        missed.append(client.receive(weights, clock))
    client.leave(STEPS)
    return missed


def run_ranks(network, **options):
    """Train all ranks; return (weights, missed, rows) of each, or raise the first error."""
    found = [start(network, rank) for rank in range(network.ranks)]

    def run(rank):
        server, client = found[rank]
        weights = torch.zeros(ELEMENTS)
        missed = train(client, weights, **options)
        server.close(failed=False)
        return weights, missed, client.take_rows() + rows_of(server)

    with ThreadPoolExecutor(network.ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(network.ranks)]
        errors = [future.exception() for future in futures]
    faults = [error for error in errors if isinstance(error, RankFailed)]
    if faults:
        raise faults[0]
    return [future.result() for future in futures]


def test_every_update_of_every_worker_reaches_all_shards_once():
    for weights, missed, rows in run_ranks(Network(3)):
        assert torch.equal(weights, torch.full((ELEMENTS,), -3.0 * STEPS))
        others = torch.tensor(missed).sum(0)
        assert others.tolist() == [2 * STEPS] * 3
        applied = sorted((r.worker, r.sequence) for r in rows if r.event == "applied")
        assert applied == [(worker, n) for worker in range(3) for n in range(STEPS)]
        assert [r.sequence for r in rows if r.event == "pushed"] == list(range(STEPS))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("copies", "fault"), [(0, "was lost"), (2, "arrived twice")])
def test_seeded_fault_of_the_network_is_detected(seed, copies, fault):
    number = random.Random(seed).randrange(STEPS)
    network = Network(2, faulty_push=(1, 0, number), copies=copies)
    with pytest.raises(RankFailed, match=f"update {number} of rank 1 {fault}") as raised:
        run_ranks(network)
    assert raised.value.rank == 0


def test_fast_worker_stops_at_the_bound_until_the_slow_one_follows():
    network, bound_steps, go = Network(2), 2, threading.Event()
    fast, slow = (start(network, rank, bound_steps=bound_steps) for rank in (0, 1))
    reached = []

    def note(step):
        reached.append(step)

    def needed(step):
        return max(0, step + 1 - bound_steps)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(train, fast[1], torch.zeros(ELEMENTS), needed=needed, before_step=note)
        second = pool.submit(
            train, slow[1], torch.zeros(ELEMENTS), needed=needed,
            before_step=lambda _: go.wait(LIMIT_S),
        )  # fmt: skip
        with pytest.raises(TimeoutError):
            first.result(timeout=0.5)
        assert reached == list(range(bound_steps + 1))
        go.set()
        first.result(timeout=LIMIT_S)
        second.result(timeout=LIMIT_S)
    rows = rows_of(fast[0])
    assert max(r.lead_steps for r in rows if r.worker == 0) == bound_steps


def test_wait_without_progress_names_the_slowest_worker():
    server, client = start(Network(2), 0, limit_s=0.3)
    request = RequestHeader(pushes=True, fetches=True, clock=1, needed_clock=1, share=1.0)
    client.send(request, torch.ones(ELEMENTS))
    with pytest.raises(TimedOut, match="for rank 1 to finish step 0"):
        client.receive(torch.zeros(ELEMENTS), 1)
    server.close(failed=True)
