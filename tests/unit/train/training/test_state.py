"""The state of a training: whole tensors from the parts of any layout, from files nobody trusts."""

import json

import pytest
import torch
from tests.support.checkpoints import read_checkpoint, save_part
from torch import nn

from paceline.base.errors import DataError, UsageError
from paceline.train.training import state_files
from paceline.train.training.optimizers import TaskOptimizer
from paceline.train.training.state import (
    Elements,
    RankState,
    divisible,
    join_elements,
    restore_model,
    restore_optimizer,
)
from paceline.train.training.state_files import StateFiles
from paceline.train.training.task import Task, TaskSettings


def saved(tmp_path, *states, **position):
    for rank, state in enumerate(states):
        save_part(tmp_path, state, rank, len(states), **position)
    return read_checkpoint(tmp_path)


def part(tensor, start, stop, name="weights/w"):
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return Elements(
        name=name,
        shape=tuple(tensor.shape),
        strides=tensor.stride(),
        start=start,
        values=flat[start:stop],
    )


def test_parts_of_several_ranks_add_up_to_the_tensor_in_any_memory_format(tmp_path):
    tensor = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    counter = part(torch.tensor(3.0), 0, 1, "counter")  # each rank has the whole one
    parts = [[part(tensor, 20, 48), counter], [], [part(tensor, 0, 20), counter]]
    files = saved(tmp_path, *map(RankState, parts))
    assert torch.equal(files.tensor("weights/w"), tensor)
    assert files.tensor("counter") == 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.ones(1).expand(3),  # one element in three places
        torch.arange(3e6),  # 12 MB are written in several pieces
    ],
)
def test_whole_tensor_comes_back_whatever_its_strides_and_size(tmp_path, tensor):
    state = RankState()
    state.add_whole("buffers/b", tensor)
    assert torch.equal(saved(tmp_path, state).tensor("buffers/b"), tensor)


@pytest.mark.parametrize("bounds", [[(0, 5), (6, 12)], [(0, 5)], [(0, 7), (5, 12)]])
def test_parts_with_gaps_or_overlaps_are_refused(bounds):
    tensor = torch.randn(12)
    with pytest.raises(DataError, match="weights/w"):
        join_elements("weights/w", [part(tensor, *b) for b in bounds])


def test_optimisers_state_of_another_shape_than_its_parameter_cannot_be_divided():
    tensor = torch.zeros(3)
    assert divisible("layer.weight", tensor, (3,)) is tensor
    with pytest.raises(
        DataError, match=r"layer\.weight has shape \(3,\), .* sequential or intraop"
    ):
        divisible("layer.weight", tensor, (3, 2))


@pytest.mark.parametrize("strides", [(0, 1), (3, 3), (1, 1), (100, 1), (1,)])
def test_strides_that_leave_the_memory_are_refused(strides):
    values = torch.zeros(12)
    wrong = Elements(name="weights/w", shape=(4, 3), strides=strides, start=0, values=values)
    with pytest.raises(DataError):
        join_elements("weights/w", [wrong])


class Scheduled(Task):
    def model(self):
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def optimizer(self, parameters):
        return torch.optim.AdamW([{"params": [p for _, p in parameters]}], lr=0.1)

    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def steps_of(model, optimizer, count):
    for _ in range(count):
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None


def build():
    task = Scheduled(TaskSettings(learning_rate_warmup_steps=5))
    model = task.model()
    return model, TaskOptimizer(task, model.named_parameters())


def test_adam_and_its_schedule_continue_exactly(tmp_path):
    torch.manual_seed(1)
    model, optimizer = build()
    steps_of(model, optimizer, 3)
    state = RankState()
    state.add_model(model)
    state.add_optimizer(optimizer)
    files = saved(tmp_path, state)
    other, other_optimizer = build()
    steps_of(other, other_optimizer, 2)  # of another training
    restore_model(other, files)
    restore_optimizer(other_optimizer, files)
    for each in (model, other):
        torch.manual_seed(2)
        steps_of(each, optimizer if each is model else other_optimizer, 4)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert optimizer.learning_rates() == other_optimizer.learning_rates()


def test_other_schedule_is_refused(tmp_path):
    model, optimizer = build()
    steps_of(model, optimizer, 3)
    state = RankState()
    state.add_optimizer(optimizer)
    state.values["rates/0.weight"] = 0.123
    _, other = build()
    with pytest.raises(DataError, match=r"0\.weight: expected the learning rate 0\.123"):
        restore_optimizer(other, saved(tmp_path, state))


def test_missing_or_differently_shaped_weight_is_refused(tmp_path):
    state = RankState()
    state.add_whole("weights/0.weight", torch.zeros(2, 2))
    model, _ = build()
    with pytest.raises(
        DataError, match=r"weights/0\.weight: expected .*\(4, 3\), got shape \(2, 2\)"
    ):
        restore_model(model, saved(tmp_path, state))


def test_optimiser_with_unusual_state_is_refused():
    model, optimizer = build()
    optimizer.optimizer.state[model[0].weight]["history"] = [1, 2]
    with pytest.raises(UsageError, match="history: a checkpoint contains tensors and numbers"):
        RankState().add_optimizer(optimizer)


def test_replicas_get_their_own_state_or_the_mean(tmp_path):
    states = []
    for replica in range(2):
        state = RankState()
        state.add_whole(f"replica/{replica}/optimizer/w/m", torch.full((2,), float(replica)))
        states.append(state)
    files = saved(tmp_path, *states, replicas=2)
    assert files.names("optimizer/w/") == ["m"]
    assert files.of_replica(1, 2).tensor("optimizer/w/m").tolist() == [1.0, 1.0]
    assert files.of_replica(1, 3).tensor("optimizer/w/m").tolist() == [0.5, 0.5]
    assert files.tensor("optimizer/w/m").tolist() == [0.5, 0.5]


def rewritten(path, change):
    """Change the metadata of a file, as somebody could who also changes the checksum."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    metadata = json.loads(header["__metadata__"]["paceline"])
    change(metadata)
    header["__metadata__"]["paceline"] = json.dumps(metadata)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(schema_version=2),
        lambda m: m.update(extra=1),
        lambda m: m["position"].update(steps=-1),
        lambda m: m["places"].append(m["places"][0]),
        lambda m: m["places"][0].update(start=-5),
        lambda m: m["places"][0].update(shape="x"),
        lambda m: m["position"].update(replicas=10**9),
    ],
)
def test_wrong_metadata_are_refused(tmp_path, change):
    files = saved(tmp_path, RankState([part(torch.zeros(4), 0, 4)]))
    rewritten(files.checkpoint.part(0), change)
    with pytest.raises(DataError):
        StateFiles(files.checkpoint)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 7, b"\xff" * 64, b"\x08" + b"\x00" * 7 + b"{" * 8]
)
def test_file_that_is_no_safetensors_file_is_refused(tmp_path, content):
    files = saved(tmp_path, RankState([part(torch.zeros(4), 0, 4)]))
    files.checkpoint.part(0).write_bytes(content)
    with pytest.raises(DataError):
        StateFiles(files.checkpoint)


def test_metadata_beyond_the_limit_are_refused(tmp_path, monkeypatch):
    files = saved(tmp_path, RankState([part(torch.zeros(4), 0, 4)]))
    monkeypatch.setattr(state_files, "_LARGEST_METADATA_BYTES", 100)
    with pytest.raises(DataError, match="expected at most 100 characters of metadata"):
        StateFiles(files.checkpoint)


def test_parts_of_different_steps_are_refused(tmp_path):
    files = saved(tmp_path, RankState(), RankState())
    rewritten(files.checkpoint.part(1), lambda m: m["position"].update(steps=4))
    with pytest.raises(DataError, match="different checkpoints"):
        StateFiles(files.checkpoint)
