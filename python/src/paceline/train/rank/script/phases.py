"""Times within a step of a script: waiting for data, forward and backward pass, communication.

torch has hooks for optimiser steps, but none for the rest. So two functions that every script
calls are timed: the DataLoader's `__next__` and `torch.autograd.backward`. The time from the end of
a step to the next backward pass is the forward pass, without the wait for data. Operations in the
passes for which the script waits are communication.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.base.torch_internals import DataLoaderIterator

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from paceline.collectives.recorder import Operation, Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Phases of one step in seconds; None where nothing was seen."""

    data_wait_s: float | None
    forward_s: float | None
    backward_s: float | None  # until the last operation on gradients was requested
    comm_s: float | None  # from then, in operations that the step waited for
    comm_ready_unix_s: float | None
    pass_comm_s: float | None  # before, in operations that the script called and waited for

    @property
    def total_s(self) -> float:
        passes = (self.forward_s, self.backward_s, self.pass_comm_s)
        known = (self.data_wait_s, *passes, self.comm_s)
        return sum(seconds for seconds in known if seconds is not None)


@dataclass(slots=True)
class PhaseTimer:
    """Times the phases of one step after the other, on the clock of perf_counter."""

    _data_wait_s: float | None = None
    _waited_s: float = 0.0  # for data, since the last backward pass
    _forward_s: float = 0.0
    _backward: list[tuple[float, float]] = field(default_factory=list)
    _began_s: float = field(default_factory=time.perf_counter)
    _mark_s: float = field(default_factory=time.perf_counter)

    def begin(self, started_s: float) -> None:
        """Begin a step."""
        self._data_wait_s, self._waited_s, self._forward_s = None, 0.0, 0.0
        self._backward.clear()
        self._began_s = self._mark_s = started_s

    def end(
        self, ended_s: float, operations: Sequence[Operation], unix_offset_s: float
    ) -> StepTimes:
        """Return the times of the step until the optimiser begins.

        operations: of this rank in the step. unix_offset_s: to add to perf_counter for unix time.
        """
        spans = [
            (each.arrived_unix_s - unix_offset_s, each.ended_unix_s - unix_offset_s)
            for each in operations
        ]
        awaited = {span for span, each in zip(spans, operations, strict=True) if each.awaited}
        in_passes = [span for span in awaited if self._began_s <= span[0] < self._passed_s]
        others = [span for span in spans if span not in in_passes]
        comm_s, ready_s = _exposed(self._backward, others, ended_s)
        backward_s = forward_s = pass_comm_s = None
        if in_passes and ready_s is None:
            comm_s, ready_s = 0.0, self._passed_s
        if self._backward:
            early = [span for span in in_passes if ready_s is None or span[0] < ready_s]
            in_backward_s = sum(e - b for b, e in early if self._is_in_backward(b))
            pass_comm_s = sum(e - b for b, e in early) if early else None
            forward_s = self._forward_s - ((pass_comm_s or 0.0) - in_backward_s)
            backward_s = sum(end - begin for begin, end in self._backward) - in_backward_s
            backward_s -= _within(self._backward[-1], ready_s)
        return StepTimes(
            data_wait_s=self._data_wait_s,
            forward_s=forward_s,
            backward_s=backward_s,
            comm_s=comm_s,
            comm_ready_unix_s=None if ready_s is None else ready_s + unix_offset_s,
            pass_comm_s=pass_comm_s,
        )

    @property
    def _passed_s(self) -> float:
        """End of the last backward pass; the start of the step before the first one."""
        return self._backward[-1][1] if self._backward else self._began_s

    def _is_in_backward(self, moment_s: float) -> bool:
        return any(begin <= moment_s < end for begin, end in self._backward)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time the two functions while the context is active."""
        with (
            replaced(DataLoaderIterator, "__next__", partial(_timed, self._waited)),
            replaced(torch.autograd, "backward", partial(_timed, self._passed_backward)),
        ):
            yield

    def _waited(self, begin_s: float, end_s: float) -> None:
        self._data_wait_s = (self._data_wait_s or 0.0) + end_s - begin_s
        self._waited_s += end_s - begin_s

    def _passed_backward(self, begin_s: float, end_s: float) -> None:
        self._forward_s += begin_s - self._mark_s - self._waited_s
        self._waited_s = 0.0
        self._backward.append((begin_s, end_s))
        self._mark_s = end_s


@contextmanager
def replaced(owner: Any, name: str, answer: Callable[..., Any]) -> Iterator[None]:
    """Let `answer` be called in place of a function of torch, which has no hook.

    Its first argument is the function. Contexts may end in any order.
    """
    function = getattr(owner, name)
    is_active = True

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return answer(function, *arguments, **named) if is_active else function(*arguments, **named)

    setattr(owner, name, call)
    try:
        yield
    finally:
        is_active = False
        if getattr(owner, name) is call:  # else another one has replaced it since
            setattr(owner, name, function)


@contextmanager
def hooked(*handles: RemovableHandle) -> Iterator[None]:
    """Remove hooks of torch at the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def around_steps(before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
    """Call functions before and after each step of an optimiser while the context is active.

    It must not end within one of them: torch goes through its hooks then.
    """
    with hooked(register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
        yield


def has_messages(operations: Recorder, kinds: Sequence[str] = ("send", "recv")) -> bool:
    """Return whether this rank has sent to single other ones, or received, since the last step."""
    return any(each.operation in kinds for each in operations.ended())


def has_closure(arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether a step, whose first argument is the optimiser, computes the loss itself."""
    return len(arguments) > 1 or named.get("closure") is not None


def first_loss(arguments: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
    """Return the first tensor from which `torch.autograd.backward` is called with arguments."""
    tensors = arguments[0] if arguments else named.get("tensors")
    return tensors if isinstance(tensors, Tensor) else next(iter(tensors or ()), None)


def _timed(
    note: Callable[[float, float], None],
    function: Callable[..., Any],
    *arguments: Any,
    **named: Any,
) -> Any:
    """Call a function; note when it began and ended."""
    begin_s = time.perf_counter()
    try:
        return function(*arguments, **named)
    finally:
        note(begin_s, time.perf_counter())


def _exposed(
    backward: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float]], ended_s: float
) -> tuple[float | None, float | None]:
    """Return the seconds of exposed communication, and when the rank's gradients were ready.

    DistributedDataParallel requests its last all-reduce when the last gradient is ready, and waits
    for all of them before the backward pass returns. A script may also average gradients itself
    after the backward pass. Operations before the last backward pass are overlapped or belong to
    other phases. spans: request and end of each operation.
    """
    begin, returned = backward[-1] if backward else (ended_s, ended_s)
    during = [arrived for arrived, _ in spans if begin <= arrived < returned]
    after = sorted((a, min(e, ended_s)) for a, e in spans if returned <= a < ended_s)
    if not during and not after:
        return None, None
    ready_s = max(during) if during else after[0][0]
    comm_s = returned - ready_s if during else 0.0
    reached_s = returned
    for arrived, ended in after:
        comm_s += max(0.0, ended - max(arrived, reached_s))
        reached_s = max(reached_s, ended)
    return comm_s, ready_s


def _within(backward: tuple[float, float], ready_s: float | None) -> float:
    """Return the part of a backward pass after the gradients were ready."""
    return 0.0 if ready_s is None else max(0.0, backward[1] - max(ready_s, backward[0]))
