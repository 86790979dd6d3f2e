"""What every operation of an MPI process group goes through, and the group's beginning and end.

Collectives go through one progress thread in the order of submission, as MPI demands of every
rank. Messages between two ranks are non-blocking calls on a second communicator, so that a send
never stands in the way of the receive that its peer needs first.
"""

from __future__ import annotations

import atexit
import uuid
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import PrefixStore

from paceline.transports.mpi import leaving
from paceline.transports.mpi.buffers import check_dense, devices_done
from paceline.transports.mpi.exchanges import Exchanges
from paceline.transports.mpi.joint import JointWork
from paceline.transports.mpi.messages import Messenger, MpiMessage
from paceline.transports.mpi.names import Names
from paceline.transports.mpi.profiled import begin_in_profile
from paceline.transports.mpi.reductions import Carried, Reductions
from paceline.transports.progress import ProgressThread
from paceline.transports.recorder import begin_operation, payload_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from paceline.errors import PacelineError
    from paceline.spec.values import Algorithm
    from paceline.transports.work import PendingWork

BACKEND = "mpi4py"
_LARGEST_CONTEXT_TAG = 32767  # what the MPI standard guarantees
_CLOSE_LIMIT_S = 10.0
_ABORT_LIMIT_S = 0.5

# Untyped here: torch declares overloads of which a backend implements the one with lists.
_ProcessGroup: Any = dist.ProcessGroup


class GroupCore(_ProcessGroup):  # type: ignore[misc]  # subclasses Any, see above
    """A group of ranks of MPI_COMM_WORLD; making it is collective over the group.

    world_ranks: ranks in MPI's world, in the group's order; empty means all.
    store: where the ranks tell one another of memory that they share.
    algorithm: of all-reduce, where it matters.
    limit_s: of every operation, from when it is this rank's turn to carry it out.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        world_ranks: list[int],
        name: str,
        limit_s: float,
        store: Store,
        algorithm: Algorithm = "auto",
    ) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._name = name
        self._limit_s = limit_s
        self._store = store
        self.algorithm = algorithm
        self._world_rank: int = MPI.COMM_WORLD.rank
        self._progress = ProgressThread("MPI", self._world_rank, limit_s, name)
        leaving.watch(self._progress, limit_s)
        self._messenger = Messenger(name)
        self._coalesced: list[PendingWork] | None = None
        self._open = True
        atexit.register(self.abort)  # a thread still in torch when Python ends would bring it down
        self._names: Names
        self._reductions: Reductions
        self._exchanges: Exchanges
        self._comm: MPI.Intracomm
        self._messages: MPI.Intracomm
        self._tell_devices()
        members = world_ranks or list(range(size))
        self._progress.submit("communicator", lambda: self._make_communicators(members), [])
        self.barrier().wait()

    @property
    def failure(self) -> PacelineError | None:
        """The first error of this group's collectives; after it every collective fails."""
        return self._progress.failure

    def describe(self) -> dict[str, Any]:
        """What a reader of the results should know of how this group reduces."""
        return self._reductions.describe()

    def barrier(self, opts: Any = None) -> PendingWork:  # noqa: ARG002
        return self._submit("barrier", lambda: None, [], [])  # to meet is all

    # -- what torch asks of a group ------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return BACKEND

    def setGroupName(self, group_name: str) -> None:  # noqa: N802  (torch's name)
        self._name = group_name

    def getGroupName(self) -> str:  # noqa: N802  (torch's name)
        return self._name

    @property
    def group_name(self) -> str:
        """The base class has no place for the name of a group that is its own backend."""
        return self._name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _start_coalescing(self, _device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: Any) -> JointWork:
        """One work for all that was submitted since the start."""
        works, self._coalesced = self._coalesced or [], None
        return JointWork(works)

    def shutdown(self) -> None:
        """End the threads and, if nothing failed, free the communicators (collective)."""
        if self._open and self.failure is None:
            self._submit("shutdown", self._free_communicators, [], [])
        self._close(_CLOSE_LIMIT_S)

    def abort(self) -> None:
        """End the threads without the peers; one that MPI holds is left behind."""
        self._close(_ABORT_LIMIT_S)

    # -- inside --------------------------------------------------------------------------------

    def _submit(
        self,
        name: str,
        call: Callable[[], Carried | None],
        results: list[Any],
        inputs: list[Tensor],
        *,
        synchronise: bool = True,
    ) -> PendingWork:
        """Queue `call`; with `meet`, it begins when every rank has come to it.

        results: what the work's future holds; inputs: this rank's tensors.

        Why all meet first: who waits for a late peer must neither take the core from the backward
        pass that still runs, as MPI does, nor wait for ever; and can say who did not come.
        """
        check_dense(inputs)
        given_or_got = max(payload_bytes(inputs), payload_bytes(results))
        operation = begin_operation(self._name, self._size, name, given_or_got)
        handed_over = devices_done(inputs)
        shown = begin_in_profile(BACKEND, name)

        def carry_out() -> None:
            try:
                handed_over()
                if synchronise:
                    self._reductions.synchronise(name)
                carried = call()
                devices_done(inputs)()
            finally:
                shown()
            if carried is not None:
                operation.algorithm = carried.algorithm
                operation.sent_bytes = carried.sent_bytes
                operation.sent_messages = carried.sent_messages

        return self._noted(self._progress.submit(name, carry_out, results, operation))

    def _post(
        self,
        name: str,
        peers: str,
        told_as: str,
        tensor: Tensor,
        begin: Callable[[Tensor], tuple[Any, MPI.Request, Callable[[], None]]],
        shown_name: str | None = None,
    ) -> MpiMessage:
        """Start a message. peers: who sends to whom, the same word on both ranks; told_as: the same
        for the user.

        begin: gives the buffer, the request, and what to do once it is complete.
        shown_name: in a profile, if not `name`.
        """
        check_dense([tensor])
        # Not every rank takes part, so messages are counted apart from the group's collectives.
        operation = begin_operation(f"{self._name}/{peers}", 2, name, payload_bytes(tensor))
        devices_done([tensor])()
        operation.start()
        buffer, request, deliver = begin(tensor)
        shown = begin_in_profile(BACKEND, shown_name or name)

        def ended() -> None:
            deliver()
            devices_done([tensor])()
            shown()
            operation.end()

        told = f"MPI {name} {told_as}"
        message = MpiMessage(
            told, self._world_rank, self._limit_s, [tensor], request, buffer, ended
        )
        self._messenger.add(message)
        self._noted(message)
        return message

    def _noted(self, work: PendingWork) -> PendingWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _close(self, limit_s: float) -> None:
        if self._open:
            self._open = False
            atexit.unregister(self.abort)
            self._progress.close(limit_s)
            self._messenger.close()

    def _tell_devices(self) -> None:
        """Let torch know what tensors this group takes: it looks for them where it keeps backends.

        There is none to keep: a group made in Python is its own backend.
        """
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        for device in devices:
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, None)

    def _make_communicators(self, members: list[int]) -> None:
        world = MPI.COMM_WORLD
        group = world.group.Incl(members)
        # Groups made at the same time by different ranks are told apart by the tag.
        tag = zlib.crc32(self._name.encode()) % _LARGEST_CONTEXT_TAG
        self._comm = world.Create_group(group, tag)
        self._messages = self._comm.Dup()
        group.Free()
        self._names = Names.of(self._comm, self._limit_s)
        self._exchanges = Exchanges(self._comm, self._names, self._limit_s)
        # A store can outlive a group, and must not answer the next with what it was told by this.
        alone = self._comm.bcast(uuid.uuid4().hex)
        self._reductions = Reductions(
            self._comm,
            names=self._names,
            store=PrefixStore(alone, self._store),
            limit_s=self._limit_s,
            algorithm=self.algorithm,
        )

    def _free_communicators(self) -> None:
        self._reductions.close()
        self._messages.Free()
        self._comm.Free()
