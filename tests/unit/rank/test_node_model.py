"""Models of the ranks of a node; here the ranks are threads."""

from __future__ import annotations

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tests.unit.node.rank_program import FileShare
from tests.unit.strategies import own_models
from tests.unit.strategies.own_training import trial_of
from tests.unit.strategies.pipeline import node as strategy_node
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.rank.node_model import NodeModel
from paceline.training.task import Task, TaskSettings
from paceline.workloads.build import build_model, built_without_values

LIMIT_S = 30.0
WIDTH = 512
WEIGHT_BYTES = 4 * WIDTH * WIDTH


@pytest.fixture(autouse=True)
def _one_after_another(monkeypatch):
    """A rank looks at all tensors and generators of its process, which others must not change."""
    lock, view = threading.Lock(), NodeModel._view

    def locked(made):
        with lock:
            return view(made)

    monkeypatch.setattr(NodeModel, "_view", locked)


class Everything(nn.Module):
    """Tied, frozen and noted parameters, and buffers of several kinds."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight
        self.frozen = nn.Parameter(torch.randn(3, WIDTH).half(), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.scale.note = "no decay"
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.used = [self.scale]  # a reference that torch does not know
        self.register_buffer("features", torch.randn(5, 2))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool(), persistent=False)
        self.register_buffer("wide", torch.randn(4, 1).expand(4, 3))
        self.register_buffer("drawn", torch.from_numpy(np.random.rand(2) * 0 + random.random() * 0))


class EverythingTask(Task):
    def model(self):
        return Everything()


class ReadsAValue(Task):
    def model(self):
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + int(torch.rand(1).item() * 3))))


class KeepsATensor(Task):
    def model(self):
        model = nn.Linear(4, 4)
        model.table = [torch.randn(3)]  # no buffer
        return model


class DrawsOnTheCpu(Task):
    def model(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight.data = torch.randn(4, 4, device="cpu")
        return model


class CannotOnMeta(Task):
    def model(self):
        if torch.empty(1).is_meta:
            np.random.rand(7)
            raise NotImplementedError  # as an operation that the meta device lacks
        return nn.Linear(4, 4)


class RealTensors(TorchDispatchMode):
    """Adds up the bytes of memory that operations of this thread create on the CPU."""

    def __init__(self):
        super().__init__()
        self.created = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {place(each) for each in tree_leaves((args, kwargs)) if is_real(each)}
        found = func(*args, **(kwargs or {}))
        for each in filter(is_real, tree_leaves(found)):
            if place(each) not in given:
                self.created[place(each)] = each.untyped_storage().nbytes()
        return found


def is_real(value):
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def place(tensor):
    return tensor.untyped_storage().data_ptr()


def built(task, folder, ranks=2, memory_format="contiguous", body=lambda rank, made: made.build()):
    """Call `body` on each rank; return the results, and the bytes of new tensors on the last
    rank."""
    real = RealTensors()

    def of_rank(rank):
        share = FileShare(folder, rank, ranks)
        if rank < ranks - 1:
            return body(rank, NodeModel(task, memory_format, share, LIMIT_S))
        with real:
            return body(rank, NodeModel(task, memory_format, share, LIMIT_S))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(of_rank, range(ranks))), sum(real.created.values())


def task_of(kind):
    return kind(TaskSettings(classes=3, image_size=32))


def states(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_equal(model, expected):
    assert list(states(model)) == list(states(expected))
    for name, tensor in states(expected).items():
        torch.testing.assert_close(states(model)[name], tensor, rtol=0, atol=0)
        assert states(model)[name].requires_grad == tensor.requires_grad


@pytest.mark.parametrize(
    ("memory_format", "strides"),
    [("contiguous", (27, 9, 3, 1)), ("channels_last", (27, 1, 9, 3))],
)
def test_parameters_of_all_ranks_are_the_same_memory_and_buffers_their_own(
    tmp_path, memory_format, strides
):
    (first, second, third), created = built(task_of(EverythingTask), tmp_path, 3, memory_format)
    expected = build_model(task_of(EverythingTask))
    for model in (first, second, third):
        assert_equal(model, expected)
        assert model.convolution.weight.stride() == strides
        assert model.down.weight is model.up.weight
        assert model.used[0] is model.scale
        assert model.scale.note == "no decay"
    assert created < WEIGHT_BYTES / 4
    # each rank has its own mapping
    with torch.no_grad():
        second.up.weight[0, 0] = 7
        second.frozen[0, 0] = 7
        second.get_buffer("features")[0, 0] = 7
    assert third.down.weight[0, 0] == first.down.weight[0, 0] == 7
    assert third.frozen[0, 0] == first.frozen[0, 0] == 7
    for model in (first, third):
        assert torch.equal(model.features, expected.get_buffer("features"))


def test_memory_of_trained_parameters_is_released_and_that_of_frozen_ones_stays(tmp_path):
    def body(_rank, made):
        model = made.build()
        frozen = model.frozen.clone()
        made.release()
        return model, frozen

    found, _ = built(task_of(EverythingTask), tmp_path, body=body)
    for model, frozen in found:
        assert not model.up.weight.any()
        assert torch.equal(model.frozen, frozen)


def test_later_models_have_the_same_weights(tmp_path):
    found, _ = built(
        task_of(EverythingTask), tmp_path, body=lambda _rank, made: (made.build(), made.build())
    )
    expected = build_model(task_of(EverythingTask))
    for earlier, later in found:
        assert earlier is not later
        assert_equal(earlier, expected)
        assert_equal(later, expected)


@pytest.mark.parametrize("kind", [ReadsAValue, KeepsATensor, DrawsOnTheCpu, CannotOnMeta])
def test_a_rank_that_needs_values_builds_the_whole_model(tmp_path, kind):
    (first, second), _ = built(task_of(kind), tmp_path)
    expected = build_model(task_of(kind))
    assert_equal(second, expected)
    assert_equal(first, expected)
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert_equal(second, expected)


@pytest.mark.parametrize("kind", [EverythingTask, CannotOnMeta])
def test_generators_are_as_after_building_the_model(tmp_path, kind):
    def after(build):
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        build()
        return torch.rand(2).tolist(), np.random.rand(), random.random()

    alone = after(lambda: build_model(task_of(kind)))

    def body(rank, made):
        return after(made.build) if rank == 1 else made.build()

    assert built(task_of(kind), tmp_path, body=body)[0][1] == alone


@pytest.mark.parametrize("name", ["processes", "hybrid"])
def test_strategies_train_the_same_from_shared_first_weights(tmp_path, monkeypatch, name):
    stages = {"processes": 1, "hybrid": 2}[name]
    trial = trial_of(
        name, ranks=2 * stages, replicas=2, stages=stages, task=f"{own_models.__file__}:Tied"
    )
    task = strategy_node.task_for(trial)

    def step(strategy, context, _peers):
        batch = strategy_node.share(trial, context.local_rank, strategy_node.batch_of(trial, 0, 8))
        strategy.gradient(batch)
        strategy.step()
        return strategy_node.copied(strategy.state_dict())

    alone = strategy_node.run_ranks(trial, step)
    ranks = trial.placement.ranks_per_node
    models, _ = built(task, tmp_path, ranks)
    shared = iter(models)
    monkeypatch.setattr(strategy_node, "model_of", lambda _trial: next(shared))
    for found, expected in zip(strategy_node.run_ranks(trial, step), alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_objects_stay_hidden_from_the_garbage_collector():
    """Else it would look through all modules of a rank at its end, for half a second."""
    task = EverythingTask(TaskSettings(classes=3, image_size=32))
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        assert built_without_values(task) is not None
        assert gc.get_freeze_count() >= before
    finally:
        gc.unfreeze()
