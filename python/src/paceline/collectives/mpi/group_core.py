"""Life cycle of an MPI process group, and the path that every operation takes.

One progress thread carries out collectives in the order of submission, because MPI requires the
same order on every rank. Point-to-point messages are non-blocking calls on a second communicator,
so that a send never delays the receive that the peer needs first.
"""

from __future__ import annotations

import atexit
import uuid
import zlib
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from paceline.collectives.agreement import check_elements, mode_of, tensors_in
from paceline.collectives.buffers import check_dense, copy_back, device_wait, wire_buffer
from paceline.collectives.errors import PacelineError
from paceline.collectives.message_schedules import Algorithm
from paceline.collectives.mpi.all_reduce import AllReduce, CollectiveStatistics
from paceline.collectives.mpi.collectives import Collectives
from paceline.collectives.mpi.point_to_point import Messenger, MpiMessage, limit_end_after_failure
from paceline.collectives.mpi.world import RankNames
from paceline.collectives.recorder import (
    GroupDescription,
    begin_operation,
    begin_profile_event,
    payload_bytes,
)
from paceline.collectives.torch_internals import PrefixStore, Store, register_backend, untraced
from paceline.collectives.work import CoalescedWork, PendingWork, ProgressThread

BACKEND = "mpi4py"
_CLOSE_LIMIT_S = 10.0
_ABORT_LIMIT_S = 0.5
_LARGEST_CONTEXT_TAG = 32767  # the largest tag that the MPI standard guarantees


# Untyped: torch declares overloads, of which a backend implements only the one with lists.
_ProcessGroup: Any = dist.ProcessGroup


@untraced
class GroupCore(_ProcessGroup):  # type: ignore[misc]  # subclasses Any, see above
    """A group of ranks of MPI_COMM_WORLD. Construction is collective over the group.

    world_ranks: ranks in MPI_COMM_WORLD in the order of the group; empty means all ranks. store:
    key-value store through which ranks publish their shared memory. algorithm: all-reduce
    algorithm. limit_s: limit of every operation, counted from the moment its turn comes on this
    rank.
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
        self._world_rank: int = MPI.COMM_WORLD.rank
        self._name = name
        self._limit_s = limit_s
        self._progress = ProgressThread("MPI", self._world_rank, limit_s, name)
        self._open = True
        self._store = store
        self.algorithm = algorithm
        limit_end_after_failure(self._progress, limit_s)
        self._messenger = Messenger(name)
        self._coalesced: list[PendingWork] | None = None
        atexit.register(self.abort)  # a thread still inside torch at exit would crash the process
        self._names: RankNames
        self._reductions: AllReduce
        self._collectives: Collectives
        self._comm: MPI.Intracomm
        self._messages: MPI.Intracomm
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        # No backend object: a group made in Python is its own backend.
        register_backend(self, devices, dist.ProcessGroup.BackendType.CUSTOM, None)
        members = world_ranks or list(range(size))
        self._progress.submit("communicator", lambda: self._make_communicators(members), [])
        self.barrier().wait()

    @property
    def failure(self) -> PacelineError | None:
        """The first error of the group's operations. Every later operation fails with it."""
        return self._progress.failure

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return BACKEND

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

    def describe(self) -> GroupDescription:
        """Return how this group reduces, for the records."""
        return {**self._reductions.describe(), **self._collectives.describe()}

    def barrier(self, opts: Any = None) -> PendingWork:  # noqa: ARG002
        return self._submit("barrier", lambda: None, [], [])  # _submit synchronises the ranks

    def _start_coalescing(self, _device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: Any) -> CoalescedWork:
        """Return one work for all operations submitted since `_start_coalescing`."""
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works)

    def shutdown(self) -> None:
        """End the threads and, if nothing failed, free the communicators (collective)."""
        if self._open and self.failure is None:
            self._submit("shutdown", self._free_communicators, [], [])
        self._close(_CLOSE_LIMIT_S if self.failure is None else _ABORT_LIMIT_S)

    def abort(self) -> None:
        """End the threads without waiting for peers. A thread that is blocked inside the library is
        abandoned."""
        self._close(_ABORT_LIMIT_S)

    # -- inside --------------------------------------------------------------------------------

    def _submit(
        self,
        name: str,
        call: Callable[[], CollectiveStatistics | None],
        results: list[Any],
        inputs: list[Tensor],
        *,
        said: str | None = None,
        synchronise: bool = True,
    ) -> PendingWork:
        """Queue `call`. With `synchronise`, it begins when every rank has reached it; otherwise it
        meets the others itself.

        results: content of the work's future. inputs: this rank's tensors. said: the call in words
        that are the same on all ranks.

        Ranks synchronise first for three reasons: MPI would spin while it waits for a late peer and
        take the core from a running backward pass; it would wait without limit; and it could not
        name the late rank.
        """
        check_dense(inputs)
        written = tensors_in(results)
        check_elements(written)
        mode = mode_of(written)
        # this rank's tensors, as under Gloo; where it only receives, what it gets
        own_bytes = payload_bytes(inputs) or payload_bytes(results)
        operation = begin_operation(self._name, self._size, name, own_bytes)
        wait_for_inputs = device_wait(inputs)
        end_profile_event = begin_profile_event(BACKEND, name)

        def carry_out() -> None:
            try:
                wait_for_inputs()
                with mode():
                    self._reductions.begin(name, said or name, must_wait=synchronise)
                    try:
                        statistics = call()
                    except Exception as error:
                        self._reductions.end(name, error)
                        raise
                    self._reductions.end(name)
                device_wait(inputs)()
            finally:
                end_profile_event()
            if statistics is not None:
                operation.algorithm = statistics.algorithm
                operation.sent_bytes = statistics.sent_bytes
                operation.sent_messages = statistics.sent_messages

        return self._collect(self._progress.submit(name, carry_out, results, operation))

    def _post(
        self,
        name: Literal["send", "recv"],
        tensor: Tensor,
        peers: str,
        peers_text: str,
        start: Callable[[Tensor], MPI.Request],
        profile_name: str | None = None,
    ) -> MpiMessage:
        """Start a point-to-point message.

        peers: sender and receiver, the same text on both ranks; peers_text: the same for the user.
        start: starts the transfer of a flat tensor. profile_name: name in a profile, if it differs
        from `name`.
        """
        check_dense([tensor])
        # Only two ranks take part, so messages are numbered separately from collectives.
        operation = begin_operation(f"{self._name}/{peers}", 2, name, payload_bytes(tensor))
        device_wait([tensor])()
        operation.start()
        flat = wire_buffer(tensor)
        request = start(flat)
        end_profile_event = begin_profile_event(BACKEND, profile_name or name)

        def ended() -> None:
            if name == "recv":
                copy_back(flat, tensor)
            device_wait([tensor])()
            end_profile_event()
            operation.end()

        label = f"MPI {name} {peers_text}"
        message = MpiMessage(label, self._world_rank, self._limit_s, [tensor], request, flat, ended)
        self._messenger.add(message)
        self._collect(message)
        return message

    def _collect(self, work: PendingWork) -> PendingWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _close(self, limit_s: float) -> None:
        if self._open:
            self._open = False
            self._progress.close(limit_s)
            atexit.unregister(self.abort)
            self._messenger.close()

    def _make_communicators(self, members: list[int]) -> None:
        world = MPI.COMM_WORLD
        group = world.group.Incl(members)
        # The tag distinguishes groups that different ranks create at the same time.
        tag = zlib.crc32(self._name.encode()) % _LARGEST_CONTEXT_TAG
        self._comm = world.Create_group(group, tag)
        self._messages = self._comm.Dup()
        group.Free()
        self._names = RankNames.gather(self._comm, self._limit_s)
        self._collectives = Collectives(self._comm, self._names, self._limit_s)
        # A store can outlive a group. A unique prefix keeps this group's keys from the next one.
        prefix = self._comm.bcast(uuid.uuid4().hex)
        self._reductions = AllReduce(
            self._comm,
            names=self._names,
            store=PrefixStore(prefix, self._store),
            limit_s=self._limit_s,
            algorithm=self.algorithm,
        )

    def _free_communicators(self) -> None:
        self._reductions.close()
        self._messages.Free()
        self._comm.Free()
