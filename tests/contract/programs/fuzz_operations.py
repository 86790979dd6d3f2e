"""A case carried out by one backend, and what it has to give on each rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.contract.programs.fuzz_cases import values
from tests.contract.programs.fuzz_reference import Want, exactly, part_of, reduced
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.programs.fuzz_cases import Case


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


def _joint_shape(case: Case) -> tuple[int, ...]:
    return (case.size * case.shape[0], *case.shape[1:])


def _reduce_scatter_tensor(a: Attempt) -> None:
    own = a.given(shape=_joint_shape(a.case))
    a.wait_for(dist.reduce_scatter_tensor(a.empty(), own, _reduction(a.case), **_options(a)))


def _broadcast(a: Attempt) -> None:
    a.wait_for(dist.broadcast(a.changed(), group_src=a.case.root, **_options(a)))


def _all_gather(a: Attempt) -> None:
    outputs = [a.empty() for _ in range(a.case.size)]
    a.wait_for(dist.all_gather(outputs, a.given(), **_options(a)))


def _uneven(case: Case, rank: int) -> tuple[int, ...]:
    return (case.rows[0][rank], *case.shape[1:])


def _all_gather_uneven(a: Attempt) -> None:
    outputs = [a.empty(_uneven(a.case, rank)) for rank in range(a.case.size)]
    a.wait_for(dist.all_gather(outputs, a.given(shape=_uneven(a.case, a.rank)), **_options(a)))


def _all_gather_into_tensor(a: Attempt) -> None:
    a.wait_for(dist.all_gather_into_tensor(a.empty(_joint_shape(a.case)), a.given(), **_options(a)))


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
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_uneven": _all_gather_uneven,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "ring": _ring,
    "blocking_ring": _blocking_ring,
    "batched_ring": _batched_ring,
    "barrier": _barrier,
}


def wanted(case: Case, rank: int) -> list[Want]:
    """What `Attempt.results` of that rank of the group must hold."""
    return _WANTED[case.operation](case, rank)


def _reduced(case: Case, part: int = 0) -> Want:
    return reduced(case, [values(case, rank, part) for rank in range(case.size)])


def _of_all(case: Case) -> list[Want]:
    return [exactly(values(case, rank)) for rank in range(case.size)]


def _scattered_rows(case: Case, rank: int) -> list[Want]:
    joint = [values(case, r, shape=_joint_shape(case)) for r in range(case.size)]
    return [part_of(reduced(case, joint), slice(rank * case.shape[0], (rank + 1) * case.shape[0]))]


def _from_every_list(case: Case, rank: int) -> list[Want]:
    shapes = [(case.rows[source][rank], *case.shape[1:]) for source in range(case.size)]
    return [exactly(values(case, source, rank, shape)) for source, shape in enumerate(shapes)]


def _rows_for(case: Case, source: int, rank: int) -> Tensor:
    sent = case.rows[source]
    whole = values(case, source, shape=(sum(sent), *case.shape[1:]))
    start = sum(sent[:rank])
    return whole[start : start + sent[rank]]


def _from_the_rank_before(case: Case, rank: int) -> list[Want]:
    return [exactly(values(case, (rank - 1) % case.size))]


_WANTED: dict[str, Callable[[Case, int], list[Want]]] = {
    "all_reduce": lambda case, _: [_reduced(case)],
    "all_reduce_coalesced": lambda case, _: [_reduced(case, part) for part in range(case.tensors)],
    "reduce": lambda case, rank: [_reduced(case)] if rank == case.root else [],
    "reduce_scatter": lambda case, rank: [_reduced(case, rank)],
    "reduce_scatter_tensor": _scattered_rows,
    "broadcast": lambda case, _: [exactly(values(case, case.root))],
    "all_gather": lambda case, _: _of_all(case),
    "all_gather_uneven": lambda case, _: [
        exactly(values(case, rank, shape=_uneven(case, rank))) for rank in range(case.size)
    ],
    "all_gather_into_tensor": lambda case, _: [
        exactly(torch.cat([values(case, rank) for rank in range(case.size)]))
    ],
    "gather": lambda case, rank: _of_all(case) if rank == case.root else [],
    "scatter": lambda case, rank: [exactly(values(case, case.root, rank))],
    "all_to_all": _from_every_list,
    "all_to_all_single": lambda case, rank: [
        exactly(torch.cat([_rows_for(case, source, rank) for source in range(case.size)]))
    ],
    "ring": _from_the_rank_before,
    "blocking_ring": _from_the_rank_before,
    "batched_ring": _from_the_rank_before,
    "barrier": lambda _case, _rank: [],
}
