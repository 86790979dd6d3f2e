"""Buckets on their way: how many at once, in which order, counted, and with errors that show."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from paceline.train.transports.bucket_sums import (
    CompressedSum,
    FlatBucket,
    GatheredSum,
    InFlight,
    Meter,
    pack,
)

CPU = torch.device("cpu")
LIMIT_S = 20.0


class Slow:
    """Sums that end when the test lets them."""

    def __init__(self) -> None:
        self.started = []

    def start(self, bucket):
        future = torch.futures.Future()
        self.started.append((bucket, future))
        return future.then(lambda f: f.value())

    def end(self, number):
        bucket, future = self.started[number]
        future.set_result(bucket.buffer())

    def describe(self):
        return {"sent_bytes_per_step": 7}

    def close(self, *, failed):
        self.closed = failed


def buckets_of(count):
    return [FlatBucket(index, [(2,)], CPU) for index in range(count)]


def test_no_more_than_so_many_are_under_way_and_the_order_stays():
    slow, buckets = Slow(), buckets_of(5)
    sums = InFlight(slow, 2)
    futures = [sums.start(bucket) for bucket in buckets]
    assert [b.index() for b, _ in slow.started] == [0, 1]
    slow.end(1)
    assert [b.index() for b, _ in slow.started] == [0, 1, 2]
    assert futures[1].done()
    assert not futures[0].done()
    slow.end(0)
    slow.end(2)
    slow.end(3)
    slow.end(4)
    assert [future.wait().data_ptr() for future in futures] == [
        bucket.buffer().data_ptr() for bucket in buckets
    ]
    assert [b.index() for b, _ in slow.started] == [0, 1, 2, 3, 4]


def test_sums_that_end_at_once_do_not_wait_for_anybody():
    class Quick(Slow):
        def start(self, bucket):
            future = super().start(bucket)
            self.end(-1)
            return future

    sums = InFlight(Quick(), 1)
    assert all(sums.start(bucket).done() for bucket in buckets_of(50))


@pytest.mark.parametrize("at_once", [True, False])
def test_failure_of_one_bucket_is_raised_by_its_future_and_the_next_one_starts(at_once):
    class Failing(Slow):
        def start(self, bucket):
            if bucket.index() == 0 and at_once:
                raise RuntimeError("no wire")
            future = super().start(bucket)
            if bucket.index() == 0:
                self.started[0][1].set_exception(RuntimeError("no wire"))
            return future

    slow = Failing()
    sums = InFlight(slow, 1)
    first, second = (sums.start(bucket) for bucket in buckets_of(2))
    with pytest.raises(RuntimeError, match="no wire"):
        first.wait()
    slow.end(-1)
    assert second.wait().shape == (2,)


def test_limit_describes_itself_and_closes_what_it_limits():
    slow = Slow()
    sums = InFlight(slow, 3)
    assert sums.describe() == {"sent_bytes_per_step": 7, "buckets_in_flight": 3}
    sums.close(failed=True)
    assert slow.closed is True


@pytest.fixture
def alone():
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def gathered(alone):
    sums = GatheredSum(wait_s=0.2, most_bytes=100, limit_s=LIMIT_S)
    yield sums
    sums.close(failed=False)
    assert not [t for t in threading.enumerate() if t.name.startswith("gathered")]


def test_buckets_that_are_ready_after_a_wait_are_one_message_up_to_its_size(gathered):
    sizes = [10, 10, 10, 40, 5, 5]
    for _ in range(2):  # steps
        buckets = pack([(size,) for size in sizes], 0, CPU)
        for number, bucket in enumerate(buckets):
            bucket.fill([torch.full((sizes[number],), float(number))])
        futures = [gathered.start(bucket) for bucket in buckets]
        assert not any(future.done() for future in futures)
        found = [future.wait() for future in futures]
        assert [sum_.tolist() for sum_ in found] == [
            [float(number)] * size for number, size in enumerate(sizes)
        ]
        assert all(
            f.data_ptr() == b.buffer().data_ptr() for f, b in zip(found, buckets, strict=True)
        )
        assert gathered.describe()["bucket_bytes"] == [80, 40, 160, 40]
    assert gathered.describe()["bucket_wait_ms"] == 200


def test_buckets_that_come_later_are_a_later_message(gathered):
    first, last = pack([(1,), (2,)], 0, CPU)
    assert gathered.start(first).wait().shape == (1,)
    assert gathered.start(last).wait().shape == (2,)
    assert gathered.describe()["bucket_bytes"] == [4, 8]


def test_failure_of_a_message_is_raised_by_all_that_wait_and_by_later_ones(gathered, monkeypatch):
    def fail(*_arguments, **_named):
        raise RuntimeError("no wire")

    monkeypatch.setattr(dist, "all_reduce", fail)
    first, last = pack([(1,), (2,)], 0, CPU)
    for future in [gathered.start(first), gathered.start(last)]:
        with pytest.raises(RuntimeError, match="rank 0: gathered sum failed: no wire"):
            future.wait()
    with pytest.raises(RuntimeError, match="no wire"):
        gathered.start(first).wait()


class Doubling:
    """A compressor that doubles, when it may."""

    name = "doubling"

    def __init__(self) -> None:
        self.may = threading.Event()
        self.seen = []

    def sum(self, bucket):
        assert self.may.wait(LIMIT_S)
        self.seen.append(bucket.index())
        if bucket.index() == 7:
            raise RuntimeError("peer closed its connection")
        bucket.buffer().mul_(2)
        return 10.0

    def describe(self):
        return {"factor": 2}


def test_compression_goes_on_beside_whoever_started_it_in_order():
    doubling = Doubling()
    sums = CompressedSum(doubling, ranks=2, rank=0, limit_s=LIMIT_S)
    buckets = pack([(2,), (3,)], 0, CPU)
    for bucket in buckets:
        bucket.fill([torch.ones(len(bucket.buffer()))])
    futures = [sums.start(bucket) for bucket in buckets]
    assert not any(future.done() for future in futures)  # start returned all the same
    doubling.may.set()
    assert [future.wait().tolist() for future in futures] == [[2.0, 2.0], [2.0, 2.0, 2.0]]
    assert doubling.seen == [0, 1]
    assert sums.describe() == {
        "compression": {"method": "doubling", "factor": 2},
        "sent_bytes_per_step": 20,
        "uncompressed_bytes_per_step": 20,  # two ranks: half the bytes there, half of them back
    }
    sums.close(failed=False)
    sums.close(failed=False)
    assert not [t for t in threading.enumerate() if t.name.startswith("compressed")]


def test_failure_of_a_compressor_names_the_rank_and_what_it_did():
    doubling = Doubling()
    doubling.may.set()
    sums = CompressedSum(doubling, ranks=2, rank=5, limit_s=LIMIT_S)
    with pytest.raises(RuntimeError, match=r"rank 5: compressed doubling failed: peer closed"):
        sums.start(FlatBucket(7, [(1,)], CPU)).wait()
    with pytest.raises(RuntimeError, match="peer closed"):
        sums.start(FlatBucket(0, [(1,)], CPU)).wait()
    sums.close(failed=True)


def test_meter_counts_whole_steps():
    meter = Meter(ranks=4)
    assert meter.describe() == {}
    first, last = pack([(10,), (20,)], 0, CPU)
    for _ in range(2):
        meter.count(first, 5.0)
        meter.count(last)
    meter.count(first, 99.0)
    assert meter.describe() == {"sent_bytes_per_step": 125, "uncompressed_bytes_per_step": 180}


def test_buckets_hold_what_fits_in_order_and_give_it_back():
    shapes = [(4,), (2, 3), (100,), (1,)]
    buckets = pack(shapes, 40, CPU)
    assert [[tuple(g.shape) for g in b.gradients()] for b in buckets] == [
        [(4,), (2, 3)], [(100,)], [(1,)],
    ]  # fmt: skip
    assert [b.is_last() for b in buckets] == [False, False, True]
    tensors = [torch.arange(4.0), torch.arange(6.0)]
    buckets[0].fill(tensors)
    assert buckets[0].gradients()[1].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    buckets[0].buffer().add_(1)
    buckets[0].empty_into(tensors)
    assert tensors[1].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_no_gradients_need_no_bucket():
    assert pack([], 40, CPU) == []
