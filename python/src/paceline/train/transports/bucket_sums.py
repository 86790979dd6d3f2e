"""Buckets of gradients, the interface of sums over ranks, and collectives of bytes.

Gradients are summed, never averaged: each rank's gradients are already its part of the global mean.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives.device_clock import module_of
from paceline.collectives.work import ProgressThread
from paceline.measure.records.communication import CompressionResult, StrategyResult
from paceline.plan.costs import all_reduce_bytes
from paceline.plan.spec.extensions import COMPRESSIONS, load_object
from paceline.plan.trials.trial import Trial
from paceline.train.transports.bucket_settings import CompressionSettings, gradient_options_of

Numbers = Mapping[str, int | float]  # of a method, as its descriptor returns them


class Bucket(Protocol):
    """Gradients that are summed together. torch's GradBucket implements it."""

    def index(self) -> int:
        """Return the index of the bucket within the step, from 0; equal on all ranks."""

    def buffer(self) -> Tensor:
        """Return all gradients, shape (elements,), float32; the sum replaces them."""

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer with the shapes of the parameters."""

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the gradients: the same objects in every step."""

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""


class GradientSum(Protocol):
    """Sums buckets over the ranks of a group, beside the other work of the rank."""

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Begin to sum a bucket in place, and return at once. All ranks pass the same buckets in
        the same order.

        The future holds the buffer with the sum, bit-identical on all ranks.
        """

    def describe(self) -> StrategyResult:
        """Return settings and traffic; see `Meter`."""

    def close(self, *, failed: bool) -> None:
        """End background threads without waiting for peers; a second call does nothing."""


class Compressor(Protocol):
    """Sums a bucket by sending less than its gradients.

    A method's implementation is called with its numbers, a seed for what is drawn at random, and
    the process group (None: all ranks), and returns one.
    """

    name: str

    def sum(self, bucket: Bucket) -> float:
        """Sum a bucket in place over the group; blocks. Return the bytes that this rank sent."""

    def describe(self) -> CompressionResult:
        """Return the settings."""


class Meter:
    """Bytes that a rank sent in the last complete step.

    They are the bytes that a network would transfer with algorithms that send no byte twice (see
    `costs.link_cost`). Bytes that ranks of one host write into shared memory are counted
    alike.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._sent = self._uncompressed = 0.0
        self._last: tuple[float, float] | None = None

    def count(self, bucket: Bucket, sent_bytes: float | None = None) -> None:
        """Count a bucket. sent_bytes: None means those of an uncompressed all-reduce."""
        whole = all_reduce_bytes(bucket.buffer().nbytes, self._ranks)
        self._sent += whole if sent_bytes is None else sent_bytes
        self._uncompressed += whole
        if bucket.is_last():
            self._last = self._sent, self._uncompressed
            self._sent = self._uncompressed = 0.0

    def describe(self) -> StrategyResult:
        if self._last is None:
            return {}
        sent, uncompressed = self._last
        return {
            "sent_bytes_per_step": round(sent),
            "uncompressed_bytes_per_step": round(uncompressed),
        }


def only_tensor(future: torch.futures.Future[Sequence[Tensor]]) -> Tensor:
    """Return the result of a work on one tensor."""
    return future.value()[0]


def all_to_all(parts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Send row k of `parts`, shape (ranks, n), to rank k. Return the received rows by sender."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def all_gather(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather `own`, shape (n,), with the same n on all ranks. Return shape (ranks, n)."""
    gathered = own.new_empty((dist.get_world_size(group), own.numel()))
    dist.all_gather(list(gathered.unbind()), own, group=group)
    return gathered


class FlatBucket:
    """Gradients of several tensors that DistributedDataParallel does not bucket itself.

    They are in one buffer that is reused in every step.
    """

    def __init__(self, index: int, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self._index = index
        self._buffer = torch.zeros(sum(sizes), device=device)
        parts = torch.split(self._buffer, sizes)
        self._parts = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._last = False

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._parts

    def parameters(self) -> list[Tensor]:
        """Return the places of the gradients, which stay the same like parameters."""
        return self._parts

    def is_last(self) -> bool:
        return self._last

    def mark_last(self) -> None:
        self._last = True

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy gradients in; each has shape (elements,) or the shape of its place."""
        for part, tensor in zip(self._parts, tensors, strict=True):
            part.copy_(tensor.view_as(part))

    def empty_into(self, tensors: Sequence[Tensor]) -> None:
        """Copy the content back to tensors like those of `fill`."""
        for part, tensor in zip(self._parts, tensors, strict=True):
            tensor.view_as(part).copy_(part)


def pack(
    shapes: Sequence[tuple[int, ...]], most_bytes: float, device: torch.device
) -> list[FlatBucket]:
    """Return buckets of float32 tensors with these shapes, in order, each of at most `most_bytes`
    or of one tensor."""
    groups: list[list[tuple[int, ...]]] = []
    room = 0.0
    for shape in shapes:
        size = 4 * torch.Size(shape).numel()
        if not groups or size > room:
            groups.append([])
            room = most_bytes
        groups[-1].append(shape)
        room -= size
    buckets = [FlatBucket(index, group, device) for index, group in enumerate(groups)]
    if buckets:
        buckets[-1].mark_last()
    return buckets


class Residuals:
    """Compression errors of a rank's gradients, to be sent with those of the next step.

    Error feedback: Seide et al.: 1-Bit Stochastic Gradient Descent (Interspeech 2014). Convergence
    of biased compression with error feedback: Stich, Cordonnier, Jaggi: Sparsified SGD with Memory
    (NeurIPS 2018). One residual for every gradient element, initially zero.

    They belong to parameters, not to buckets, because DistributedDataParallel rebuilds its buckets
    after the first step.
    """

    def __init__(self) -> None:
        self._flat: dict[int, tuple[tuple[int, ...], Tensor]] = {}  # by bucket, with parameters
        self._parts: dict[int, Tensor] = {}  # by parameter: views of those

    def of(self, bucket: Bucket) -> Tensor:
        """Return the residuals of a bucket, shape (elements,), in its order; to be changed in
        place."""
        parameters = tuple(id(parameter) for parameter in bucket.parameters())
        known = self._flat.get(bucket.index())
        if known is not None and known[0] == parameters:
            return known[1]
        flat = torch.zeros_like(bucket.buffer())
        sizes = [gradient.numel() for gradient in bucket.gradients()]
        for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
            if parameter in self._parts:
                part.copy_(self._parts[parameter])
            self._parts[parameter] = part
        self._flat[bucket.index()] = parameters, flat
        return flat


# Sums of buckets: uncompressed, limited in number, gathered during a wait, and compressed
#
# `create_sum` returns the one that a trial asks for.


class PlainSum:
    """One all-reduce per bucket; any number in flight."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._meter = Meter(dist.get_world_size(group))

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        self._meter.count(bucket)
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        assert work is not None
        summed: torch.futures.Future[Tensor] = work.get_future().then(only_tensor)
        return summed

    def describe(self) -> StrategyResult:
        return self._meter.describe()

    def close(self, *, failed: bool) -> None:
        """Do nothing: it has no background threads."""


class InFlight:
    """Limit another sum to n buckets in flight: a later one starts when an earlier one has
    ended."""

    def __init__(self, inner: GradientSum, most: int) -> None:
        self._inner = inner
        self._most = most
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Bucket, torch.futures.Future[Any]]] = deque()
        self._under_way = 0
        self._starting = False

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        # If the future knows the GPU, a stream that waits for it also waits for the GPU's work.
        summed: torch.futures.Future[Any] = torch.futures.Future(
            devices=None if buffer.is_cpu else [buffer.device]
        )
        # Only a chained future raises an error as such (set_exception stores it as a value).
        chained: torch.futures.Future[Tensor] = summed.then(lambda future: future.value())
        with self._lock:
            self._waiting.append((bucket, summed))
        self._start_waiting()
        return chained

    def describe(self) -> StrategyResult:
        return {**self._inner.describe(), "buckets_in_flight": self._most}

    def close(self, *, failed: bool) -> None:
        self._inner.close(failed=failed)

    def _start_waiting(self) -> None:
        """Start waiting buckets, by one thread at a time, because all ranks need the same order."""
        while True:
            with self._lock:
                if self._starting or not self._waiting or self._under_way >= self._most:
                    return
                self._starting = True
                self._under_way += 1
                bucket, summed = self._waiting.popleft()
            self._start(bucket, summed)
            with self._lock:
                self._starting = False

    def _start(self, bucket: Bucket, summed: torch.futures.Future[Any]) -> None:
        def ended(future: torch.futures.Future[Tensor]) -> None:
            with self._lock:
                self._under_way -= 1
            self._start_waiting()
            try:
                result = future.value()
            except Exception as error:  # noqa: BLE001  (raised where the sum is waited for)
                summed.set_exception(error)
            else:
                summed.set_result(result)

        future: torch.futures.Future[Any]
        try:
            future = self._inner.start(bucket)
        except Exception as error:  # noqa: BLE001  (as above)
            future = torch.futures.Future()
            future.set_exception(error)
        future.then(ended)


_CLOSE_LIMIT_S = 10.0
_ABORT_LIMIT_S = 0.5


class GatheredSum:
    """Sums the buckets that have become ready during a wait as one message.

    This is how Horovod sums tensors (Sergeev, Del Balso, arXiv:1802.05799): its cycle time is the
    wait, and its fusion threshold the largest message. After each wait the ranks agree how many
    buckets are ready on all of them. A thread does that, with a process group of its own, because
    it sends at other times than the rest of the rank.

    wait_s: before each message. most_bytes: of a message, unless a bucket is larger. limit_s: of a
    collective, enforced by the transport; after twice that time the thread gives up by itself.
    """

    def __init__(self, wait_s: float, most_bytes: float, limit_s: float) -> None:
        """Open the process group of all ranks; collective."""
        self._wait_s, self._most_bytes = wait_s, most_bytes
        self._group = dist.new_group(timeout=timedelta(seconds=limit_s))
        self._meter = Meter(dist.get_world_size(self._group))
        self._thread = ProgressThread("gathered", dist.get_rank(), 2 * limit_s, "gradients")
        self._lock = threading.Lock()  # of the following
        self._ready: deque[tuple[Bucket, torch.futures.Future[Any]]] = deque()
        self._summed = 0  # buckets of this step
        self._failure: Exception | None = None
        self._memory = torch.empty(0)  # of a message with several buckets
        self._sizes_bytes: list[int] = []  # of the messages of the last step
        self._current: list[int] = []

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        summed: torch.futures.Future[Any] = torch.futures.Future()
        chained: torch.futures.Future[Tensor] = summed.then(lambda future: future.value())
        with self._lock:
            failure = self._failure
            is_first = not self._summed and not self._ready
            if failure is None:
                self._ready.append((bucket, summed))
        if failure is not None:
            summed.set_exception(failure)
        elif is_first:
            self._begin_round()
        return chained

    def describe(self) -> StrategyResult:
        settings: StrategyResult = {
            "bucket_bytes": self._sizes_bytes,
            "bucket_wait_ms": 1000 * self._wait_s,
        }
        return {**self._meter.describe(), **settings}

    def close(self, *, failed: bool) -> None:
        self._thread.close(_ABORT_LIMIT_S if failed else _CLOSE_LIMIT_S)

    def _begin_round(self) -> None:
        work = self._thread.submit("sum", self._round, [])
        work.get_future().then(self._round_ended)

    def _round_ended(self, ended: torch.futures.Future[Any]) -> None:
        """Pass an error on to all sums that wait, and to later ones."""
        try:
            ended.value()
        except Exception as error:  # noqa: BLE001  (raised where a sum is waited for)
            with self._lock:
                self._failure, waiting = error, list(self._ready)
                self._ready.clear()
            for _, summed in waiting:
                summed.set_exception(error)

    def _round(self) -> None:
        """Wait, then sum what is ready on all ranks; begin another round if the step goes on."""
        time.sleep(self._wait_s)
        with self._lock:
            count = torch.tensor([self._summed + len(self._ready)])
        dist.all_reduce(count, dist.ReduceOp.MIN, group=self._group)
        with self._lock:
            buckets = [bucket for bucket, _ in self._ready][: int(count) - self._summed]
        while buckets:
            message = self._fitting(buckets)
            self._sum(message)
            del buckets[: len(message)]
            if self._end(message):
                return
        self._begin_round()

    def _fitting(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Return the first buckets, at least one, that fit into a message."""
        ends = np.cumsum([bucket.buffer().nbytes for bucket in buckets])
        return list(buckets[: max(1, int((ends <= self._most_bytes).sum()))])

    def _sum(self, buckets: Sequence[Bucket]) -> None:
        with torch.no_grad():
            own = [bucket.buffer() for bucket in buckets]
            sizes = [buffer.numel() for buffer in own]
            if len(self._memory) < sum(sizes):
                self._memory = own[0].new_empty(sum(sizes))
            message = own[0] if len(own) == 1 else self._memory[: sum(sizes)]
            if len(own) > 1:
                torch.cat(own, out=message)
            dist.all_reduce(message, group=self._group)
            if len(own) > 1:
                for buffer, part in zip(own, torch.split(message, sizes), strict=True):
                    buffer.copy_(part)
            self._current.append(message.nbytes)

    def _end(self, buckets: Sequence[Bucket]) -> bool:
        """End the sums of the oldest buckets; return whether they were the last of the step."""
        is_last = buckets[-1].is_last()
        for bucket in buckets:
            self._meter.count(bucket)
        if is_last:
            self._sizes_bytes, self._current = self._current, []
        with self._lock:
            ended = [self._ready.popleft() for _ in buckets]
            self._summed = 0 if is_last else self._summed + len(buckets)
        for bucket, summed in ended:
            summed.set_result(bucket.buffer())
        return is_last


class CompressedSum:
    """Sums buckets with a compressor, one after the other in a thread of its own.

    A compressor may need several collectives for a bucket, each with the result of the previous
    one. Submitted from the transport's futures they would have a different order on every rank. One
    thread that processes the buckets in order keeps the same order, and blocks no other thread. On
    a GPU a second stream replaces the thread.

    rank: world rank, for messages. limit_s: limit of a collective, enforced by the transport; after
    twice that time the thread gives up a bucket by itself.
    """

    def __init__(self, compressor: Compressor, ranks: int, rank: int, limit_s: float) -> None:
        self._compressor = compressor
        self._meter = Meter(ranks)
        self._rank = rank
        self._limit_s = limit_s
        self._thread: ProgressThread | None = None
        self._stream: Any = None  # of a GPU

    def start(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if not buffer.is_cpu:
            return self._start_on_stream(bucket)
        if self._thread is None:
            self._thread = ProgressThread("compressed", self._rank, 2 * self._limit_s, "gradients")
        work = self._thread.submit(self._compressor.name, lambda: self._sum(bucket), [buffer])
        summed: torch.futures.Future[Tensor] = work.get_future().then(only_tensor)
        return summed

    def describe(self) -> StrategyResult:
        method: CompressionResult = {"method": self._compressor.name, **self._compressor.describe()}
        return {"compression": method, **self._meter.describe()}

    def close(self, *, failed: bool) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close(_ABORT_LIMIT_S if failed else _CLOSE_LIMIT_S)

    def _sum(self, bucket: Bucket) -> None:
        with torch.no_grad():
            self._meter.count(bucket, self._compressor.sum(bucket))

    def _start_on_stream(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Sum on a GPU: the stream waits for the transport's collectives, the program does not."""
        buffer = bucket.buffer()
        module = module_of(buffer.device)
        if self._stream is None:
            self._stream = module.Stream(buffer.device)
        self._stream.wait_stream(module.current_stream(buffer.device))
        summed: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
        with module.stream(self._stream):
            self._sum(bucket)
            buffer.record_stream(self._stream)
            summed.set_result(buffer)
        return summed


def create_sum(trial: Trial, group: dist.ProcessGroup | None = None) -> GradientSum:
    """Return the sum over the ranks of `group`, or over all; the process group must be open."""
    options = gradient_options_of(trial)
    found: GradientSum
    if options.bucket_wait_ms is not None:
        wait_s, most_bytes = options.bucket_wait_ms / 1000, options.bucket_mb * 2**20
        return GatheredSum(wait_s, most_bytes, trial.limits.collective_s)
    if options.compression is None:
        found = PlainSum(group)
    else:
        compressor = create_compressor(options.compression, trial.training.seed, group)
        found = CompressedSum(
            compressor,
            ranks=dist.get_world_size(group),
            rank=dist.get_rank(),
            limit_s=trial.limits.collective_s,
        )
    if options.buckets_in_flight is not None:
        found = InFlight(found, options.buckets_in_flight)
    return found


def create_compressor(
    settings: CompressionSettings, seed: int, group: dist.ProcessGroup | None = None
) -> Compressor:
    """Return the method's compressor. seed: for what is drawn at random."""
    create = load_object(COMPRESSIONS.get(settings.method).implementation)
    compressor: Compressor = create(settings.numbers, seed, group)
    return compressor
