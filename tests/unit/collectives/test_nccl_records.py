"""Operations of NCCL are recorded with the times of the GPU. Calls do what they do without records.

Gloo takes the place of NCCL, in torch's own groups and DistributedDataParallel. A fake of the GPU's
clock tells when the GPU has reached a mark.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.nn.parallel import DistributedDataParallel

from paceline.collectives import nccl_records
from paceline.collectives.nccl_records import record_nccl
from paceline.collectives.torch_internals import Work, register_backend, set_default_backend
from paceline.measure.records.communication import last_operations
from paceline.train.rank.spans import recording

CPU = torch.device("cpu")
ProcessGroup: Any = dist.ProcessGroup
WAITS = ("wait", "synchronize", "block_current_stream", "get_future")


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class Clock:
    """A GPU's clock. A test says when the GPU reaches the marks, which are numbers from 0."""

    def __init__(self) -> None:
        self.marks = self.questions = 0
        self.is_known = True
        self.is_capturing = False
        self.entered = 0  # the stream for futures
        self.reached: dict[int, float] = {}
        self.error: RuntimeError | None = None

    def mark(self) -> int | None:
        assert not self.is_capturing
        self.marks += 1
        return self.marks - 1 if self.is_known else None

    def aside(self) -> Any:
        self.entered += 1
        return nullcontext()

    def reached_unix_s(self, mark: int) -> float | None:
        assert not self.is_capturing
        self.questions += 1
        if self.error is not None:
            raise self.error
        return self.reached.get(mark)


@pytest.fixture
def group() -> Iterator[Any]:
    """A group of one rank, as torch creates it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the GPU that the CPU is taken for; torch's classes are restored at the end."""
    found = Clock()
    for name in ("_is_begun", "_is_ended"):
        monkeypatch.setattr(nccl_records, name, False)
    monkeypatch.setattr(nccl_records, "clock_of", lambda _device: found)
    monkeypatch.setattr(nccl_records, "is_capturing", lambda _device: found.is_capturing)
    monkeypatch.setattr(nccl_records, "is_nccl", lambda _group, _device: True)
    monkeypatch.setattr(nccl_records, "gpu_of", lambda _group, _tensors: CPU)
    for owner, names in (
        (ProcessGroup, (*nccl_records._METHODS, "abort")),
        (Work, WAITS),
        (dist, ("Reducer",)),
    ):
        for name in names:
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, getattr(owner, name))
    return found


Change = Callable[[str, Callable[..., Any]], None]


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Change:
    """Let a method of torch's groups behave as that of NCCL, before its calls are recorded."""
    return lambda name, answer: monkeypatch.setattr(ProcessGroup, name, answer)


@pytest.fixture
def in_stream(replaced: Change) -> None:
    """A call without async_op returns no work: the caller's stream carries it out."""
    replaced("allreduce", lambda _group, _tensors, _options=None: None)


def test_call_in_the_callers_stream_ends_after_it(
    group: Any, clock: Clock, in_stream: None, tmp_path: Path
) -> None:
    record_nccl(group)
    with recording(tmp_path / "file") as used:
        dist.all_reduce(torch.ones(3))
        for reached in ({}, {0: 10.0}, {1: 10.5}):
            clock.reached = reached
            used.flush()
            assert rows(tmp_path / "file") == []
        clock.reached = {0: 10.0, 1: 10.5}
        assert used.ended() == []
        used.flush()
        [row] = rows(tmp_path / "file")
        used.flush()
    assert (row["arrived_unix_s"], row["started_unix_s"], row["ended_unix_s"]) == (10.0, None, 10.5)
    assert (row["group"], row["operation"], row["payload_bytes"]) == ("0", "allreduce", 12)
    assert (row["ranks"], row["sequence"]) == (1, 0)
    assert len(rows(tmp_path / "file")) == 1


@pytest.mark.parametrize("method", ["wait", "synchronize"])
def test_asynchronous_call_ends_where_the_stream_has_passed_the_first_wait(
    group: Any, clock: Clock, tmp_path: Path, method: str
) -> None:
    record_nccl(group)
    clock.reached = {0: 1.0, 1: 2.0, 2: 3.0}
    tensor = torch.ones(3)
    with recording(tmp_path / "file") as used:
        work = dist.all_reduce(tensor, async_op=True)
        assert type(work) is Work
        used.flush()
        assert (clock.marks, rows(tmp_path / "file")) == (1, [])
        getattr(work, method)()
        work.wait()
    [row] = rows(tmp_path / "file")
    assert (clock.marks, row["arrived_unix_s"], row["ended_unix_s"]) == (2, 1.0, 2.0)
    assert clock.entered == 0


def waited_for(name: str) -> Callable[..., Any]:
    """Return a method of torch's groups that returns when its future is done, as NCCL's is."""
    method = getattr(ProcessGroup, name)

    def call(self: Any, *arguments: Any) -> Any:
        work = method(self, *arguments)
        work.wait()
        return work

    return call


def test_call_whose_future_is_taken_ends_in_a_stream_that_waits_for_it(
    group: Any, clock: Clock, replaced: Change, tmp_path: Path
) -> None:
    replaced("allreduce", waited_for("allreduce"))
    record_nccl(group)
    clock.reached = {0: 1.0, 1: 2.0, 2: 3.0}
    with recording(tmp_path / "file"):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        tensors = work.get_future().wait()
        work.wait()
    assert [each.numel() for each in tensors] == [3]
    [row] = rows(tmp_path / "file")
    assert (clock.marks, clock.entered, row["ended_unix_s"]) == (2, 1, 2.0)


def done_work(*_: Any) -> Any:
    """Return a work that has ended, as NCCL's are at their return."""
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    return _create_work_from_future(done)


def test_no_stream_waits_for_a_message_whose_future_is_taken(
    group: Any, clock: Clock, replaced: Change, tmp_path: Path
) -> None:
    replaced("recv", done_work)
    record_nccl(group)
    clock.reached = dict.fromkeys(range(10), 1.0)
    with recording(tmp_path / "file"):
        group.recv([torch.ones(3)], 0, 0).get_future()
        group.recv([torch.ones(3)], 0, 0).wait()
    assert (clock.entered, [row["sequence"] for row in rows(tmp_path / "file")]) == (0, [1])


def trained(steps: int = 3) -> list[float]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.full((3, 4), step + 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert type(model.process_group) is ProcessGroup
    return [float(each) for each in model.module.weight.detach().flatten()]


def test_reducer_of_ddp_trains_the_same_and_is_recorded(
    group: Any, clock: Clock, replaced: Change, tmp_path: Path
) -> None:
    expected = trained()
    replaced("allreduce", waited_for("allreduce"))
    record_nccl(group)
    clock.reached = dict.fromkeys(range(100), 1.0)
    with recording(tmp_path / "file"):
        assert trained() == expected
    found = [row for row in rows(tmp_path / "file") if row["operation"] == "allreduce"]
    assert [row["payload_bytes"] for row in found] == [32, 32, 32]
    assert clock.entered >= 3


def test_groups_are_those_of_torch(group: Any, clock: Clock) -> None:
    record_nccl(group)
    assert dist.group.WORLD is group
    assert type(group) is ProcessGroup
    assert type(dist.new_group([0])) is ProcessGroup
    assert dist.get_backend() == "gloo"


def test_operations_are_numbered_in_each_group_and_messages_between_two_ranks(
    group: Any, clock: Clock, replaced: Change, tmp_path: Path
) -> None:
    for name in ("send", "broadcast", "reduce_scatter", "allgather"):
        replaced(name, lambda *_: None)
    other = dist.new_group([0])
    record_nccl(group)
    clock.reached = {4: 1.0, 5: 2.0}
    tensor, two = torch.ones(3), torch.ones(2)
    with recording(tmp_path / "file") as used:
        dist.broadcast(tensor, 0)
        dist.reduce_scatter(tensor, [tensor])
        dist.all_gather([two], two, group=other)
        used.flush()
        clock.reached = dict.fromkeys(range(10), 3.0)
        dist.isend(tensor, 0)
        dist.broadcast(tensor, 0)
    found = [
        (row["group"] == group.group_name, row["sequence"], row["operation"], row["payload_bytes"])
        for row in rows(tmp_path / "file")
    ]
    assert found == [
        (False, 0, "allgather", 8),
        (True, 0, "broadcast", 12),
        (True, 1, "reduce_scatter", 12),
        (False, 0, "send", 12),
        (True, 2, "broadcast", 12),
    ]
    message = rows(tmp_path / "file")[3]
    assert (message["group"], message["ranks"]) == (f"{group.group_name}/0->0", 2)


def test_nothing_is_marked_or_asked_while_a_graph_is_captured(
    group: Any, clock: Clock, in_stream: None, tmp_path: Path
) -> None:
    record_nccl(group)
    tensor = torch.ones(3)
    with recording(tmp_path / "file") as used:
        begun = dist.broadcast(tensor, 0, async_op=True)
        dist.all_reduce(tensor)
        clock.reached = dict.fromkeys(range(3), 1.0)
        clock.is_capturing = True
        used.flush()
        dist.all_reduce(tensor)
        begun.wait()
        clock.is_capturing = False
    assert [row["sequence"] for row in rows(tmp_path / "file")] == [1]


def test_operations_submitted_together_are_one_or_none(
    group: Any, clock: Clock, tmp_path: Path
) -> None:
    record_nccl(group)
    clock.reached = dict.fromkeys(range(10), 1.0)
    tensors = [torch.ones(3), torch.ones(3)]
    world = dist.distributed_c10d._world
    with recording(tmp_path / "file"):
        with dist.distributed_c10d._coalescing_manager(group):
            for tensor in tensors:
                dist.all_reduce(tensor)
        world.pg_coalesce_state[group] = []  # as batch_isend_irecv does
        group.allreduce([tensors[0]]).wait()
        del world.pg_coalesce_state[group]
    assert [row["payload_bytes"] for row in rows(tmp_path / "file")] == [24]


def test_failed_and_aborted_operations_are_not_recorded(
    group: Any, clock: Clock, in_stream: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wait(*_: Any) -> None:
        raise RuntimeError("ncclRemoteError")

    monkeypatch.setattr(Work, "wait", wait)
    monkeypatch.setattr(ProcessGroup, "abort", lambda _group: None)
    record_nccl(group)
    clock.reached = dict.fromkeys(range(10), 1.0)
    tensor = torch.ones(3)
    with recording(tmp_path / "file"):
        with pytest.raises(RuntimeError, match="ncclRemoteError"):
            dist.broadcast(tensor, 0, async_op=True).wait()
        dist.all_reduce(tensor)
        group.abort()
    assert rows(tmp_path / "file") == []


def test_error_in_the_records_ends_them_and_nothing_else(
    group: Any, clock: Clock, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record_nccl(group)
    clock.reached = dict.fromkeys(range(10), 1.0)
    tensor = torch.ones(3)
    with recording(tmp_path / "file") as used:
        dist.all_reduce(tensor)
        used.flush()
        assert len(rows(tmp_path / "file")) == 1
        dist.all_reduce(tensor)
        clock.error = RuntimeError("CUDA error: an illegal memory access was encountered")
        used.flush()
        asked = clock.questions, clock.marks
        for _ in range(2):
            dist.all_reduce(tensor)
            work = dist.all_reduce(tensor, async_op=True)
            assert work.get_future().wait()[0] is not None
            used.flush()
        assert (clock.questions, clock.marks) == asked
    assert len(rows(tmp_path / "file")) == 1
    assert capfd.readouterr().err == (
        "paceline: operations of NCCL are not recorded: CUDA error: an illegal memory access was "
        "encountered\n"
    )


def test_gpu_whose_clock_is_not_known_leaves_out_rows_but_no_number(
    group: Any, clock: Clock, in_stream: None, tmp_path: Path
) -> None:
    record_nccl(group)
    clock.reached = dict.fromkeys(range(10), 1.0)
    with recording(tmp_path / "file"):
        for clock.is_known in (False, True):
            dist.all_reduce(torch.ones(3))
    assert [row["sequence"] for row in rows(tmp_path / "file")] == [1]


def test_no_tensor_is_kept_until_the_gpu_has_finished(
    group: Any, clock: Clock, replaced: Change, tmp_path: Path
) -> None:
    replaced("allreduce", done_work)
    record_nccl(group)
    tensor = torch.ones(3)
    kept = weakref.ref(tensor)
    with recording(tmp_path / "file"):
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        del work, tensor
        assert kept() is None
        assert not nccl_records._calls


def test_notes_name_no_operation_whose_end_they_would_not_see(
    group: Any, clock: Clock, tmp_path: Path
) -> None:
    record_nccl(group)
    notes = tmp_path / "operations"
    with recording(tmp_path / "file", notes):
        dist.all_reduce(torch.ones(3))
        assert last_operations(notes) == []


def test_without_a_recorder_the_gpu_is_asked_nothing(group: Any, clock: Clock) -> None:
    record_nccl(group)
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    assert (clock.marks, clock.questions) == (0, 0)


class Inheriting(ProcessGroup):  # type: ignore[misc]  # subclasses Any
    """A group in Python that leaves its operations to torch."""


class InheritingWork(Work):
    """A work in Python that leaves its wait to torch."""


def test_subclass_without_the_methods_still_calls_those_of_torch(group: Any, clock: Clock) -> None:
    record_nccl(group)
    inheriting = Inheriting(0, 1)
    set_default_backend(inheriting, ProcessGroup.BackendType.GLOO)
    backend = group._get_backend(CPU)
    register_backend(inheriting, ["cpu"], ProcessGroup.BackendType.GLOO, backend)
    summed = torch.ones(2)
    inheriting.allreduce([summed]).wait()
    with pytest.raises(RuntimeError, match=r"getFuture|not implemented|get_future"):
        InheritingWork().get_future()


def test_group_without_nccl_changes_nothing(
    group: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    before = ProcessGroup.allreduce, Work.wait, dist.Reducer
    record_nccl(group)
    record_nccl(None)
    record_nccl(dist.GroupMember.NON_GROUP_MEMBER)
    assert (ProcessGroup.allreduce, Work.wait, dist.Reducer) == before


def test_tensors_of_the_host_are_not_for_nccl(group: Any) -> None:
    assert nccl_records.gpu_of(group, [[torch.ones(1)]]) is None
    assert nccl_records.gpu_of(group, []) is None


def test_methods_are_replaced_once(group: Any, clock: Clock, in_stream: None) -> None:
    record_nccl(group)
    first = ProcessGroup.allreduce
    record_nccl(group)
    assert ProcessGroup.allreduce is first
