"""Answer a script's `torch.distributed.init_process_group` with the trial's transport.

The backend that the script names is ignored: which one carries its messages is what a trial
compares. Rendezvous and limits are Paceline's. Frameworks call the same functions of torch, so they
need nothing else. Where the launcher is not Paceline's, `recorded_groups` only records.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.base.errors import UsageError
from paceline.base.torch_internals import HashStore
from paceline.collectives.gloo_group import BACKEND
from paceline.collectives.nccl_records import record_nccl
from paceline.collectives.recorder import awaiting
from paceline.collectives.torch_internals import Store
from paceline.plan.trials.trial import RankContext

if TYPE_CHECKING:
    from paceline.plan.trials.trial import Trial
    from paceline.train.rank.peers import Peers

_GLOO = "gloo"  # of torch, which BACKEND wraps
# Names by which scripts know back ends that record: some wrap a model for known ones only.
_KNOWN_AS = {BACKEND: _GLOO, "mpi4py": "mpi"}
_LIBRARIES = ("horovod", "mpi4py")  # that exchange gradients, and not through torch


class ProcessGroups:
    """Makes the process groups of a script.

    before_destroy: called before the script destroys its default group.
    """

    def __init__(self, trial: Trial, context: RankContext, peers: Peers) -> None:
        self.opened = False  # whether the script has ever asked for its default group
        self.before_destroy: Callable[[], None] = lambda: None
        self._is_opening = False
        self._trial = trial
        self._context = context
        self._peers = peers
        self._limit = timedelta(seconds=trial.limits.collective_s)
        self._init: Callable[..., None] = dist.init_process_group
        self._new_group: Callable[..., Any] = dist.new_group
        self._destroy: Callable[..., None] = dist.destroy_process_group

    def answering(self) -> AbstractContextManager[None]:
        """Answer these functions of torch while the context is active."""
        return _answered(
            {
                self._init: self._answer_init,
                self._new_group: self._answer_new_group,
                self._destroy: self._answer_destroy,
                dist.get_backend: _backend_as_known(dist.get_backend),
            }
        )

    def _answer_init(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Store | None = None,
        *others: Any,
        **named: Any,
    ) -> None:
        # The transport calls this function, too. A second group gets torch's own error.
        if self._is_opening or dist.is_initialized():
            self._init(backend, init_method, timeout, world_size, rank, store, *others, **named)
            return
        own = self._context
        if world_size not in (-1, own.world_size) or rank not in (-1, own.rank):
            raise UsageError(
                f"the script asks for a process group as rank {rank} of {world_size}, Paceline "
                f"started it as rank {own.rank} of {own.world_size}; let it use the variables RANK "
                "and WORLD_SIZE, as under torchrun"
            )
        self._is_opening = True
        try:
            if own.world_size > 1:
                self._peers.open_transport()
            else:
                alone = "gloo" if self._trial.device == "cpu" else backend
                self._init(alone, store=HashStore(), rank=0, world_size=1, timeout=self._limit)
        finally:
            self._is_opening = False
        self.opened = True

    def _answer_new_group(
        self,
        ranks: list[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,  # noqa: ARG002  (they belong to the named backend)
        *others: Any,
        **named: Any,
    ) -> Any:
        limit = self._limit if timeout is None else min(timeout, self._limit)
        # It has the back end of the default group, unless the script asks for Gloo by name, for
        # monitored_barrier, or for objects on CPUs.
        found = _recorded(backend)
        own = found if found == BACKEND and self._context.world_size > 1 else None
        return self._new_group(ranks, limit, own, None, *others, **named)

    def _answer_destroy(self, group: Any = None) -> None:
        if dist.is_initialized() and group in (None, dist.group.WORLD):
            self.before_destroy()
        self._destroy(group)


def recorded_groups() -> AbstractContextManager[None]:
    """Record the groups of a script, which keep the back ends that the script names.

    A group of Gloo alone is wrapped; methods of torch's classes record those of NCCL. Operations of
    others are not recorded.
    """
    init, new_group = dist.init_process_group, dist.new_group

    def answer_init(backend: str | None = None, *others: Any, **named: Any) -> None:
        if backend is None and not torch.accelerator.is_available():
            backend = _GLOO
        init(_recorded(backend), *others, **named)
        record_nccl(dist.group.WORLD)

    def answer_new_group(
        ranks: list[int] | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        *others: Any,
        **named: Any,
    ) -> Any:
        group = new_group(ranks, timeout, _recorded(backend), *others, **named)
        record_nccl(group)
        return group

    own = {dist.get_backend: _backend_as_known(dist.get_backend)}
    return _answered({init: answer_init, new_group: answer_new_group, **own})


def other_library() -> str | None:
    """Return a library through which the script may exchange gradients past torch; else None."""
    own = ("paceline", *_LIBRARIES)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in own or not isinstance(module, ModuleType):
            continue
        modules = [v for v in list(vars(module).values()) if issubclass(type(v), ModuleType)]
        libraries: set[str] = {each.__name__.partition(".")[0] for each in modules}
        if found := libraries.intersection(_LIBRARIES):
            return min(found)
    return None


def _backend_as_known(function: Callable[..., str]) -> Callable[..., str]:
    """Return an answer to `get_backend` with the name that a script knows."""

    def answer(*arguments: Any, **named: Any) -> str:
        backend = function(*arguments, **named)
        return _KNOWN_AS.get(backend, backend)

    return answer


def _recorded(backend: str | None) -> str | None:
    return BACKEND if backend is not None and backend.lower() == _GLOO else backend


@contextmanager
def _answered(answers: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of torch, wherever torch itself refers to them, and mark collectives."""
    replacements = {
        **{function: _as(function, answer) for function, answer in answers.items()},
        **{function: _marked(function) for function in _collectives()},
    }
    places = [
        (module, function)
        for name, module in list(sys.modules.items())
        if name.startswith("torch.distributed")
        for function in replacements
        if getattr(module, function.__name__, None) is function
    ]
    for module, function in places:
        setattr(module, function.__name__, replacements[function])
    try:
        yield
    finally:
        for module, function in places:
            setattr(module, function.__name__, function)


def _collectives() -> list[Callable[..., Any]]:
    """Return torch's functions for collective operations."""
    named = (getattr(dist.distributed_c10d, name) for name in dist.distributed_c10d.__all__)
    # isinstance() would make torch warn about a deprecated object among them
    functions = [each for each in named if type(each) is FunctionType]
    return [each for each in functions if "async_op" in inspect.signature(each).parameters]


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective operation that marks in the records whether the script waits for it."""
    # Once, because binding the arguments of every call takes longer than the rest of this function.
    position = list(inspect.signature(function).parameters).index("async_op")

    def call(*arguments: Any, **named: Any) -> Any:
        if named.get("async_op") or any(arguments[position : position + 1]):
            return function(*arguments, **named)
        with awaiting():
            return function(*arguments, **named)

    return _as(function, call)


def _as(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that looks like `original` and calls `answer`."""

    @functools.wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        return answer(*arguments, **named)

    return call
