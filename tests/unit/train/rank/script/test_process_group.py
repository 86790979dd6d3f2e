"""`init_process_group` of a script is answered by Paceline, also for a single rank."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from tests.support.trials import rank_context
from torch.distributed import device_mesh

from paceline.base.errors import UsageError
from paceline.collectives.gloo_group import BACKEND
from paceline.collectives.recorder import is_awaiting
from paceline.train.rank.script import process_group
from paceline.train.rank.script.process_group import (
    ProcessGroups,
    other_library,
    recorded_groups,
)


class _Trial:
    device = "cpu"

    class limits:  # noqa: N801
        collective_s = 7.0


class _Peers:
    """Opens a group as a transport does: by torch's function."""

    opened = 0

    def open_transport(self):
        self.opened += 1
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def groups_of(ranks, peers=None):
    return ProcessGroups(_Trial(), rank_context(0, ranks), peers or _Peers())


@pytest.fixture(autouse=True)
def _closed():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_collectives_are_marked_unless_the_script_continues_meanwhile(monkeypatch):
    marks = []

    def all_reduce(tensor, op=None, group=None, async_op=False):
        marks.append(is_awaiting())

    for module in (dist, dist.distributed_c10d):
        monkeypatch.setattr(module, "all_reduce", all_reduce)
    with groups_of(1).answering():
        for call in ((), (None, None, True), (None, None, False)):
            dist.all_reduce(torch.ones(1), *call)
        dist.all_reduce(torch.ones(1), async_op=True)
    assert marks == [True, False, True, False]
    assert dist.all_reduce is all_reduce


def test_a_single_rank_gets_a_group_of_its_own_whatever_it_asks_for():
    groups = groups_of(1)
    with groups.answering():
        dist.init_process_group("nccl", init_method="tcp://192.0.2.1:1", timeout=timedelta(days=1))
        assert groups.opened
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        other = dist.new_group([0], backend="nccl", timeout=timedelta(days=1))
        dist.all_reduce(tensor, group=other)
        dist.destroy_process_group()
    assert tensor.tolist() == [1.0, 1.0]


def test_several_ranks_get_the_group_of_the_transport():
    peers = _Peers()
    groups = groups_of(2, peers)
    with groups.answering():
        dist.init_process_group("gloo", rank=0, world_size=2)
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")
    assert (peers.opened, groups.opened) == (1, True)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 4), (1, 2)])
def test_another_place_than_the_launchers_is_refused(rank, ranks):
    with groups_of(2).answering(), pytest.raises(UsageError, match="started it as rank 0 of 2"):
        dist.init_process_group("gloo", rank=rank, world_size=ranks)


def test_functions_are_replaced_where_torch_uses_them_and_restored():
    before = dist.init_process_group
    with groups_of(1).answering():
        assert dist.init_process_group is not before
        assert device_mesh.init_process_group is dist.init_process_group
    assert dist.init_process_group is before
    assert device_mesh.init_process_group is before


@pytest.mark.parametrize(("name", "own"), [("gloo", BACKEND), ("nccl", None), (None, None)])
def test_a_further_group_is_the_transports_unless_gloo_is_named(name, own, monkeypatch):
    made = []
    monkeypatch.setattr(dist, "new_group", lambda *given: made.append(given))
    groups = groups_of(2)
    groups._answer_new_group([0], timedelta(days=9), name)
    assert made == [([0], timedelta(seconds=7), own, None)]


def test_the_destruction_of_the_default_group_is_announced():
    groups = groups_of(1)
    announced: list[bool] = []
    groups.before_destroy = lambda: announced.append(dist.is_initialized())
    with groups.answering():
        dist.init_process_group()
        dist.destroy_process_group(dist.new_group([0]))
        dist.destroy_process_group()
    assert announced == [True]


@pytest.mark.parametrize("name", ["gloo", None])
def test_a_group_of_gloo_is_wrapped_and_stays_the_scripts_own(name):
    with recorded_groups():
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
        other = dist.new_group([0], backend="gloo")
    assert dist.get_backend() == dist.get_backend(other) == BACKEND


def test_groups_of_a_script_are_looked_at_for_nccl(monkeypatch):
    seen = []
    monkeypatch.setattr(process_group, "record_nccl", seen.append)
    with recorded_groups():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        made = dist.new_group([0])
    assert seen == [dist.group.WORLD, made]


def test_a_library_that_exchanges_past_torch_is_known_by_a_module_that_has_it(monkeypatch):
    library, script = ModuleType("horovod.torch"), ModuleType("script")
    script.hvd = library
    monkeypatch.setitem(sys.modules, "horovod.torch", library)
    assert other_library() is None
    monkeypatch.setitem(sys.modules, "script", script)
    assert other_library() == "horovod"


def test_a_script_sees_the_name_of_a_back_end_that_it_knows():
    with recorded_groups():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.get_backend() == dist.get_backend(dist.new_group()) == "gloo"
    assert dist.get_backend() == BACKEND
    dist.destroy_process_group()
    peers = _Peers()
    peers.open_transport = lambda: dist.init_process_group(
        BACKEND, store=dist.HashStore(), rank=0, world_size=1
    )
    with groups_of(2, peers).answering():
        dist.init_process_group("nccl")
        assert dist.distributed_c10d.get_backend() == "gloo"
