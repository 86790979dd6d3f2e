"""Exchange of shards among ranks that are threads; tests/contract/test_zero.py has real groups."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from paceline.train.strategies.reduction import node_shards
from paceline.train.strategies.reduction.flat_layout import FlatLayout
from paceline.train.strategies.reduction.node_shards import OptimizerShard, ZeroExchange
from paceline.train.workloads.build import make_task

RANKS = 3
# the 7 rows give the shards different lengths
SHAPES = {"first": (37,), "linear": (7, 5), "last": (4, 10)}
ROWS = {"linear": 7}
SMALL_MB = 100 / 2**20


class Group:
    """The messages of threads; `of` is the group as one of them sees it."""

    def __init__(self):
        self.sent = [torch.empty(0)] * RANKS
        self.line = threading.Barrier(RANKS)

    def of(self, rank):
        return Rank(self, rank)


class Rank:
    def __init__(self, group, rank):
        self.group, self.rank, self.messages = group, rank, []

    def exchanged(self, sent):
        self.messages.append(len(sent))
        self.group.sent[self.rank] = sent.clone()
        self.group.line.wait(10)
        found = list(self.group.sent)
        self.group.line.wait(10)
        return found


class Done:
    """An operation that has ended."""

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(None)
        return future

    def wait(self):
        return True


class FakeDist:
    @staticmethod
    def get_rank(group):
        return group.rank

    @staticmethod
    def all_to_all_single(received, sent, group, async_op):
        assert async_op
        parts = [each.view(RANKS, -1)[group.rank] for each in group.exchanged(sent)]
        received.copy_(torch.cat(parts))
        return Done()


@pytest.fixture(autouse=True)
def threads_for_ranks(monkeypatch):
    monkeypatch.setattr(node_shards, "dist", FakeDist)


def numbers(seed):
    """Return whole numbers, whose sums are exact, by the name of a parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randint(9, s, generator=generator).float() for n, s in SHAPES.items()}


def run(message_mb, body):
    """Return body(exchange, shards, rank) of each rank, with the sizes of its messages."""
    group = Group()

    def on_rank(rank):
        view, parameters = (
            group.of(rank),
            {n: nn.Parameter(t) for n, t in numbers(9 + rank).items()},
        )
        layout = FlatLayout.of(parameters.items())
        weights = torch.zeros(layout.elements)
        layout.bind(parameters, weights, copy=True)
        task = make_task("tiny", classes=3)
        shards = [
            OptimizerShard(layout, owned, weights, task if number == rank else None)
            for number, owned in enumerate(layout.shards(RANKS, ROWS))
        ]
        for shard in shards:
            shard.reduce(numbers(rank), [])
        body(ZeroExchange(shards, view, message_mb), shards, rank)
        gradients = torch.zeros(layout.elements)
        for shard in shards:
            shard.copy_gradients_to(gradients)
        flats = {"weights": weights, "gradients": gradients}
        return view.messages, {
            kind: {name: layout.view(flat, name) for name in SHAPES} for kind, flat in flats.items()
        }

    with ThreadPoolExecutor(RANKS) as pool:
        return [future.result() for future in [pool.submit(on_rank, r) for r in range(RANKS)]]


@pytest.mark.parametrize("message_mb", [25.0, SMALL_MB], ids=["one message", "several"])
def test_each_rank_sums_its_own_shard_and_takes_the_others(message_mb):
    def both(exchange, shards, rank):
        before = [[t.clone() for t in shard.gradient_tensors()] for shard in shards]
        exchange.reduce_scatter()
        for number, (shard, old) in enumerate(zip(shards, before, strict=True)):
            pairs = zip(shard.gradient_tensors(), old, strict=True)
            assert all(torch.equal(*pair) for pair in pairs) == (number != rank)
        exchange.all_gather(OptimizerShard.gradient_tensors)

    total = {n: sum(numbers(rank)[n] for rank in range(RANKS)) for n in SHAPES}
    for _, found in run(message_mb, both):
        assert all(torch.equal(found["gradients"][name], total[name]) for name in SHAPES)


def test_each_rank_takes_the_weights_of_the_ranks_that_update_them():
    found = run(SMALL_MB, lambda exchange, *_: exchange.all_gather(OptimizerShard.weights))
    # 7 rows among 3 ranks
    rows = [numbers(9)["linear"][:3], numbers(10)["linear"][3:5], numbers(11)["linear"][5:]]
    for _, each in found:
        assert torch.equal(each["weights"]["linear"], torch.cat(rows))
        assert all(torch.equal(each["weights"][n], found[0][1]["weights"][n]) for n in SHAPES)


def test_messages_are_as_long_as_reported_and_not_longer_than_allowed():
    reported = []

    def scatter(exchange, *_):
        exchange.reduce_scatter()
        reported.append(exchange.describe())

    for sent, _ in run(SMALL_MB, scatter):
        assert [4 * elements for elements in sent] == reported[0]["bucket_bytes"]
        assert max(sent) <= SMALL_MB * 2**20 / 4
        # a ring of 3 sends 4/3 of the payload
        assert reported[0]["sent_bytes_per_step"] == round(4 * sum(sent) * 4 / 3)


def test_ranks_without_a_shard_send_nothing():
    shards = [OptimizerShard(FlatLayout.of([]), [], torch.ones(0), None) for _ in range(RANKS)]
    group = Group().of(0)
    exchange = ZeroExchange(shards, group, 25.0)
    exchange.reduce_scatter()
    exchange.all_gather(OptimizerShard.weights)
    assert exchange.describe()["bucket_bytes"] == group.messages == []
