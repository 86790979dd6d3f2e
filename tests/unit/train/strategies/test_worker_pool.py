from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading

import pytest
import torch

from paceline.base.errors import EnvironmentLacks, RankFailed, TimedOut
from paceline.train.strategies.worker_pool import Stopped, WorkerPool

ALL = sorted(os.sched_getaffinity(0))


@pytest.fixture
def make_pool():
    """Starts pools of threads on all cores; they are ended with the test."""
    pools = []

    def make(workers=2, *, threads=1, wait_s=30.0, task_s=30.0, cores=ALL):
        pools.append(WorkerPool([cores] * workers, threads, 4, wait_s, task_s))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def alive():
    return [t.name for t in threading.enumerate() if t.name.startswith("paceline-replica")]


def test_results_come_in_the_order_of_the_workers(make_pool):
    pool = make_pool(3)
    assert pool.run(lambda worker: worker**2) == [0, 1, 4]
    assert pool.run(lambda worker: threading.current_thread().name) == [
        "paceline-replica-0", "paceline-replica-1", "paceline-replica-2",
    ]  # fmt: skip


def test_no_thread_passes_a_meeting_before_all_are_there(make_pool):
    pool = make_pool(3)
    here = [0, 0, 0]

    def task(worker):
        seen = []
        for turn in range(1, 20):
            here[worker] = turn
            pool.barrier(worker)
            seen.append(min(here) >= turn)
        return all(seen)

    assert pool.run(task) == [True, True, True]


def test_each_thread_has_its_threads_and_cores_and_says_so(make_pool):
    main_threads, main_cores = torch.get_num_threads(), os.sched_getaffinity(0)
    pool = make_pool(2, threads=2, cores=ALL[:1])
    ids = pool.run(lambda _: threading.get_native_id())
    assert [w.worker for w in pool.workers] == [0, 1]
    assert [w.thread_id for w in pool.workers] == ids
    assert [w.affinity for w in pool.workers] == [ALL[:1]] * 2
    assert [w.intraop_threads for w in pool.workers] == [2, 2]
    assert pool.run(lambda _: torch.get_num_threads()) == [2, 2]
    assert torch.get_num_threads() == main_threads
    assert os.sched_getaffinity(0) == main_cores


def test_cores_that_are_not_there_are_told():
    with pytest.raises(EnvironmentLacks, match=r"replica 0: expected to run on cores \[1000000\]"):
        WorkerPool([[1_000_000]], 1, 0, 5.0, 5.0)
    assert alive() == []


def test_error_of_a_thread_is_raised_while_another_waits_to_meet_it(make_pool, capsys):
    pool = make_pool(3)
    # Without this meeting the pool may stop before the third thread has begun its task.
    all_have_begun = threading.Barrier(3, timeout=30)
    ended_with = []

    def task(worker):
        all_have_begun.wait()
        if worker == 1:
            raise ValueError("no such thing")
        try:
            pool.barrier(worker)
        except Exception as error:
            ended_with.append(type(error))
            raise

    with pytest.raises(RankFailed, match="rank 4: replica 1 of 3 failed: ValueError: no such"):
        pool.run(task)
    pool.close()
    assert ended_with == [Stopped, Stopped]  # and not TimedOut, after wait_s
    assert "in task" in capsys.readouterr().err  # the trace, for the rank's log


def test_error_of_a_thread_does_not_wait_for_what_another_is_at(make_pool):
    pool = make_pool(2)
    may_end, ended = threading.Event(), threading.Event()

    def task(worker):
        if worker == 1:
            raise ValueError("no such thing")
        may_end.wait(30)
        ended.set()

    with pytest.raises(RankFailed, match="replica 1"):
        pool.run(task)
    assert not ended.is_set()
    may_end.set()


def test_late_thread_is_named(make_pool):
    pool = make_pool(3, wait_s=0.2)
    late = threading.Event()

    def task(worker):
        if worker == 2:
            late.wait(30)
        pool.barrier(worker)

    with pytest.raises(TimedOut, match=r"waited more than 0\.2 s for replica 2\."):
        pool.run(task)
    late.set()


def test_task_without_end_is_told(make_pool):
    pool = make_pool(2, task_s=0.2)
    busy = threading.Event()
    with pytest.raises(TimedOut, match=r"did not finish within 0\.2 s"):
        pool.run(lambda _: busy.wait(30))
    busy.set()


def test_closing_ends_threads_that_look(make_pool):
    pool = make_pool(2)

    def task(worker):
        while worker == 0:
            pool.raise_if_stopped()
        raise ValueError

    with pytest.raises(RankFailed):
        pool.run(task)
    pool.close()
    pool.close()
    assert alive() == []


def test_check_raises_in_a_crew_that_is_closed(make_pool):
    pool = make_pool(1)
    pool.raise_if_stopped("any", "hook's", "arguments")
    pool.close()
    with pytest.raises(Stopped):
        pool.raise_if_stopped()


ALLOCATING = """
import ctypes, os, sys
from paceline.train.training.resources import keep_freed_memory, set_thread_variables
set_thread_variables(1)
if sys.argv[2] == "keep":
    assert keep_freed_memory()
import torch
from paceline.train.strategies.worker_pool import WorkerPool
pool = WorkerPool([os.sched_getaffinity(0)] * 2, 1, 0, 30.0, 30.0)
pool.run(lambda worker: bool(torch.ones(5_000_000).any()))
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
pool.close()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_threads_allocate_where_freed_memory_is_kept(tmp_path):
    """Threads allocate in glibc's first arena, because it returns memory of other arenas to the
    kernel."""
    arenas = {}
    for mode in ("keep", "usual"):
        report = tmp_path / mode
        command = [sys.executable, "-c", ALLOCATING, report, mode]
        subprocess.run(command, timeout=60, check=True)
        arenas[mode] = report.read_text().count("<heap nr=")
    assert arenas["usual"] > 1
    assert arenas["keep"] == 1
