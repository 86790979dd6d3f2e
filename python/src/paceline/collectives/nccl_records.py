"""Records of the operations of NCCL, torch's communication between GPUs. Never run on a GPU.

A program must run with these records as it runs without them. So its groups, back ends and works
stay those of torch, which compares their types, splits groups and finds them by name. Python calls
their methods, which note what happens; DistributedDataParallel calls a group in C++, so it gets one
whose methods are in Python. An error in this module ends the records, not the program.

A call of NCCL returns when the operation is in a queue of the GPU, and a wait for it only makes a
stream of the GPU wait. So begin and end are events with times in these streams. An operation begins
when the caller's stream reaches it. It ends

- without `async_op`: in the caller's stream, which carries it out (ProcessGroupNCCL::collective);
- if its future is taken, as by DistributedDataParallel: in a stream that waits for nothing but
  these futures (torch.futures.Future.wait, which makes the current stream wait);
- otherwise when the caller's stream has passed a wait for it. It may have ended before.

Nothing waits for the events. They are read between two steps. A thread that asks
`Work.is_completed` would keep the tensors of each operation, which torch releases at the wait
(WorkNCCL::synchronizeStream), and break captures of graphs. torch's own timing of NCCL makes it
more likely that the watchdog hangs (TORCH_NCCL_ENABLE_TIMING), and does not tell when an operation
began.

Not recorded: operations in the capture of a graph; messages whose future is taken; operations that
are submitted together (`batch_isend_irecv`), because their future tells nothing about their end;
what C++ submits, which are torch's functional collectives (DTensor, compiled programs) and the
broadcast of buffers by DistributedDataParallel; barriers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives.device_clock import DeviceClock, Moment, is_capturing
from paceline.collectives.gloo_group import MESSAGES, OPERATIONS, REDUCE_SCATTERS, numbered_in
from paceline.collectives.recorder import (
    Operation,
    begin_on_device,
    forget_on_device,
    is_recording,
    payload_bytes,
)
from paceline.collectives.torch_internals import (
    Work,
    is_coalescing,
    is_nccl,
    set_default_backend,
    surround_method,
    untraced,
)

_CUDA = torch.device("cuda")
# With "0", DDP lets the back end allocate its buckets (Reducer::initialize_buckets).
_ALLOCATES = "DDP_DISABLE_COMM_MEM"
# Method of a group -> (name in the records, index of the argument with this rank's payload, sender
# and receiver of a message between two ranks).
_METHODS: dict[str, tuple[str, int, str | None]] = {
    **{
        method: (name, payload, None)
        for method, (name, payload) in OPERATIONS.items()
        if payload is not None
    },
    **dict.fromkeys(REDUCE_SCATTERS, ("reduce_scatter", 1, None)),
    **{method: (name, 0, peers) for method, (name, peers) in MESSAGES.items()},
}

_calls: WeakKeyDictionary[Work, _Call] = WeakKeyDictionary()  # that have not ended
_groups: WeakKeyDictionary[Any, list[_ReducerGroup]] = WeakKeyDictionary()  # of reducers
_is_begun = _is_ended = False


def _harmless(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let an error of a function end these records. All such functions then return None."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        global _is_ended  # noqa: PLW0603  (in this process)
        if _is_ended:
            return None
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001  (the program goes on)
            _is_ended = True
            with suppress(Exception):
                print(f"paceline: operations of NCCL are not recorded: {error}", file=sys.stderr)
            return None

    return call


@_harmless
def record_nccl(group: Any) -> None:
    """Record the operations of NCCL in this process from now on, if a group of torch uses it."""
    global _is_begun  # noqa: PLW0603  (methods of torch's classes are replaced once)
    if _is_begun or not isinstance(group, dist.ProcessGroup) or not is_nccl(group, _CUDA):
        return
    _is_begun = True
    for method, described in _METHODS.items():
        _surround(dist.ProcessGroup, method, partial(_begun, *described), _submitted)
    # The GPU then ends operations that have failed.
    _surround(dist.ProcessGroup, "abort", lambda *_: forget_on_device(), lambda *_: None)
    for method in ("wait", "synchronize", "block_current_stream"):
        _surround(Work, method, _taken, lambda call, _result: call and call.end())
    _surround(Work, "get_future", _taken, lambda call, future: call and call.end_with(future))
    _record_reducers()


def _surround(
    owner: type, method: str, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    if hasattr(owner, method):  # older versions lack some
        surround_method(owner, method, _harmless(before), _harmless(after))


class _Call:
    """An operation, which begins at this point of the current stream."""

    def __init__(self, operation: Operation, device: torch.device, *, is_message: bool) -> None:
        self._operation = operation
        self._device = device
        self._is_message = is_message
        self._clock = clock_of(device)
        self._begun = self._clock.mark()

    def end(self) -> None:
        """Mark the end in the current stream."""
        ended = None if is_capturing(self._device) else self._clock.mark()
        if self._begun is not None and ended is not None:
            self._operation.end_on_device(_harmless(partial(self._times, self._begun, ended)))

    def end_with(self, future: torch.futures.Future[Any]) -> None:
        """Mark the end where the GPU has passed a wait for the future of a collective.

        Streams may share a queue of the GPU. There a wait for a message could be before the message
        that the other rank waits for.
        """
        if self._is_message or is_capturing(self._device):
            return
        if future.done():  # always with NCCL
            with self._clock.aside():
                future.wait()
                self.end()

    def _times(self, begun: Moment, ended: Moment) -> tuple[float, float] | None:
        if is_capturing(self._device):
            return None
        ended_unix_s = self._clock.reached_unix_s(ended)
        begun_unix_s = self._clock.reached_unix_s(begun)
        if begun_unix_s is None or ended_unix_s is None:
            return None
        return begun_unix_s, ended_unix_s


def _begun(
    name: str, payload: int, peers: str | None, group: Any, arguments: tuple[Any, ...]
) -> _Call | None:
    if not is_recording() or len(arguments) <= payload:
        return None
    tensors = arguments[payload]
    device = gpu_of(group, tensors)
    if device is None or is_capturing(device) or is_coalescing(group):
        return None
    number, ranks = numbered_in(group.group_name, group, peers, arguments)
    operation = begin_on_device(number, ranks, name, payload_bytes(tensors))
    return _Call(operation, device, is_message=peers is not None)


def _submitted(call: _Call | None, work: Work | None) -> None:
    if call is not None and work is not None:
        _calls[work] = call
    elif call is not None:
        call.end()


def _taken(work: Work, _arguments: tuple[Any, ...]) -> _Call | None:
    return _calls.pop(work, None)


@cache
def clock_of(device: torch.device) -> DeviceClock:
    """Return the clock of a GPU in this process."""
    return DeviceClock(device)


def gpu_of(group: Any, tensors: Any) -> torch.device | None:
    """Return the GPU for which NCCL carries out operations with these tensors; None without."""
    tensor = _first_tensor(tensors)
    if tensor is None or not tensor.is_cuda or not is_nccl(group, tensor.device):
        return None
    return tensor.device


def _first_tensor(tensors: Any) -> Tensor | None:
    if isinstance(tensors, Tensor):
        return tensors
    found = (_first_tensor(each) for each in tensors)
    return next((each for each in found if each is not None), None)


# Untyped: torch's stub does not describe how to subclass a group.
_ProcessGroup: Any = dist.ProcessGroup


@untraced
class _ReducerGroup(_ProcessGroup):  # type: ignore[misc]  # subclasses Any, see above
    """A group that passes the calls of DDP's reducer, which is C++, on in Python.

    It has the name of the back end, which the reducer logs, but no back end. The reducer uses one
    only to allocate buckets (`_ALLOCATES`).
    """

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group
        set_default_backend(self, dist.ProcessGroup.BackendType.NCCL)


def _passed_on(method: str) -> Callable[..., Any]:
    def call(self: _ReducerGroup, *arguments: Any, **named: Any) -> Any:
        work = getattr(self._group, method)(*arguments, **named)
        if work is not None:
            work.get_future()  # the reducer takes it, too, but in C++
        return work

    return call


for _method in (*_METHODS, "barrier"):  # it calls allreduce and broadcast
    setattr(_ReducerGroup, _method, _passed_on(_method))


def _record_reducers() -> None:
    """Let reducers of DDP that are created from now on call their groups in Python."""
    module: Any = dist  # whose stub does not export the class
    create = module.Reducer

    @wraps(create)
    def call(*arguments: Any, **named: Any) -> Any:
        groups = _reducer_groups(*arguments) or {}
        reducer = create(*(groups.get(id(each), each) for each in arguments), **named)
        _groups[reducer] = list(groups.values())  # C++ alone does not keep what is in Python
        return reducer

    module.Reducer = call


@_harmless
def _reducer_groups(parameters: list[Tensor], *others: Any) -> dict[int, _ReducerGroup]:
    """Return the groups to use in place of the given ones, by their `id`."""
    if os.environ.get(_ALLOCATES, "1") != "1":
        return {}
    return {
        id(each): _ReducerGroup(each)
        for each in others
        if isinstance(each, dist.ProcessGroup) and gpu_of(each, parameters) is not None
    }
