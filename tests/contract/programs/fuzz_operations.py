"""A case carried out by one backend, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tests.contract.programs.fuzz_cases import Case, values
from torch import Tensor


@dataclass
class Attempt:
    """One rank's part of a case under way. plain: all tensors are contiguous, as Gloo wants."""

    case: Case
    rank: int  # in the group
    group: Any
    plain: bool
    works: list[Any] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    _kept: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        """Carry the case out, or start to."""
        _OPERATIONS[self.case.operation](self)

    def end(self) -> None:
        """Wait for it."""
        for work in self.works:
            work.wait()

    def harmed(self) -> str | None:
        """What else than results was written to."""
        for what, tensor, before in self._kept:
            if not torch.equal(tensor, before):
                return f"{what} changed"
        return None

    def given(self, part: int = 0, shape: tuple[int, ...] | None = None) -> Tensor:
        """This rank's values, only to be read."""
        own = values(self.case, self.rank, part, shape)
        tensor = self._laid_out(own, self.case.input_layout)
        self._kept.append(("an input", tensor, own))
        return tensor

    def changed(self, part: int = 0) -> Tensor:
        """This rank's values, where the result is to be."""
        return self.keep(self._laid_out(values(self.case, self.rank, part), self._output_layout))

    def empty(self, shape: tuple[int, ...] | None = None) -> Tensor:
        """Room for a result."""
        shape = self.case.shape if shape is None else shape
        return self.keep(
            self._laid_out(torch.ones(shape, dtype=self.case.torch_dtype), self._output_layout)
        )

    def keep(self, result: Tensor) -> Tensor:
        self.results.append(result)
        return result

    def wait_for(self, work: Any) -> None:
        if work is not None:
            self.works.append(work)

    @property
    def _output_layout(self) -> str:
        return self.case.output_layout

    def _laid_out(self, tensor: Tensor, layout: str) -> Tensor:
        """A copy in memory as `layout` says; what lies around it must stay as it is."""
        if self.plain or layout == "contiguous" or tensor.dim() == 0:
            return tensor.clone()
        if layout == "transposed":
            order = tuple(reversed(range(tensor.dim())))
            return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(order)
        if layout == "expanded":
            return (
                tensor[:1].clone().expand(tensor.shape) if tensor.shape[0] > 1 else tensor.clone()
            )
        if layout == "strided":
            base = torch.ones(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
            view, around = base[..., ::2], base[..., 1::2]
        else:
            base = torch.ones(tensor.numel() + 3, dtype=tensor.dtype)
            view, around = base[1:-2].view(tensor.shape), base[-2:]
        view.copy_(tensor)
        self._kept.append(("memory beside a tensor", around, around.clone()))
        return view


def _reduction(case: Case) -> Any:
    return getattr(dist.ReduceOp, case.reduction)


def _options(attempt: Attempt) -> dict[str, Any]:
    return {"group": attempt.group, "async_op": attempt.case.asynchronous}


def _all_reduce(a: Attempt) -> None:
    a.wait_for(dist.all_reduce(a.changed(), _reduction(a.case), **_options(a)))


def _all_reduce_coalesced(a: Attempt) -> None:
    tensors = [a.changed(part) for part in range(a.case.tensors)]
    a.wait_for(dist.all_reduce_coalesced(tensors, _reduction(a.case), **_options(a)))


def _reduce(a: Attempt) -> None:
    own = a.changed()
    a.wait_for(dist.reduce(own, op=_reduction(a.case), group_dst=a.case.root, **_options(a)))
    if a.rank != a.case.root:
        a.results.clear()  # what is left there is nobody's business


def _reduce_scatter(a: Attempt) -> None:
    inputs = [a.given(part) for part in range(a.case.size)]
    a.wait_for(dist.reduce_scatter(a.empty(), inputs, _reduction(a.case), **_options(a)))


def _reduce_scatter_tensor(a: Attempt) -> None:
    own = a.given(shape=a.case.joint_shape)
    a.wait_for(dist.reduce_scatter_tensor(a.empty(), own, _reduction(a.case), **_options(a)))


def _broadcast(a: Attempt) -> None:
    a.wait_for(dist.broadcast(a.changed(), group_src=a.case.root, **_options(a)))


def _all_gather(a: Attempt) -> None:
    outputs = [a.empty() for _ in range(a.case.size)]
    a.wait_for(dist.all_gather(outputs, a.given(), **_options(a)))


def _all_gather_uneven(a: Attempt) -> None:
    outputs = [a.empty(a.case.uneven_shape(rank)) for rank in range(a.case.size)]
    a.wait_for(dist.all_gather(outputs, a.given(shape=a.case.uneven_shape(a.rank)), **_options(a)))


def _all_gather_into_tensor(a: Attempt) -> None:
    a.wait_for(dist.all_gather_into_tensor(a.empty(a.case.joint_shape), a.given(), **_options(a)))


def _gather(a: Attempt) -> None:
    outputs = [a.empty() for _ in range(a.case.size)] if a.rank == a.case.root else None
    a.wait_for(dist.gather(a.given(), outputs, group_dst=a.case.root, **_options(a)))


def _scatter(a: Attempt) -> None:
    at_root = a.rank == a.case.root
    inputs = [a.given(part) for part in range(a.case.size)] if at_root else None
    a.wait_for(dist.scatter(a.empty(), inputs, group_src=a.case.root, **_options(a)))


def _all_to_all(a: Attempt) -> None:
    rows, rest = a.case.rows, a.case.shape[1:]
    inputs = [a.given(to, (rows[a.rank][to], *rest)) for to in range(a.case.size)]
    outputs = [a.empty((rows[source][a.rank], *rest)) for source in range(a.case.size)]
    a.wait_for(dist.all_to_all(outputs, inputs, **_options(a)))


def _all_to_all_single(a: Attempt) -> None:
    rows, rest = a.case.rows, a.case.shape[1:]
    sent, received = list(rows[a.rank]), [row[a.rank] for row in rows]
    own = a.given(shape=(sum(sent), *rest))
    output = a.empty((sum(received), *rest))
    a.wait_for(dist.all_to_all_single(output, own, received, sent, **_options(a)))


def _neighbours(a: Attempt) -> tuple[int, int]:
    return (a.rank + 1) % a.case.size, (a.rank - 1) % a.case.size


def _ring(a: Attempt) -> None:
    after, before = _neighbours(a)
    a.wait_for(dist.isend(a.given(), group=a.group, group_dst=after, tag=a.case.tag))
    a.wait_for(dist.irecv(a.empty(), group=a.group, group_src=before, tag=a.case.tag))


def _blocking_ring(a: Attempt) -> None:
    """Rank 0 receives before it sends, the others the other way round."""
    after, before = _neighbours(a)
    own, output = a.given(), a.empty()

    def send() -> None:
        dist.send(own, group=a.group, group_dst=after, tag=a.case.tag)

    if a.rank != 0:
        send()
    dist.recv(output, group=a.group, group_src=before, tag=a.case.tag)
    if a.rank == 0:
        send()


def _batched_ring(a: Attempt) -> None:
    after, before = _neighbours(a)
    sends = dist.P2POp(dist.isend, a.given(), group=a.group, group_peer=after, tag=a.case.tag)
    receives = dist.P2POp(dist.irecv, a.empty(), group=a.group, group_peer=before, tag=a.case.tag)
    for work in dist.batch_isend_irecv([sends, receives]):
        a.wait_for(work)


def _barrier(a: Attempt) -> None:
    a.wait_for(dist.barrier(**_options(a)))


_OPERATIONS: dict[str, Callable[[Attempt], None]] = {
    each.__name__.removeprefix("_"): each
    for each in (
        _all_reduce, _all_reduce_coalesced, _reduce, _reduce_scatter, _reduce_scatter_tensor,
        _broadcast, _all_gather, _all_gather_uneven, _all_gather_into_tensor, _gather, _scatter,
        _all_to_all, _all_to_all_single, _ring, _blocking_ring, _batched_ring, _barrier,
    )
}  # fmt: skip
