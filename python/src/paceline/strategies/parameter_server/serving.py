"""A server: a thread that takes the requests of other ranks, beside the worker of its own rank."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch

from paceline.errors import TimedOut
from paceline.strategies.parameter_server.server import ServerShard, Update

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.records.rows import UpdateRow
    from paceline.strategies.parameter_server.messages import Messages, Request
    from paceline.training.state import RankState, SavedState

_SLICE_S = 0.2  # time within which a waiting worker notices that its server failed


class Server:
    """The server of one rank. The worker of the same rank calls it without messages."""

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
        self._shard, self._messages = shard, messages
        self._rank, self._ranks, self._limit_s = rank, ranks, limit_s
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int]] = []  # (worker, clock that it needs)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="parameter-server", daemon=True)
        self._thread.start()

    def request(self, request: Request, gradient: Tensor | None) -> None:
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
                    raise self._too_slow(needed_clock)
            self._raise_failure()
            into.copy_(self._shard.weights)
            return self._shard.version

    def add_to(self, state: RankState) -> None:
        """Add the shard to a state; see `ServerShard.add_to`."""
        with self._changed:
            self._raise_failure()
            self._shard.add_to(state)

    def restore(self, saved: SavedState) -> list[int]:
        """Continue from a saved state, before the first request; see `ServerShard.restore`."""
        with self._changed:
            return self._shard.restore(saved)

    def steps_ahead(self) -> int:
        """Return how many steps the fastest worker is ahead of that of this rank."""
        with self._changed:
            return max(self._shard.clocks) - self._shard.clocks[self._rank]

    def take_rows(self) -> list[UpdateRow]:
        """Return the rows of the updates since the last call."""
        with self._changed:
            return self._shard.take_rows()

    @property
    def sent_bytes(self) -> int:
        return self._messages.sent_bytes

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
                worker, request = self._messages.next_request()
                gradient = None
                if request.pushes:
                    if worker not in buffers:
                        buffers[worker] = torch.empty_like(self._shard.weights)
                    gradient = buffers[worker]
                    self._messages.receive_gradient(worker, gradient)
                present -= request.leaves
                with self._changed:
                    self._take(worker, request, gradient)
            self._messages.finish()
        except Exception as error:  # noqa: BLE001  (raised in the worker of this rank)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _take(self, worker: int, request: Request, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._shard.push(
                Update(
                    worker=worker,
                    sequence=request.pushed,
                    step=request.clock - 1,
                    version=request.version,
                    share=request.share,
                ),
                gradient,
            )
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
                self._messages.answer(worker, self._shard.version, self._shard.weights.clone())
            else:
                still.append((worker, needed_clock))
        self._waiting = still

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _too_slow(self, needed_clock: int) -> TimedOut:
        slowest = self._shard.slowest()
        names = ", ".join(map(str, slowest))
        return TimedOut(
            f"rank {self._rank}: waited {self._limit_s:g} s (limits.collective_s) for rank "
            f"{names} to finish step {needed_clock - 1}; no rank made progress. Look at the logs "
            "of these ranks; if they only need more time, increase limits.collective_s in the spec"
        )
