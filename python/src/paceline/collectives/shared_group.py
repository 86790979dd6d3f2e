"""Back end `paceline` of torch.distributed: shared memory within a host, Gloo for the rest.

All-reduce, and on one host also reduce, reduce-scatter, gather, all-gather, scatter, broadcast and
barrier of CPU tensors, go through memory that the ranks of a host share. All other operations,
tensors of a GPU, sparse tensors and types that numpy cannot reduce go to Gloo, as does a group
without two ranks on a host.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakSet

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from paceline.collectives import BACKEND
from paceline.collectives.agreement import (
    check_counts,
    check_elements,
    check_parts,
    check_sizes,
    check_whole,
    described,
    elements_sent,
    mode_of,
    name_of,
    root_of,
    tensors_in,
)
from paceline.collectives.buffers import (
    Reduction,
    array_of,
    byte_view,
    copy_back,
    flattened,
    is_dense,
    is_on_host,
    reduce_tensors,
    reduction_name,
    reduction_of,
    wire_buffer,
)
from paceline.collectives.errors import (
    CallsDiffer,
    EnvironmentLacks,
    PacelineError,
    PeerLost,
    Refused,
    UsageError,
)
from paceline.collectives.gloo_group import (
    OPERATIONS,
    REDUCE_SCATTERS,
    RecordedProcessGroup,
    check_asked,
    create_gloo,
    register_gloo,
    release_gloo,
)
from paceline.collectives.in_place import SharedTensors
from paceline.collectives.recorder import (
    GroupDescription,
    begin_operation,
    begin_profile_event,
    is_recording,
    payload_bytes,
)
from paceline.collectives.shared_memory import LIBRARY, Levels, NothingToShare
from paceline.collectives.store import fresh_name
from paceline.collectives.torch_internals import PrefixStore, Work, limit_of, untraced
from paceline.collectives.work import ProgressThread

_log = logging.getLogger(__name__)
_CLOSE_LIMIT_S = 10.0
_ABORT_LIMIT_S = 0.5
_NO_TIME = timedelta(0)


@untraced
class SharedMemoryGroup(RecordedProcessGroup):
    """A process group whose ranks, or some of them, share the memory of a host."""

    def __init__(
        self, inner: Any, name: str, levels: Levels, world_rank: int, limit_s: float
    ) -> None:
        """inner: a group of Gloo with the same ranks. name: the same on all ranks. limit_s: of each
        operation."""
        super().__init__(inner, name)
        self._ranks: int = inner.size()
        self._own_rank: int = inner.rank()
        self._levels = levels
        self._shared: SharedTensors | None = None  # those that are reduced in place
        if levels.hosts == 1:
            self._shared = SharedTensors(levels.host.segments, self._own_rank, self._ranks)
        self._progress = ProgressThread(LIBRARY, world_rank, limit_s, name)
        self._limit_s = limit_s
        self.gloo_options: Any = None  # of the group of Gloo: torch sets a new limit there
        self._gloo_used_s = -math.inf  # when Gloo's last collective ended
        self._using = threading.Lock()
        self._closed = ""  # why this group cannot be used any more
        self._loss = ""  # of a rank, in this or another group of this process
        _groups.add(self)
        atexit.register(self.abort)

    @property
    def failure(self) -> PacelineError | None:
        """The first error of operations in shared memory; every later one fails with it."""
        return self._progress.failure

    def note_loss(self, loss: str) -> None:
        """Remember the first loss of a rank, which this rank tells its peers when it leaves."""
        self._loss = self._loss or loss

    def describe(self) -> GroupDescription:
        """Return how this group reduces, for the records."""
        return self._levels.describe()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Reduce each tensor over all ranks in place; all ranks get bit-identical results."""
        reductions = self._reductions_of(tensors, opts)
        if reductions is None:
            return self._by_gloo("allreduce", opts, tensors)
        name = name_of(reductions)
        shared = self._shared
        if shared is not None and shared.has(tensors, reductions):
            in_place = partial(
                shared.reduce, tensors[0], reductions[0], self._levels.host.synchronise
            )
            said = described("allreduce", tensors, name, "in place")
            return self._submit("allreduce", said, in_place, tensors, tensors, opts)
        reduce = self._levels.allreduce
        call = partial(reduce_tensors, tensors, reductions, reduce, self._ranks)
        said = described("allreduce", tensors, name)
        return self._submit("allreduce", said, call, tensors, tensors, opts)

    allreduce_coalesced = allreduce

    def share_tensor(self, tensor: Tensor, instead_of: Tensor | None = None) -> None:
        """Share a tensor of the same size on all ranks, to be reduced in place; collective.

        instead_of: one that was shared before, and is no longer. Nothing changes where the ranks
        cannot share it. Raises the errors of a collective.
        """
        shared = self._shared
        if shared is None:
            return

        def call() -> None:
            if instead_of is not None:
                shared.forget(instead_of)
            shared.share(tensor)

        said = described("allreduce", [tensor], "share")
        self._submit("allgather", said, call, [], [], None).wait()

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """Reduce onto `opts.rootRank`; the tensors of the other ranks are unchanged."""
        reductions = self._reductions_of(tensors, opts)
        if reductions is None or not self._shares_all(tensors):
            return self._by_gloo("reduce", opts, tensors)

        root = root_of(opts, self._ranks)

        def call() -> None:
            for tensor, reduction in zip(tensors, reductions, strict=True):
                flat = reduction.begin(tensor)
                self._levels.host.segments.reduce_scatter({root: array_of(flat)}, reduction.ufunc)
                if root == self._own_rank:
                    reduction.end(flat, self._ranks)
                    copy_back(flat, tensor)

        said = described("reduce", tensors, name_of(reductions), "to", root)
        return self._submit("reduce", said, call, tensors, tensors, opts)

    def gather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any
    ) -> Work:
        """Copy every rank's tensor to `opts.rootRank`, all of one size."""
        if not self._shares_all([*input_tensors, *chain(*output_tensors)]):
            return self._by_gloo("gather", opts, output_tensors, input_tensors)
        (own,), root = input_tensors, root_of(opts, self._ranks)
        outputs = output_tensors[0] if root == self._own_rank else []
        if root == self._own_rank:
            check_sizes("gather", own, outputs)

        def call() -> None:
            buffers = self._parts_at_root(own, outputs)
            if root == self._own_rank:
                buffers[root].copy_(wire_buffer(own))
            self._levels.host.segments.gather(_without(root, buffers), root)
            for buffer, output in zip(buffers, outputs, strict=False):  # none but on the root
                copy_back(buffer, output)

        said = described("gather", input_tensors, "to", root)
        return self._submit("gather", said, call, output_tensors, input_tensors, opts)

    def scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> Work:
        """Copy one of the tensors of `opts.rootRank`, all of one size, to each rank."""
        if not self._shares_all([*output_tensors, *chain(*input_tensors)]):
            return self._by_gloo("scatter", opts, output_tensors, input_tensors)
        (own,), root = output_tensors, root_of(opts, self._ranks)
        inputs = input_tensors[0] if root == self._own_rank else []
        if root == self._own_rank:
            check_sizes("scatter", own, inputs)

        def call() -> None:
            buffers = self._parts_at_root(own, inputs)
            self._levels.host.segments.scatter(_without(root, buffers), root)
            copy_back(buffers[self._own_rank], own)

        said = described("scatter", output_tensors, "from", root)
        return self._submit("scatter", said, call, output_tensors, [own, *inputs], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Copy the tensors of `opts.rootRank` to every rank."""
        if not self._shares_all(tensors):
            return self._by_gloo("broadcast", opts, tensors)
        root = 0 if opts is None else root_of(opts, self._ranks)

        def call() -> None:
            for tensor in tensors:
                flat = wire_buffer(tensor)
                self._levels.host.segments.all_gather({root: byte_view(flat)})
                if root != self._own_rank:
                    copy_back(flat, tensor)

        said = described("broadcast", tensors, "from", root)
        return self._submit("broadcast", said, call, tensors, tensors, opts)

    def allgather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> Work:
        """Copy every rank's tensor to every rank, for each input; sizes may differ between
        ranks."""
        if not self._shares_all([*input_tensors, *chain(*output_tensors)]):
            return self._by_gloo("allgather", opts, output_tensors, input_tensors)
        for outputs, own in zip(output_tensors, input_tensors, strict=True):
            check_parts("all_gather", outputs, own, self._own_rank, self._ranks)

        def call() -> None:
            for outputs, own in zip(output_tensors, input_tensors, strict=True):
                self._gather_parts(outputs, own)

        said = described("allgather", [*chain(*output_tensors)])
        return self._submit("allgather", said, call, output_tensors, input_tensors, opts)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Work:
        """Copy every rank's tensor consecutively into `output`."""
        return self.all_gather_single_coalesced([output], [own], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Call all_gather_single for each pair."""
        if not self._shares_all([*outputs, *inputs]):
            return self._by_gloo("allgather_into_tensor_coalesced", opts, outputs, inputs)
        for output, own in zip(outputs, inputs, strict=True):
            check_whole("all_gather", output, own, self._ranks)

        def call() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                flat = flattened(output.detach())
                self._gather_parts(flat.view(self._ranks, own.numel()).unbind(), own)
                copy_back(flat, output)

        said = described("allgather", inputs, "into one of")
        return self._submit("allgather", said, call, outputs, inputs, opts)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> Work:
        """Reduce all ranks' lists, and store this rank's part. The inputs are unchanged."""
        reductions = self._reductions_of(output_tensors, opts)
        if reductions is None or not self._shares_all([*chain(*input_tensors)]):
            return self._by_gloo("reduce_scatter", opts, output_tensors, input_tensors)
        for output, inputs in zip(output_tensors, input_tensors, strict=True):
            check_parts("reduce_scatter", inputs, output, self._own_rank, self._ranks)

        def call() -> None:
            for output, inputs, reduction in zip(
                output_tensors, input_tensors, reductions, strict=True
            ):
                self._scatter_sum(output, [reduction.begin(part) for part in inputs], reduction)

        said = described("reduce_scatter", [*chain(*input_tensors)], name_of(reductions))
        return self._submit("reduce_scatter", said, call, output_tensors, input_tensors, opts)

    def reduce_scatter_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Work:
        """Do the same as reduce_scatter with tensors that hold the parts of all ranks
        consecutively."""
        return self.reduce_scatter_single_coalesced([output], [own], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Call reduce_scatter_single for each pair."""
        reductions = self._reductions_of(inputs, opts)
        if reductions is None or not self._shares_all([*outputs, *inputs]):
            return self._by_gloo("reduce_scatter_tensor_coalesced", opts, outputs, inputs)
        for output, own in zip(outputs, inputs, strict=True):
            check_whole("reduce_scatter", own, output, self._ranks)

        def call() -> None:
            for output, own, reduction in zip(outputs, inputs, reductions, strict=True):
                parts = reduction.begin(own).view(self._ranks, output.numel()).unbind()
                self._scatter_sum(output, parts, reduction)

        said = described("reduce_scatter", inputs, name_of(reductions), "of one of")
        return self._submit("reduce_scatter", said, call, outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> Work:
        """Wait until every rank has called this."""
        if self._levels.hosts > 1:
            return self._by_gloo("barrier", opts)

        return self._submit("barrier", "barrier", lambda: None, [], [], opts)  # which agrees

    # Names of these operations before torch 2.13, which some callers still use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def shutdown(self) -> None:
        """End the threads after their operations; no rank is waited for beyond those."""
        if self._close(_CLOSE_LIMIT_S):
            self._inner.shutdown()
            if self.failure is None:
                release_gloo(self._inner, self._gloo_used_s)
            self._inner = _Closed(self._name, self._closed)

    def abort(self) -> None:
        """End the threads without waiting for peers."""
        self._close(_ABORT_LIMIT_S)

    # -- inside --------------------------------------------------------------------------------

    def _shares_all(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these tensors can be moved in shared memory to all ranks."""
        return self._levels.hosts == 1 and _on_host(tensors)

    def _reductions_of(self, tensors: Sequence[Tensor], opts: Any) -> list[Reduction] | None:
        """Return the arithmetic of each tensor; None if Gloo must reduce them."""
        if not _on_host(tensors):
            return None
        reduce_op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        try:
            reductions = [reduction_of(reduce_op, tensor.dtype) for tensor in tensors]
        except ValueError:  # numpy lacks the type
            return None
        reduces = self._levels.reduces
        pairs = zip(reductions, tensors, strict=True)
        return reductions if all(reduces(r.dtype(t.dtype), r.ufunc) for r, t in pairs) else None

    def _by_gloo(self, method: str, opts: Any, *arguments: Any, **named: Any) -> Work:
        """Let Gloo carry out a collective, once all ranks of this host have called it."""
        name, payload = OPERATIONS.get(method, ("reduce_scatter", 1))
        given = () if opts is None else (opts,)
        inputs = [] if payload is None else tensors_in(arguments[payload])

        def call() -> None:
            if name == "alltoall":
                self._agree_on_parts(*elements_sent(method, arguments, self._ranks))
            self._levels.agree(name)
            try:
                work = getattr(self._inner, method)(*arguments, *given, **named)
            except Exception as error:
                raise Refused from error
            try:
                work.wait()
            finally:
                self._gloo_used_s = time.monotonic()

        details = [
            f"{word} {value}"
            for word, value in (
                ("by", reduction_name(getattr(opts, "reduceOp", ""))),
                ("root", getattr(opts, "rootRank", "")),
            )
            if value != ""
        ]
        alike = [] if name == "alltoall" else inputs
        where = {f"{each.device.type} {each.layout} {each.dtype}" for each in inputs}
        said = described(name, alike, *details, "(Gloo,", *sorted(where), ")")
        results = [] if payload is None else [*arguments[:1]]
        results = results[0] if results and isinstance(results[0], list) else results
        return self._submit(name, said, call, results, inputs, opts)

    def _agree_on_parts(self, sent: list[int], expected: list[int]) -> None:
        """Raise CallsDiffer on all ranks if one sends another count than its receiver expects."""
        if self._levels.hosts > 1 or (len(sent), len(expected)) != (self._ranks, self._ranks):
            return
        counts = np.zeros((self._ranks, 2, self._ranks), np.int64)
        counts[self._own_rank] = sent, expected
        self._levels.host.segments.all_gather(dict(enumerate(counts.reshape(self._ranks, -1))))
        check_counts("alltoall", counts)

    def _parts_at_root(self, own: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the root's tensors for all ranks, flat. On other ranks, which have none, the own
        one stands for each."""
        if not tensors:
            return [wire_buffer(own)] * self._ranks
        return [wire_buffer(each) for each in tensors]

    def _gather_parts(self, outputs: Sequence[Tensor], own: Tensor) -> None:
        buffers = [wire_buffer(output) for output in outputs]
        buffers[self._own_rank].copy_(wire_buffer(own))
        self._levels.host.segments.all_gather(dict(enumerate(map(byte_view, buffers))))
        for buffer, output in zip(buffers, outputs, strict=True):
            copy_back(buffer, output)

    def _scatter_sum(self, output: Tensor, parts: Sequence[Tensor], reduction: Reduction) -> None:
        own = parts[self._own_rank].clone()  # the inputs stay unchanged
        arrays = {rank: array_of(part) for rank, part in enumerate(parts)}
        arrays[self._own_rank] = array_of(own)
        self._levels.host.segments.reduce_scatter(arrays, reduction.ufunc)
        reduction.end(own, self._ranks)
        copy_back(own, output)

    def _submit(
        self,
        name: str,
        said: str,
        call: Callable[[], object],
        results: list[Any],
        inputs: Sequence[Any],
        opts: Any,
    ) -> Work:
        """Carry out `call` in this thread if it waits for the result, else in the progress
        thread.

        said: the call in words that are the same on all ranks.
        """
        if self._closed:
            raise UsageError(f"process group {self._name} {self._closed}")
        written = tensors_in(results)
        check_elements(written)
        mode = mode_of(written)
        limit_s = self._limit_of(opts)
        operation = None
        if is_recording():
            carried = payload_bytes(inputs)
            operation = begin_operation(self._name, self._ranks, name, carried)
            operation.algorithm = self._levels.algorithm
        end_profile_event = begin_profile_event(BACKEND, name)

        def carry_out() -> None:
            try:
                with self._using, mode():
                    self._levels.begin(said, limit_s)
                    call()
                    self._levels.agree(name)
            except (CallsDiffer, Refused):  # on all ranks alike
                raise
            except PeerLost as error:
                # The others of this group find out themselves; those of other groups cannot.
                for group in list(_groups):
                    group.note_loss(error.loss)
                raise
            except BaseException:  # of a signal's handler, too: the call is half done
                self._levels.fail()
                raise
            finally:
                end_profile_event()

        is_awaited = opts is not None and not getattr(opts, "asyncOp", True)
        start = self._progress.carry_out if is_awaited else self._progress.submit
        return start(name, carry_out, results, operation, limit_s)

    def _limit_of(self, opts: Any) -> float:
        """Return the limit of a call: its own, if it has one, or that of the group."""
        own = getattr(opts, "timeout", None)
        if own is not None and own > _NO_TIME:  # it is negative unless it was given
            return float(own.total_seconds())
        if self.gloo_options is None:
            return self._limit_s
        return limit_of(self.gloo_options)

    def _close(self, limit_s: float) -> bool:
        """Return whether this call has closed the group."""
        if self._closed:
            return False
        self._closed = "has been destroyed"
        self._progress.close(limit_s)
        self._shared = None
        atexit.unregister(self.abort)
        self._levels.close(self._loss)
        return True

    def leave_to_parent(self) -> None:
        """Make this copy of a parent process's group unusable: its memory is the parent's."""
        atexit.unregister(self.abort)
        self._closed = "belongs to the process from which this one was forked"
        self._inner = _Closed(self._name, self._closed)


class _Closed:
    """Stands for the group of Gloo of a group that cannot be used any more."""

    def __init__(self, name: str, why: str) -> None:
        self._message = f"process group {name} {why}"

    def __getattr__(self, method: str) -> Any:
        raise UsageError(f"{self._message} ({method})")


def _agreed(method: str) -> Callable[..., Work]:
    """Return the method of a collective that is always Gloo's."""

    def call(self: SharedMemoryGroup, *arguments: Any, **named: Any) -> Work:
        given = [*arguments]
        opts = named.pop("opts", None)
        if opts is None and given and hasattr(given[-1], "asyncOp"):
            opts = given.pop()
        return self._by_gloo(method, opts, *given, **named)

    return call


for _method in (*OPERATIONS, *REDUCE_SCATTERS):
    if _method not in vars(SharedMemoryGroup):
        setattr(SharedMemoryGroup, _method, _agreed(_method))

_groups: WeakSet[SharedMemoryGroup] = WeakSet()  # of this process


def _leave_groups_to_parent() -> None:
    for group in list(_groups):
        group.leave_to_parent()


os.register_at_fork(after_in_child=_leave_groups_to_parent)


@untraced
class _UnsharedGroup(RecordedProcessGroup):
    """A process group all of whose operations are Gloo's."""

    def __init__(self, inner: Any, name: str, reason: str) -> None:
        super().__init__(inner, name)
        self._reason = reason

    def describe(self) -> GroupDescription:
        """Return why the ranks share no memory, for the records."""
        return {"not_shared": self._reason}


def _without(root: int, buffers: Sequence[Tensor]) -> dict[int, NDArray[np.uint8]]:
    """Return the parts of a message by rank, but that of the root, which it copies itself."""
    return {rank: byte_view(each) for rank, each in enumerate(buffers) if rank != root}


def _on_host(tensors: Sequence[Tensor]) -> bool:
    return all(is_on_host(tensor) and is_dense(tensor) for tensor in tensors)


def create_group(given: Any, _options: Any) -> RecordedProcessGroup:
    """Create a group; torch calls this for each group with this rank."""
    check_asked(BACKEND)
    limit_s = given.timeout.total_seconds()
    rank = given.group_rank
    own_name = fresh_name(PrefixStore(BACKEND, given.store), rank, given.group_size, limit_s)
    store = PrefixStore(own_name, given.store)
    backend, inner = create_gloo(given, store)
    world_ranks = list(given.global_ranks_in_group) or list(range(given.group_size))
    group: RecordedProcessGroup
    try:
        levels = Levels(rank, world_ranks, PrefixStore(BACKEND, store), limit_s)
    except EnvironmentLacks as error:
        if rank == 0 and not isinstance(error, NothingToShare):
            _log.warning('back end "paceline" uses Gloo for group %s: %s', given.group_id, error)
        group = _UnsharedGroup(inner, given.group_id, str(error))
    else:
        name = given.group_id
        group = SharedMemoryGroup(inner, name, levels, world_ranks[rank], limit_s)
        group.gloo_options = backend.options
    register_gloo(group, backend)
    return group
