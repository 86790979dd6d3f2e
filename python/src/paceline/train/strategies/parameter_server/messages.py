"""Messages between workers and servers: point-to-point messages of a process group of torch.

A worker sends a request to each server: a header, then its gradient if it pushes. A server answers
a fetch with its version, then its weights. A server gets headers from any rank, in the order of
arrival. The group is one of its own, because a server may wait as long as the trial lasts until a
worker has something to say. All other waits have the limit of a collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import RankFailed
from paceline.collectives.torch_internals import source_rank
from paceline.measure.records.rows import UpdateRow
from paceline.plan.trials.trial import Trial
from paceline.train.strategies.parameter_server.descriptor import ParameterServerOptions
from paceline.train.strategies.reduction.flat_layout import FlatLayout, ParameterShard, too_slow
from paceline.train.strategies.reduction.node_shards import OptimizerShard
from paceline.train.training.state import RankState, SavedState
from paceline.train.training.task import Task

_HEADER, _GRADIENT, _VERSION, _WEIGHTS = range(1, 5)  # tags


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHeader:
    """Header of a worker's request to one server.

    pushed: number of updates that the worker has pushed before. clock: steps that it has finished.
    needed_clock: steps that all workers must have finished before the answer. version: of the shard
    that the worker used for the update that it pushes. share: samples of its gradient / samples of
    the batch, summed over the steps of the push.
    """

    pushes: bool = False
    fetches: bool = False
    leaves: bool = False
    pushed: int = 0
    clock: int
    needed_clock: int = 0
    version: int = 0
    share: float = 0.0

    def encoded(self) -> Tensor:
        """Return the header as float64, which holds integers up to 2**53 exactly."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @classmethod
    def decoded(cls, header: Tensor) -> RequestHeader:
        values = dict(zip(_FIELDS, header.tolist(), strict=True))
        share = values.pop("share")
        others: dict[str, Any] = {name: int(value) for name, value in values.items()}
        return cls(**others, share=share)


_FIELDS = [field.name for field in fields(RequestHeader)]


def open_group(trial: Trial) -> Any:
    """Open the process group of the messages; collective over all ranks."""
    return dist.new_group(timeout=timedelta(seconds=trial.limits.trial_s))


class Messages:
    """Messages of one thread of a rank."""

    def __init__(self, group: Any, limit_s: float) -> None:
        """group: that of `open_group`. limit_s: of each wait but that for the next request."""
        self._limit = timedelta(seconds=limit_s)
        self._group = group
        self._sending: dict[int, list[tuple[Any, Tensor]]] = {}  # tensors live until they are sent
        self.sent_bytes = 0

    def next_request(self) -> tuple[int, RequestHeader]:
        """Wait for a request of any other rank; return its rank and the request."""
        header = torch.empty(len(_FIELDS), dtype=torch.float64)
        work = self._group.recv_anysource([header], _HEADER)
        work.wait()
        return source_rank(work), RequestHeader.decoded(header)

    def receive_gradient(self, worker: int, into: Tensor) -> None:
        self._receive(into, worker, _GRADIENT)

    def answer(self, worker: int, version: int, weights: Tensor) -> None:
        """Send a shard to a worker without waiting; `weights` must not change afterwards.

        The worker has received the previous answer, or it would not have sent another request.
        """
        self._finish(worker)
        self._send(torch.tensor([version], dtype=torch.float64), worker, _VERSION)
        self._send(weights, worker, _WEIGHTS)

    def request(self, server: int, request: RequestHeader, gradient: Tensor | None) -> None:
        """Send a request without waiting. gradient: must not change before `finish`."""
        self._send(request.encoded(), server, _HEADER)
        if gradient is not None:
            self._send(gradient, server, _GRADIENT)

    def receive_weights(self, server: int, into: Tensor) -> int:
        """Wait for the answer of a server; return the version of its weights."""
        version = torch.empty(1, dtype=torch.float64)
        self._receive(version, server, _VERSION)
        self._receive(into, server, _WEIGHTS)
        return int(version.item())

    def finish(self) -> None:
        """Wait until everything that this object sent has been taken by its receivers."""
        for rank in list(self._sending):
            self._finish(rank)

    def _finish(self, rank: int) -> None:
        for work, _ in self._sending.pop(rank, ()):
            work.wait(self._limit)

    def _receive(self, into: Tensor, rank: int, tag: int) -> None:
        if into.numel():
            self._group.recv([into], rank, tag).wait(self._limit)

    def _send(self, tensor: Tensor, rank: int, tag: int) -> None:
        if tensor.numel():
            work = self._group.send([tensor], rank, tag)
            self._sending.setdefault(rank, []).append((work, tensor))
            self.sent_bytes += tensor.nbytes


# --- a server: the shard of the weights that it owns, and the thread that takes requests ---------
#
# `ServerShard` is the state of a server without its communication. Every call is about one worker;
# the caller makes calls of different threads one after the other.
#
#     synchronous:        the sum of all workers' gradients of a step is one update
#     all other modes:    every gradient is an update, in the order of arrival
#
# A clock is the number of steps that a worker has finished. A worker at clock c may get weights
# that need clock n as soon as no worker's clock is below n.
#
# Updates are counted by (worker, sequence number). A number that is missing or repeated means that
# an update was lost or arrived twice, which no later result could show.

_SLICE_S = 0.2  # time within which a waiting worker notices that its server failed
_COUNTS = "updates"  # values of a state, by server: the number of updates of each worker


class ServerShard:
    """Weights of one server with their optimiser.

    weights: shape (elements,), float32. version: number of updates that were applied.
    """

    def __init__(
        self,
        layout: FlatLayout,
        shards: Sequence[ParameterShard],
        initial: Tensor,
        task: Task,
        *,
        rank: int,
        workers: int,
        options: ParameterServerOptions,
    ) -> None:
        """layout: of `initial`, the flat weights of the whole model. shards: parts of parameters
        that follow one another there. rank: of this server. The largest lead of a worker over the
        slowest one is checked if the options bound it."""
        self._rank, self._bound_steps = rank, options.staleness_bound_steps
        self._synchronous = options.update_mode == "synchronous"
        self.place = place_of(shards)
        self.weights = initial[self.place].clone()
        self.version = 0
        self.clocks = [0] * workers
        self._pushed = [0] * workers
        self._rows: list[UpdateRow] = []
        self._collected: dict[int, tuple[RequestHeader, Tensor]] = {}
        self._gradient = torch.zeros_like(self.weights)
        self._shard = OptimizerShard(layout, shards, self.weights, task, first=self.place.start)

    def push(self, worker: int, request: RequestHeader, gradient: Tensor) -> None:
        """Take a worker's gradient of the mean loss over the batch, shape (elements,).

        It is the part of its own samples, so those of all workers add up to the gradient of the
        batch; it is not changed. In synchronous mode it is kept until all workers have pushed.
        Raises RankFailed if an update is missing or repeated, or a worker is too far ahead.
        """
        self._check_sequence(worker, request.pushed)
        self._pushed[worker] += 1
        lead_steps = self.clocks[worker] - min(self.clocks)
        self._check_lead(worker, lead_steps)
        self.clocks[worker] = request.clock
        self._rows.append(
            UpdateRow(
                event="applied",
                worker=worker,
                sequence=request.pushed,
                step=request.clock - 1,
                staleness=self.version - request.version,
                lead_steps=lead_steps,
            )
        )
        if not self._synchronous:
            self._apply(gradient, request.share)
            return
        self._collected[worker] = request, gradient
        if len(self._collected) == len(self.clocks):
            # In the order of the ranks, so that the sum has the same bits in every run.
            ordered = [self._collected[worker] for worker in sorted(self._collected)]
            self._collected = {}
            total = torch.stack([each for _, each in ordered]).sum(0)
            self._apply(total, sum(each.share for each, _ in ordered))

    def advance(self, worker: int, clock: int, pushed: int) -> None:
        """Note that a worker has finished `clock` steps and made `pushed` pushes.

        Raises RankFailed if one of the pushes is missing.
        """
        self._check_sequence(worker, pushed)
        self.clocks[worker] = max(self.clocks[worker], clock)

    def may_fetch(self, needed_clock: int) -> bool:
        """Return whether all workers have finished so many steps."""
        return min(self.clocks) >= needed_clock

    def slowest(self) -> list[int]:
        """Return the workers with the smallest clock."""
        return [worker for worker, clock in enumerate(self.clocks) if clock == min(self.clocks)]

    def add_to(self, state: RankState) -> None:
        """Add the weights, the optimiser's state and the counts of updates by worker."""
        self._shard.add_to(state)
        state.values[f"{_COUNTS}/{self._rank}"] = list(self._pushed)

    def restore(self, saved: SavedState) -> list[int]:
        """Continue from a saved state.

        Return the number of updates of each worker so far. They begin with 0 if the state is not of
        servers for as many workers. Raises DataError if the state is of another model.
        """
        self._shard.restore(saved)
        workers = len(self.clocks)
        counts = saved.value(f"{_COUNTS}/{self._rank}")
        self._pushed = list(counts) if _are_counts(counts, workers) else [0] * workers
        self.clocks = [saved.steps] * workers
        return list(self._pushed)

    def take_rows(self) -> list[UpdateRow]:
        """Return the rows of the updates since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def _apply(self, gradient: Tensor, share: float) -> None:
        if share > 0:
            torch.div(gradient, share, out=self._gradient)
            self._shard.set_gradients(self._gradient)
            self._shard.step_part(share)
        self.version += 1

    def _check_sequence(self, worker: int, sequence: int) -> None:
        expected = self._pushed[worker]
        if sequence == expected:
            return
        fault = "was lost" if sequence > expected else "arrived twice"
        number = min(sequence, expected)
        raise RankFailed(
            f"rank {self._rank}: update {number} of rank {worker} {fault} (expected update "
            f"{expected}, got {sequence}), so the weights are wrong. This is a defect of the "
            "transport or the strategy; please report it",
            self._rank,
        )

    def _check_lead(self, worker: int, lead_steps: int) -> None:
        if self._bound_steps is not None and lead_steps > self._bound_steps:
            raise RankFailed(
                f"rank {self._rank}: rank {worker} is {lead_steps} steps ahead of the slowest "
                f"rank, expected at most {self._bound_steps} (staleness_bound_steps). This is a "
                "defect of the strategy; please report it",
                self._rank,
            )


def _are_counts(value: object, workers: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == workers
        and all(type(count) is int and count >= 0 for count in value)
    )


def place_of(shards: Sequence[ParameterShard]) -> slice:
    """Return the elements of the flat array from the first shard to the last one."""
    if not shards:
        return slice(0, 0)
    return slice(shards[0].offset, shards[-1].place.stop)


class Server:
    """The server of one rank, in a thread that takes the requests of other ranks.

    The worker of the same rank calls it without messages.
    """

    def __init__(
        self,
        shard: ServerShard,
        messages: Messages,
        *,
        rank: int,
        ranks: int,
        limit_s: float,
    ) -> None:
        """messages: of the server alone. limit_s: longest wait without progress of any worker."""
        self._shard, self.messages = shard, messages
        self._rank, self._ranks, self._limit_s = rank, ranks, limit_s
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int]] = []  # (worker, clock that it needs)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="parameter-server", daemon=True)
        self._thread.start()

    def request(self, request: RequestHeader, gradient: Tensor | None) -> None:
        """Take a request of the worker of this rank; see `Messages.request`."""
        with self._changed:
            self._raise_failure()
            self._take(self._rank, request, gradient)

    def fetch(self, needed_clock: int, into: Tensor) -> int:
        """Copy the shard for the worker of this rank; return its version.

        Wait until all workers have finished `needed_clock` steps. Raises TimedOut, naming the
        slowest workers, if no worker makes progress within the limit; or the server's failure.
        """
        with self._changed:
            clocks, deadline = list(self._shard.clocks), time.monotonic() + self._limit_s
            while not self._shard.may_fetch(needed_clock):
                self._raise_failure()
                self._changed.wait(_SLICE_S)
                if self._shard.clocks != clocks:
                    clocks, deadline = list(self._shard.clocks), time.monotonic() + self._limit_s
                elif time.monotonic() > deadline:
                    slow = self._shard.slowest()
                    raise too_slow("rank", self._rank, slow, needed_clock - 1, self._limit_s)
            self._raise_failure()
            into.copy_(self._shard.weights)
            return self._shard.version

    @contextmanager
    def locked(self) -> Iterator[ServerShard]:
        """Give the shard, which no request changes meanwhile. Raises the server's failure."""
        with self._changed:
            self._raise_failure()
            yield self._shard

    def close(self, *, failed: bool) -> None:
        """End the thread, which ends when all other workers have left; after a failure, leave it.

        It ends with the process, or with an error when the transport gives up its operations.
        """
        if not failed:
            self._thread.join(self._limit_s)
            self._raise_failure()

    def _run(self) -> None:
        buffers: dict[int, Tensor] = {}
        present = self._ranks - 1
        try:
            while present:
                worker, request = self.messages.next_request()
                gradient = None
                if request.pushes:
                    if worker not in buffers:
                        buffers[worker] = torch.empty_like(self._shard.weights)
                    gradient = buffers[worker]
                    self.messages.receive_gradient(worker, gradient)
                present -= request.leaves
                with self._changed:
                    self._take(worker, request, gradient)
            self.messages.finish()
        except Exception as error:  # noqa: BLE001  (raised in the worker of this rank)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _take(self, worker: int, request: RequestHeader, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._shard.push(worker, request, gradient)
        pushed = request.pushed + (gradient is not None)
        self._shard.advance(worker, request.clock, pushed)
        if request.fetches and worker != self._rank:
            self._waiting.append((worker, request.needed_clock))
        self._answer()
        self._changed.notify_all()

    def _answer(self) -> None:
        """Answer the fetches of other ranks that need not wait any longer."""
        still = []
        for worker, needed_clock in self._waiting:
            if self._shard.may_fetch(needed_clock):
                self.messages.answer(worker, self._shard.version, self._shard.weights.clone())
            else:
                still.append((worker, needed_clock))
        self._waiting = still

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
