"""The group over barrier messages, with tasks that are threads and messages that do not wait."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from paceline.errors import EnvironmentLacks, RankFailed, TimedOut, UsageError
from paceline.transports import PeerLost
from paceline.transports.recorder import recording
from paceline.transports.spark_allgather import messages as spark_messages
from paceline.transports.spark_allgather.messages import Messages, calls_for, chunk_bytes
from paceline.transports.spark_allgather.transport import SparkProcessGroup

LIMIT_S = 10.0


class Stage:
    """allGather of a stage's tasks, as Spark gives it, without its second of waiting."""

    def __init__(self, tasks: int) -> None:
        self.texts: list[list[str]] = [[] for _ in range(tasks)]
        self._barrier = threading.Barrier(tasks, timeout=LIMIT_S)

    def of(self, rank: int):
        def all_gather(text: str) -> list[str]:
            self.texts[rank].append(text)
            call = len(self.texts[rank]) - 1
            self._barrier.wait()
            return [texts[call] for texts in self.texts]

        return all_gather


def on_each(tasks: int, body, stage: Stage | None = None, limit_s: float = LIMIT_S) -> list:
    """Return the results of `body(group, rank)` in `tasks` threads."""
    stage = stage or Stage(tasks)

    def run(rank: int):
        group = SparkProcessGroup(Messages(stage.of(rank), rank, tasks), rank, tasks, limit_s, "g")
        try:
            return body(group, rank)
        finally:
            group.abort()

    with ThreadPoolExecutor(tasks) as pool:
        return list(pool.map(run, range(tasks)))


@pytest.fixture
def small_chunks(monkeypatch):
    """48 bytes of each of three tasks in a call."""
    monkeypatch.setattr(spark_messages, "TEXT_BYTES", 48 * 4)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator).mul(10).to(dtype)


def reduced(tasks: int, count: int, dtype: torch.dtype, op=dist.ReduceOp.SUM) -> list:
    def body(group, rank):
        tensor = values(rank, count, dtype)
        group.allreduce([tensor], SimpleNamespace(reduceOp=op)).wait()
        return tensor

    return on_each(tasks, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 12, 13, 100])
def test_sum_is_in_the_order_of_ranks_on_every_rank(small_chunks, dtype, count):
    expected = values(0, count, dtype) + values(1, count, dtype) + values(2, count, dtype)
    for found in reduced(3, count, dtype):
        assert torch.equal(found, expected)


def test_other_reductions_agree_with_numpy():
    parts = [values(rank, 50, torch.float64).numpy() for rank in range(2)]
    for op, reference in (
        (dist.ReduceOp.AVG, np.mean), (dist.ReduceOp.MIN, np.min),
        (dist.ReduceOp.MAX, np.max), (dist.ReduceOp.PRODUCT, np.prod),
    ):  # fmt: skip
        for found in reduced(2, 50, torch.float64, op):
            np.testing.assert_allclose(found.numpy(), reference(parts, axis=0), rtol=1e-15)


def test_reduction_that_text_cannot_carry_is_refused():
    def body(group, _rank):
        with pytest.raises(UsageError, match="expected sum, average"):
            group.allreduce([torch.ones(1)], SimpleNamespace(reduceOp=dist.ReduceOp.BXOR))

    on_each(1, body)


def test_strided_tensor_is_summed_in_place():
    def body(group, rank):
        whole = torch.full((4, 6), float(rank + 1))
        group.allreduce([whole[:, ::2]]).wait()
        return whole

    for found in on_each(2, body):
        assert found[:, ::2].eq(3).all()
        assert not found[:, 1::2].eq(3).any()


def test_broadcast_gives_the_roots_values(small_chunks):
    def body(group, rank):
        tensors = [values(rank, 40, torch.float32).view(5, 8).t(), values(rank, 3, torch.int64)]
        group.broadcast(tensors, SimpleNamespace(rootRank=1)).wait()
        return tensors

    for matrix, numbers in on_each(3, body):
        assert torch.equal(matrix, values(1, 40, torch.float32).view(5, 8).t())
        assert torch.equal(numbers, values(1, 3, torch.int64))


def test_allgather_takes_shapes_that_differ(small_chunks):
    def body(group, rank):
        outputs = [torch.zeros(20 * (r + 1)) for r in range(3)]
        group.allgather([outputs], [values(rank, 20 * (rank + 1), torch.float32)]).wait()
        return outputs

    for outputs in on_each(3, body):
        for rank, found in enumerate(outputs):
            assert torch.equal(found, values(rank, 20 * (rank + 1), torch.float32))


def test_allgather_into_one_tensor_is_in_the_order_of_ranks():
    def body(group, rank):
        output = torch.zeros(6, 2)
        group.all_gather_single(output, torch.full((3, 2), float(rank))).wait()
        return output

    for output in on_each(2, body):
        assert output[:, 0].tolist() == [0, 0, 0, 1, 1, 1]


def test_operations_are_recorded_with_what_was_sent(tmp_path):
    file = tmp_path / "communication.jsonl"
    with recording(file):
        stage = Stage(1)
        on_each(1, lambda group, _rank: group.allreduce([torch.ones(30)]).wait(), stage)
    import json

    row = json.loads(file.read_text())
    assert (row["operation"], row["payload_bytes"], row["ranks"]) == ("allreduce", 120, 1)
    assert row["sent_bytes"] == len(stage.texts[0][0]) > 160  # base64: 4 characters for 3 bytes
    assert row["sent_messages"] == 1


@pytest.mark.parametrize("tasks", [1, 2, 3, 7, 100])
def test_messages_of_all_tasks_stay_far_below_sparks_bound(tasks):
    assert chunk_bytes(tasks) % 48 == 0
    assert tasks * chunk_bytes(tasks) * 4 / 3 <= 128 * 2**20 / 4


def test_calls_are_counted_from_the_size():
    chunk = chunk_bytes(2)
    assert [calls_for(n, 2) for n in (0, 1, chunk, chunk + 1, 3 * chunk)] == [1, 1, 1, 2, 3]


def test_ranks_at_different_operations_are_told_both(small_chunks):
    def body(group, rank):
        work = group.barrier() if rank == 0 else group.allreduce([torch.ones(4)])
        with pytest.raises(RankFailed, match="make different calls") as caught:
            work.wait()
        return str(caught.value)

    messages = on_each(2, body)
    assert "rank 0 is at 'barrier 1.0'" in messages[0]
    assert "'barrier 1.0'" in messages[1]


def test_end_of_sparks_messages_is_a_lost_peer():
    def broken(_text: str) -> list[str]:
        raise EOFError

    group = SparkProcessGroup(Messages(broken, 1, 2), 1, 2, LIMIT_S, "g")
    with pytest.raises(PeerLost, match="rank 1: Spark ended the barrier tasks' messages"):
        group.barrier().wait()
    with pytest.raises(PeerLost):  # and so does everything after it
        group.barrier().wait()
    assert isinstance(group.failure, PeerLost)
    group.abort()


def test_call_that_does_not_return_is_a_time_out():
    release = threading.Event()

    def stuck(text: str) -> list[str]:
        release.wait(LIMIT_S)
        return [text]

    group = SparkProcessGroup(Messages(stuck, 0, 1), 0, 1, 0.2, "g")
    try:
        with pytest.raises(TimedOut, match=r"Spark barrier did not end within 0\.2 s"):
            group.barrier().wait()
    finally:
        release.set()
        group.abort()


def test_process_that_is_no_barrier_task_is_told_how_to_become_one(monkeypatch):
    monkeypatch.setattr(spark_messages, "_offered", None)
    with pytest.raises(EnvironmentLacks, match=r"spark-jobs/train\.py"):
        spark_messages.offered()
    spark_messages.offer(list)
    assert spark_messages.offered() is list


def test_group_whose_call_spark_holds_is_given_up_at_once_after_its_limit():
    released = threading.Event()

    def held(_text: str) -> list[str]:
        released.wait(LIMIT_S / 2)
        return []

    group = SparkProcessGroup(Messages(held, 0, 2), 0, 2, limit_s=0.1, name="held")
    try:
        with pytest.raises(TimedOut, match=r"within 0\.1 s"):
            group.barrier().wait()
        group.shutdown()
        assert "Spark-held" in {thread.name for thread in threading.enumerate()}, "waited for it"
    finally:
        released.set()
