"""Process groups of torch that a progress thread serves, and torch's default process group.

A library that blocks, and that every rank must call in the same order, becomes a process group of
torch by means of a progress thread. torch's default process group is opened and closed in the same
way for every library.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from paceline.transports.progress import ProgressThread

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from paceline.errors import PacelineError
    from paceline.plan.rank_context import RankContext
    from paceline.plan.trial import Trial
    from paceline.transports.work import PendingWork

_CLOSE_LIMIT_S = 10.0
_ABORT_LIMIT_S = 0.5

# Untyped: torch declares overloads, of which a backend implements only the one with lists.
_ProcessGroup: Any = dist.ProcessGroup


class ThreadedProcessGroup(_ProcessGroup):  # type: ignore[misc]  # subclasses Any, see above
    """A group whose progress thread carries out its operations in the order of submission.

    A subclass implements torch's operations and passes each to the progress thread.
    """

    backend: ClassVar[str]  # name of the backend in torch
    library: ClassVar[str]  # name of the library in messages

    def __init__(self, *, rank: int, size: int, world_rank: int, name: str, limit_s: float) -> None:
        """rank: within the group. world_rank: for messages. limit_s: limit of every operation,
        counted from the moment its turn comes on this rank."""
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._name = name
        self._progress = ProgressThread(self.library, world_rank, limit_s, name)
        self._open = True

    @property
    def failure(self) -> PacelineError | None:
        """The first error of the group's operations. Every later operation fails with it."""
        return self._progress.failure

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return self.backend

    def setGroupName(self, group_name: str) -> None:  # noqa: N802  (torch's name)
        self._name = group_name

    def getGroupName(self) -> str:  # noqa: N802  (torch's name)
        return self._name

    @property
    def group_name(self) -> str:
        """Name of the group. The base class cannot store it for a group that is its own backend."""
        return self._name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        """Reduce each tensor over all ranks in place; all ranks get bit-identical results."""
        raise NotImplementedError

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        return self.allreduce(tensors, opts)

    def shutdown(self) -> None:
        """End the threads after the submitted operations; after a failure, without waiting."""
        self._close(_CLOSE_LIMIT_S if self.failure is None else _ABORT_LIMIT_S)

    def abort(self) -> None:
        """End the threads without waiting for peers. A thread that is blocked inside the library is
        abandoned."""
        self._close(_ABORT_LIMIT_S)

    def _close(self, limit_s: float) -> None:
        if self._open:
            self._open = False
            self._progress.close(limit_s)


class DefaultGroupTransport:
    """A transport that opens torch's default process group with one backend."""

    backend: ClassVar[str]

    def __init__(self) -> None:
        self._group: Any = None  # a dist.ProcessGroup

    def open_group(self, context: RankContext, trial: Trial, store: Store, **options: Any) -> None:
        """Open the default process group. options: further ones of `init_process_group`."""
        dist.init_process_group(
            self.backend,
            store=PrefixStore(self.backend, store),
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=trial.limits.collective_s),
            **options,
        )
        self._group = dist.group.WORLD

    def close(self, *, failed: bool) -> None:
        """Destroy all process groups; a second call does nothing.

        After a failure, the operations of all groups are given up, because their peers may be gone:
        a group that has not failed itself would wait for them.
        """
        if not dist.is_initialized():
            return
        if failed:
            distributed_c10d._abort_process_group()  # noqa: SLF001  (torch has no public name)
        else:
            dist.destroy_process_group()


class ThreadedTransport(DefaultGroupTransport):
    """A transport whose default process group is a ThreadedProcessGroup."""

    def explain(self, error: Exception) -> PacelineError | None:  # noqa: ARG002
        """Return the group's error. DDP raises a copy of it without its type."""
        failure: PacelineError | None = None if self._group is None else self._group.failure
        return failure
