"""A script that starts processes: ranks run here, other children may not train."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys

import pytest
import torch
import torch.multiprocessing as mp
from tests.support.trials import rank_context

from paceline.base.errors import UsageError
from paceline.plan.trials.trial import Script
from paceline.train.rank.script import spawned
from paceline.train.rank.script.spawned import SpawnedProcesses

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _signal():
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def processes(rank=0, ranks=1, path=__file__):
    script = Script(path=path, arguments=(), directory="/", samples_per_step=None)
    return SpawnedProcesses(script, rank_context(rank, ranks))


def trains(numbers):
    numbers.put(os.environ.get("TORCHELASTIC_USE_AGENT_STORE"))
    torch.ones(1, requires_grad=True).sum().backward()


def joins():
    torch.distributed.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:1", rank=1, world_size=2
    )


def waits(child, numbers):
    child.start()
    assert numbers.get(timeout=LIMIT_S) is None
    numbers.get(timeout=LIMIT_S)  # never comes


def works(numbers):
    numbers.put(7)


@pytest.mark.parametrize("join", [True, False])
def test_spawned_ranks_run_here_as_this_rank(join):
    seen = []
    with processes(1, 2).answering():
        context = mp.spawn(lambda *given: seen.append(given), args=("a",), nprocs=2, join=join)
        assert join or context.join()
        mp.start_processes(lambda *given: seen.append(given), nprocs=2)
    assert seen == [(1, "a"), (1,)]
    assert mp.spawn is sys.modules["torch.multiprocessing.spawn"].spawn


def test_ranks_that_are_spawned_once_more_open_a_group_of_their_own():
    seen = []

    def opens(_rank):
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        seen.append(torch.distributed.group.WORLD)

    with processes(0, 1).answering():
        for _ in range(2):
            mp.spawn(opens, nprocs=1)
    torch.distributed.destroy_process_group()
    assert seen[0] is not seen[1]


def test_another_number_of_ranks_is_refused_at_the_call():
    with processes(0, 1).answering(), pytest.raises(UsageError) as caught:
        mp.spawn(works, nprocs=2)
    assert "it starts 2 ranks itself (torch.multiprocessing.spawn), expected 1" in str(caught.value)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_trains_ends_the_wait_of_the_script(method, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    context = multiprocessing.get_context(method)
    numbers = context.Queue()
    with processes().answering():
        child = context.Process(target=trains, args=(numbers,))
        with pytest.raises(UsageError, match="it trains in child processes of its own"):
            waits(child, numbers)
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"


ran = []


def one_of_two(rank, size=2):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    ran.append(rank)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("waits_for", ["all", "none"])
def test_a_process_for_each_rank_runs_here_as_that_of_this_rank(rank, waits_for, monkeypatch):
    ran.clear()
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    children = processes(rank, 2)
    with children.answering():
        context = multiprocessing.get_context("fork")
        started = [context.Process(target=one_of_two, args=(each,)) for each in range(2)]
        for each in started:
            each.start()
        for each in started if waits_for == "all" else []:
            each.join(LIMIT_S)
        children.finish()
    assert ran == [rank]
    assert [each.exitcode for each in started] == [0, 0]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_joins_a_group_alone_is_refused(monkeypatch):
    monkeypatch.setattr(spawned, "_OTHERS_S", 0.5)
    children, context = processes(0, 2), multiprocessing.get_context("fork")
    with children.answering():
        child = context.Process(target=joins)
        child.start()
        with pytest.raises(UsageError, match="it trains in child processes"):
            context.Queue().get(timeout=LIMIT_S)  # never comes
    with pytest.raises(UsageError, match="LOCAL_WORLD_SIZE"):
        children.check(is_over=True)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("path", [__file__, "/elsewhere/train.py"])
def test_other_children_work(path):
    children, context = processes(path=path), multiprocessing.get_context("fork")
    numbers = context.Queue()
    with children.answering():
        child = context.Process(target=works, args=(numbers,))
        child.start()
        assert numbers.get(timeout=LIMIT_S) == 7
        child.join(LIMIT_S)
    assert child.exitcode == 0
    children.check()
    assert len(children._started) == (path == __file__)
    assert spawned._TRAINS != 0
