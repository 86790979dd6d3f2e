"""Messages between workers and servers: point-to-point messages of a process group of torch.

A worker sends a request to each server: a header, then its gradient if it pushes. A server answers
a fetch with its version, then its weights. A server gets headers from any rank, in the order of
arrival. The group is one of its own, because a server may wait as long as the trial lasts until a
worker has something to say. All other waits have the limit of a collective.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives.torch_internals import source_rank
from paceline.plan.trials.trial import Trial

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
