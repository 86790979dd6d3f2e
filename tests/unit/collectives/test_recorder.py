"""Operations are recorded as they end, in the order in which their group came to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.collectives import gloo_group as process_group
from paceline.collectives import recorder
from paceline.collectives.recorder import begin_operation, is_recording, payload_bytes
from paceline.train.rank.spans import recording


def rows(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_without_a_recorder_nothing_happens(tmp_path: Path) -> None:
    assert not is_recording()
    begin_operation("0", 2, "allreduce", 8).end()
    assert list(tmp_path.iterdir()) == []


def test_operations_are_numbered_by_group_and_written_on_flush(tmp_path: Path) -> None:
    file = tmp_path / "communication.jsonl"
    with recording(file) as used:
        assert is_recording()
        first, other = (begin_operation(group, 2, "allreduce", 8) for group in ("0", "1"))
        second = begin_operation("0", 2, "broadcast", 4)
        second.start()
        second.end()
        assert rows(file) == []
        used.flush()
        assert [row["operation"] for row in rows(file)] == ["broadcast"]
        first.end()
        other.end()
    assert not is_recording()
    found = {(row["group"], row["sequence"]): row for row in rows(file)}
    assert set(found) == {("0", 0), ("0", 1), ("1", 0)}
    assert found["0", 0]["started_unix_s"] is None
    assert found["0", 1]["started_unix_s"] is not None


def test_operation_that_never_ends_is_not_recorded(tmp_path: Path) -> None:
    file = tmp_path / "communication.jsonl"
    with recording(file):
        begin_operation("0", 2, "allreduce", 8)
    assert rows(file) == []


def test_arrival_may_be_given(tmp_path: Path) -> None:
    file = tmp_path / "communication.jsonl"
    with recording(file):
        begin_operation("threads", 1, recorder.SHARED_REDUCE, 8, arrived_unix_s=12.5).end()
    (row,) = rows(file)
    assert row["arrived_unix_s"] == 12.5


def test_payload_is_of_all_tensors() -> None:
    tensors = [torch.zeros(3), [torch.zeros(2, dtype=torch.float64), torch.zeros(0)]]
    assert payload_bytes(tensors) == 12 + 16


@pytest.fixture
def group():
    dist.init_process_group(process_group.BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_group_of_gloo_records_by_itself(group: object, tmp_path: Path) -> None:
    file = tmp_path / "communication.jsonl"
    tensor = torch.ones(5)
    dist.all_reduce(tensor)  # before anybody records
    with recording(file):
        dist.all_reduce(tensor)
        gathered = [torch.empty(5)]
        dist.all_gather(gathered, tensor)
        dist.barrier()
    assert torch.equal(gathered[0], torch.ones(5))
    assert [(r["operation"], r["payload_bytes"], r["ranks"]) for r in rows(file)] == [
        ("allreduce", 20, 1), ("allgather", 20, 1), ("barrier", 0, 1),
    ]  # fmt: skip


def test_reduce_scatter_of_gloo_is_recorded_once_it_is_waited_for(
    group: object, tmp_path: Path
) -> None:
    file, own = tmp_path / "communication.jsonl", torch.empty(5)
    older_name = "reduce_scatter_tensor"  # before torch 2.13, which warns about it
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, older_name)
    with recording(file) as used:
        work = reduce_scatter(own, torch.ones(5), async_op=True)
        assert used.ended() == []
        work.wait()
        work.wait()
    assert torch.equal(own, torch.ones(5))
    assert [(r["operation"], r["payload_bytes"]) for r in rows(file)] == [("reduce_scatter", 20)]


def test_wrong_use_of_a_group_is_an_error_as_ever_and_no_row(group: object, tmp_path: Path) -> None:
    file = tmp_path / "communication.jsonl"
    with recording(file), pytest.raises((RuntimeError, ValueError)):
        dist.all_gather([torch.empty(4)], torch.ones(5))
    assert rows(file) == []


def test_every_operation_of_torchs_groups_goes_to_the_inner_group() -> None:
    """A method that is not passed on would hold the GIL in C++ and could wait without limit."""
    carries_nothing = {
        "_backend_id", "_device_types", "_enable_collectives_timing", "_get_backend",
        "_get_backend_name", "_has_hooks", "_id", "_pybind11_conduit_v1_", "_register_backend",
        "_register_on_completion_hook", "_set_default_backend", "_set_group_desc",
        "_set_group_name", "_set_sequence_number_for_group", "bound_device_id", "boxed",
        "get_backend", "group_desc", "group_name", "merge_remote_group", "name", "rank", "size",
        "split_group", "supports_reconfigure", "supports_window", "unbox",
        "use_pg_for_symm_mem_rendezvous", "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC",
        "UNDEFINED", "XCCL",
    }  # fmt: skip
    theirs = {name for name in dir(dist.ProcessGroup) if not name.startswith("__")}
    assert theirs - carries_nothing <= set(vars(process_group.RecordedProcessGroup))
