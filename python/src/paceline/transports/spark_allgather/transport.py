"""Spark's barrier messages as a torch.distributed backend named `spark-allgather`.

It shows what Spark itself can transfer between the tasks of a stage: strings, through the driver,
about one call a second. Importing this module registers the backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.errors import UsageError
from paceline.transports.process_group import ThreadedProcessGroup, ThreadedTransport
from paceline.transports.recorder import begin_operation, payload_bytes
from paceline.transports.spark_allgather.messages import Messages, chunk_bytes, offered

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from paceline.plan.rank_context import RankContext
    from paceline.plan.trial import Trial
    from paceline.transports.work import PendingWork

BACKEND = "spark-allgather"
_ALGORITHM = "through the driver"
_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}


class SparkProcessGroup(ThreadedProcessGroup):
    """All tasks of a barrier stage.

    Every rank receives every rank's bytes and reduces them in the order of ranks, so all results
    are bit-identical, in every run.
    """

    backend = BACKEND
    library = "Spark"

    def __init__(self, messages: Messages, rank: int, size: int, limit_s: float, name: str) -> None:
        super().__init__(rank=rank, size=size, world_rank=rank, name=name, limit_s=limit_s)
        self._messages = messages

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        """Reduce each tensor over all ranks in place."""
        requested = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        reduce = next((f for op, f in _REDUCTIONS.items() if requested == op), None)
        if reduce is None:
            raise UsageError(
                f"{BACKEND}: expected sum, average, product, min or max, got {requested}"
            )

        def call() -> None:
            for tensor in tensors:
                self._reduce(tensor, reduce)
                if requested == dist.ReduceOp.AVG:
                    tensor.detach().div_(self._size)

        return self._submit("allreduce", call, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        root: int = opts.rootRank if opts is not None else 0

        def call() -> None:
            for tensor in tensors:
                own = tensor.detach().contiguous()
                sizes = [0] * self._size
                sizes[root] = payload_bytes(own)
                source = _bytes_of(own) if self._rank == root else memoryview(b"")
                self._collect("broadcast", source, sizes, {root: own})
                if self._rank != root:
                    tensor.detach().copy_(own)

        return self._submit("broadcast", call, tensors)

    def allgather(
        self,
        output_tensors: list[list[Tensor]],
        input_tensors: list[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> PendingWork:
        """Copy every rank's tensor to every rank; shapes may differ between ranks."""

        def call() -> None:
            for outputs, own in zip(output_tensors, input_tensors, strict=True):
                parts = {rank: out.detach().contiguous() for rank, out in enumerate(outputs)}
                sizes = [payload_bytes(part) for part in parts.values()]
                self._collect("allgather", _bytes_of(own.detach().contiguous()), sizes, parts)
                for rank, out in enumerate(outputs):
                    out.detach().copy_(parts[rank])

        return self._submit("allgather", call, output_tensors)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> PendingWork:
        """Copy every rank's tensor consecutively into `output`."""
        parts = [p.view(own.shape) for p in output.view(-1).chunk(self._size)]
        return self.allgather([parts], [own], opts)

    _allgather_base = all_gather_single  # the name before torch 2.13

    def barrier(self, opts: Any = None) -> PendingWork:  # noqa: ARG002
        def call() -> None:
            self._collect("barrier", memoryview(b""), [0] * self._size, {})

        return self._submit("barrier", call, [])

    def _submit(self, name: str, call: Callable[[], None], tensors: list[Any]) -> PendingWork:
        operation = begin_operation(self._name, self._size, name, payload_bytes(tensors))
        operation.algorithm = _ALGORITHM
        messages = self._messages

        def counted() -> None:
            bytes_before, messages_before = messages.sent_bytes, messages.sent_messages
            call()
            operation.sent_bytes = messages.sent_bytes - bytes_before
            operation.sent_messages = messages.sent_messages - messages_before

        return self._progress.submit(name, counted, tensors, operation)

    def _reduce(self, tensor: Tensor, reduce: Callable[[Tensor, Tensor], Tensor]) -> None:
        own = tensor.detach().contiguous()
        flat = own.view(-1)
        size = payload_bytes(own)
        for start, parts in self._messages.exchange(
            "allreduce", _bytes_of(own), [size] * self._size
        ):
            first, *others = (_elements(part, own.dtype) for part in parts)
            for other in others:
                first = reduce(first, other)
            begin = start // own.element_size()
            flat[begin : begin + len(first)] = first
        if own.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(own)

    def _collect(
        self, name: str, own: memoryview, sizes: list[int], targets: dict[int, Tensor]
    ) -> None:
        """Exchange bytes, and copy those of the ranks in `targets` into their tensors
        (contiguous)."""
        into = {rank: _bytes_of(target) for rank, target in targets.items()}
        for start, parts in self._messages.exchange(name, own, sizes):
            for rank, target in into.items():
                target[start : start + len(parts[rank])] = parts[rank]


class SparkAllGatherTransport(ThreadedTransport):
    """Messages of the barrier tasks, provided by the job (`messages.offer`)."""

    backend = BACKEND

    def open(self, context: RankContext, trial: Trial, store: Store) -> None:
        self._size = context.world_size
        self.open_group(context, trial, store)

    def describe(self) -> dict[str, Any]:
        return {"through": "the driver, as text", "chunk_bytes": chunk_bytes(self._size)}


def _create_group(options: Any, _backend_options: Any) -> SparkProcessGroup:
    if dist.is_initialized():
        raise UsageError(f"{BACKEND}: supports only the group of all ranks, not smaller groups")
    rank, size = options.group_rank, options.group_size
    return SparkProcessGroup(
        Messages(offered(), rank, size),
        rank,
        size,
        limit_s=options.timeout.total_seconds(),
        name=options.group_id,
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _elements(data: bytes, dtype: torch.dtype) -> Tensor:
    """Copy elements from `data`."""
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)


dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu"])
