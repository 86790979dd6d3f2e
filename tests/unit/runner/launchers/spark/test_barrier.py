"""Barrier tasks become ranks, and a failed stage is read back, without Spark."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.rows import failure, write_status

from paceline.base.errors import EnvironmentLacks
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.rows import TERMINATED
from paceline.runner.job.context import RemotePlace
from paceline.runner.job.rank_status import RankEnd
from paceline.runner.job.run_directory import prepare
from paceline.runner.launchers.spark import barrier
from paceline.runner.launchers.spark.barrier import (
    BarrierStage,
    BarrierTaskFailed,
    failed_stage,
    run_barrier_rank,
    task_failed,
)

LOST_PEER = RankEnd(rank=0, error=failure("PeerLost: x"), secondary=True)


@pytest.fixture
def prepared(make_job):
    """Make a job whose trial is in the run directory, as the driver leaves it."""

    def make(**keys):
        job = make_job(launcher="spark", **keys)
        prepare(job)
        return job

    return make


@pytest.fixture
def job(prepared):
    return prepared()


def stage(all_gather, *, in_one_executor: bool = False) -> BarrierStage:
    return BarrierStage(all_gather=all_gather, in_one_executor=in_one_executor, token="secret")


def test_ranks_on_more_nodes_than_recorded_are_refused(prepared):
    job = prepared(interface="lo")
    all_gather = lambda mine: [mine, mine.replace('"host": "', '"host": "x')]  # noqa: E731
    with pytest.raises(BarrierTaskFailed, match=r"EnvironmentLacks.*ranks are on 2 hosts"):
        run_barrier_rank(job, 0, stage(all_gather))
    with pytest.raises(EnvironmentLacks, match=r"on 1 node\(s\), Spark placed them on 2 \(b, a\)"):
        barrier.check_placement(job, ["b", "a"])


def test_missing_interface_is_an_error_of_the_rank_and_not_a_killed_worker(job, monkeypatch):
    def listen_on(_interface):
        raise EnvironmentLacks("interface 'ib0' on host h: expected one with an IPv4 address")

    monkeypatch.setattr(barrier, "listen_on", listen_on)
    with pytest.raises(BarrierTaskFailed) as caught:
        run_barrier_rank(job, 1, stage(pytest.fail))
    end = failed_stage(job, f"BarrierTaskFailed: {caught.value}\n")
    assert (end.rank, end.exit_code) == (1, 3)
    assert "interface 'ib0'" in str(end.error)


@pytest.mark.parametrize(("waited_s", "raised"), [(60.0, BarrierTaskFailed), (1.0, EOFError)])
def test_barrier_to_which_not_all_tasks_came_is_named(prepared, monkeypatch, waited_s, raised):
    """PySpark reports an EOFError; a quick one means that another task has failed."""
    now_s = 100.0
    monkeypatch.setattr(barrier, "time", SimpleNamespace(monotonic=lambda: now_s))

    def all_gather(_message):
        nonlocal now_s
        now_s += waited_s
        raise EOFError

    job = prepared(rendezvous_s=60.0)
    with pytest.raises(raised) as caught:
        run_barrier_rank(job, 1, stage(all_gather))
    if raised is BarrierTaskFailed:
        end = failed_stage(job, f"BarrierTaskFailed: {caught.value}\n")
        assert (end.rank, end.exit_code) == (1, 6)
        assert "expected 2 tasks at Spark's barrier within 60 s" in str(end.error)


class Gather:
    """allGather among threads, counting its calls."""

    def __init__(self, ranks: int) -> None:
        self.calls = 0
        self._messages: list[str] = [""] * ranks
        self._barrier = threading.Barrier(ranks, timeout=10)

    def of(self, rank: int):
        def all_gather(message: str) -> list[str]:
            self.calls += 1
            self._messages[rank] = message
            self._barrier.wait()
            return list(self._messages)

        return all_gather


def in_threads(of_rank):
    """Run both tasks at once."""
    tasks = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(2)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(timeout=20)


@pytest.mark.parametrize("in_one_executor", [False, True])
def test_tasks_meet_once_at_rank_0s_socket(job, monkeypatch, in_one_executor):
    contexts = {}

    def run(_job, context, watched):
        contexts[context.rank] = (context, watched)
        return RankEnd(rank=context.rank)

    monkeypatch.setattr(barrier, "run_rank", run)
    gather = Gather(2)
    in_threads(
        lambda rank: run_barrier_rank(
            job, rank, stage(gather.of(rank), in_one_executor=in_one_executor)
        )
    )
    (first, watched), (second, _) = contexts[0], contexts[1]
    assert gather.calls == (0 if in_one_executor else 2)  # one a task
    assert first.store.listen_fd is not None
    assert second.store.listen_fd is None
    assert (first.store.host, first.store.port) == (second.store.host, second.store.port)
    assert len(watched) == 1
    barrier.close_listener(first.store)


def test_tasks_of_a_node_without_the_run_directory_use_one_folder(job, monkeypatch):
    """They meet by allGather, because they cannot leave an address in the run directory."""
    place = RemotePlace(url="s3://bucket/run", attempt="a")
    far = dataclasses.replace(job, run=None, place=place, files=TrialFiles(Path("/nowhere/x/y/z")))
    used = {}

    def in_folder(job, folder, host, *, ranks, is_first):
        used[is_first] = (folder, ranks)
        return job, None

    monkeypatch.setattr(barrier, "in_folder", in_folder)
    monkeypatch.setattr(
        barrier, "run_rank", lambda _job, context, _pids: RankEnd(rank=context.rank)
    )
    gather = Gather(2)
    in_threads(
        lambda rank: run_barrier_rank(far, rank, stage(gather.of(rank), in_one_executor=True))
    )
    assert gather.calls == 2
    assert used[True] == used[False]
    folder, ranks = used[True]
    assert ranks == 2
    assert not Path(folder).exists()  # the first task makes it


def test_mpi_ranks_without_the_run_directory_are_refused(prepared):
    job = prepared(transport="mpi")
    job.files.trial.unlink()
    job = dataclasses.replace(job, place=RemotePlace(url="s3://bucket/run", attempt="a"))
    with pytest.raises(BarrierTaskFailed, match="with transport gloo a remote place is enough"):
        run_barrier_rank(job, 0, stage(pytest.fail, in_one_executor=True))


def test_secret_of_a_stage_is_not_in_its_files(job, monkeypatch):
    monkeypatch.setattr(barrier, "run_rank", lambda *_args: RankEnd(rank=0))
    of_stage = BarrierStage(all_gather=pytest.fail, in_one_executor=True, token="0f1e2d3c")
    run_barrier_rank(job, 0, of_stage)
    assert "0f1e2d3c" not in (job.files.root / "rendezvous.json").read_text()


@pytest.mark.parametrize("is_shared", [True, False])
def test_end_of_a_failed_task_comes_to_the_driver(is_shared, job, monkeypatch):
    """In a record; through Spark from a node that does not see the run directory."""
    end = RankEnd(rank=0, error=failure('DataError: a "quoted"\nphoto'))
    monkeypatch.setattr(barrier, "run_rank", lambda *_args: end)
    gather = lambda message: [message, message]  # noqa: E731
    with pytest.raises(BarrierTaskFailed) as caught:
        run_barrier_rank(job, 0, stage(gather))
    wrapped = (
        f"Py4JJavaError\n  File x\npaceline.job.barrier.BarrierTaskFailed: {caught.value}\n\tat"
    )
    if not is_shared:
        job.files.reported.unlink()
    assert failed_stage(job, "no reason" if is_shared else wrapped) == end


def test_rank_that_missed_its_peer_does_not_hide_the_lost_one(job):
    message = (
        f"BarrierTaskFailed: {task_failed(job, LOST_PEER)}\n"
        "because barrier task ResultTask(0, 1) finished unsuccessfully"
    )
    end = failed_stage(job, message)
    assert (end.rank, end.exit_code) == (1, 5)
    assert "killed or crashed" in str(end.error)


def test_reason_of_a_lost_executor_is_reported(job):
    message = (
        "because barrier task ResultTask(0, 1) finished unsuccessfully.\n"
        "ExecutorLostFailure (executor 2 exited caused by one of the running tasks) Reason: "
        "Container killed by YARN for exceeding physical memory limits. 578.1 MB of 576 MB used.\n"
    )
    end = failed_stage(job, message)
    assert end.rank == 1
    assert str(end.error).endswith(
        "crashed; Spark lost the executor: " + message.split("Reason: ")[1][:-1]
    )


def test_reason_of_a_failed_call_is_reported(job):
    message = (
        "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n"
        ": org.apache.spark.SparkException: Job 0 cancelled because SparkContext shut down\n\tat"
    )
    end = failed_stage(job, message)
    assert str(end.error) == f"RankFailed: {message.splitlines()[1][2:]}"


def test_lost_rank_is_the_one_that_wrote_no_end(job):
    for rank, state in ((0, "failed"), (1, "running")):
        write_status(job.files, rank, state, secondary=True)
    end = failed_stage(job, f"BarrierTaskFailed: {task_failed(job, LOST_PEER)}\n")
    assert (end.rank, end.exit_code) == (1, 5)
    assert "killed or crashed" in str(end.error)


def test_lost_task_is_named_although_its_rank_could_still_write_that_it_was_ended(make_job):
    job = make_job(transport="mpi", launcher="spark")
    for rank in (0, 1):
        write_status(job.files, rank, "failed", TERMINATED, secondary=True)
    end = failed_stage(job, "because barrier task ResultTask(0, 1) finished unsuccessfully")
    assert (end.rank, str(end.error)) == (
        1, "RankFailed: the Python of its barrier task was killed or crashed",
    )  # fmt: skip


def test_reason_of_a_lost_executor_that_comes_after_the_peers_message_is_reported(job):
    write_status(job.files, 0, "failed", "PeerLost: x", secondary=True)
    write_status(job.files, 1, "failed", TERMINATED, secondary=True)
    message = "because barrier task ResultTask(0, 0) finished unsuccessfully"
    end = failed_stage(job, message, lambda reason: f"{reason}: Container killed by YARN")
    assert end.rank == 1
    assert str(end.error).endswith("killed or crashed; None: Container killed by YARN")


def test_what_a_rank_wrote_itself_outweighs_sparks_words(job):
    write_status(job.files, 1, "failed", "DataError: bad")
    end = failed_stage(job, "because barrier task ResultTask(0, 0) finished unsuccessfully")
    assert (end.rank, end.exit_code, str(end.error)) == (1, 4, "DataError: bad")


def test_stage_that_fails_for_sparks_own_reasons_says_them(job):
    end = failed_stage(job, "\n  An error: out of disk\nmore\n")
    assert (end.exit_code, str(end.error)) == (5, "RankFailed: An error: out of disk")
