"""Blocks of a traced model: where it can be split, that they compute the same, and what cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.base.errors import UsageError
from paceline.train.training.dropout import SampleDropout
from paceline.train.training.graph_blocks import graph_blocks
from paceline.train.workloads.facts import legal_split_points

IMAGE = torch.zeros(1, 3, 16, 16)


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        shortcut = x if self.down is None else self.down(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.layer = nn.Sequential(Residual(4, 4), Residual(4, 8, 2))
        self.dropout = SampleDropout(0.5, 0)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = functional.relu(self.bn(self.conv(x)), inplace=True)
        x = self.layer(x)
        x = torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1)
        return self.fc(self.dropout(x))


def names(model, example=IMAGE):
    return [name for name, _ in graph_blocks(model, example)]


def test_residual_network_is_split_between_its_blocks_and_layers():
    model = ResNet()
    blocks = dict(graph_blocks(model, IMAGE))
    assert list(blocks) == [
        "conv", "bn", "relu", "layer.0", "layer.0.relu", "layer.1", "layer.1.relu",
        "adaptive_avg_pool2d", "flatten", "dropout", "fc",
    ]  # fmt: skip
    # single layers are those of the model, and all parameters are
    assert blocks["fc"] is model.fc
    assert blocks["conv"] is model.conv
    own = {id(p) for block in blocks.values() for p in block.parameters()}
    assert own == {id(p) for p in model.parameters()}
    # no stage may begin with a block that works in place
    assert legal_split_points(list(blocks.items())) == [1, 3, 5, 7, 8, 9, 10]


def test_blocks_in_turn_are_the_forward_and_its_gradients():
    torch.manual_seed(1)
    model = ResNet().eval()
    x = torch.randn(4, 3, 16, 16)
    y = nn.Sequential(*(block for _, block in graph_blocks(model, IMAGE)))(x)
    wanted = model(x)
    assert torch.equal(y, wanted)
    found = torch.autograd.grad(y.sum(), list(model.parameters()))
    for one, other in zip(
        found, torch.autograd.grad(wanted.sum(), list(model.parameters())), strict=True
    ):
        assert torch.equal(one, other)


def test_finding_blocks_changes_no_state_and_works_without_memory():
    model = ResNet()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    graph_blocks(model, IMAGE)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert model.training
    with torch.device("meta"):
        assert names(ResNet()) == names(model)


class Branches(nn.Module):
    """Two branches that meet, and a layer that decides by values."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.odd = Odd()
        self.head = nn.Linear(8, 2)

    def forward(self, stem):  # has the name of a layer
        x = self.stem(stem)
        x = torch.cat([self.left(x), self.right(x)], 1)
        return self.head(self.odd(x))


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        if x.shape[0] > 100:  # fx cannot trace it
            return self.inner(x)
        return self.inner(x) * 2


def test_branches_stay_together_and_untraceable_layers_whole():
    model = Branches()
    blocks = dict(graph_blocks(model, torch.zeros(1, 4)))
    assert list(blocks) == ["stem", "left", "odd", "head"]
    assert blocks["stem"] is model.stem
    assert blocks["odd"] is model.odd
    x = torch.randn(3, 4)
    assert torch.equal(nn.Sequential(*blocks.values())(x), model(x))


class Twice(nn.Module):
    """Calls one linear layer and one batch normalisation twice."""

    def __init__(self):
        super().__init__()
        self.shared, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.shared(self.shared(x))
        return self.last(self.norm(torch.tanh(self.norm(x))))


def test_layer_that_is_called_twice_is_no_layer_of_its_own_and_statistics_are_not_divided():
    model = Twice()
    blocks = graph_blocks(model, torch.zeros(1, 4))
    assert [name for name, _ in blocks] == ["shared#1", "shared#2", "norm", "last"]
    assert not any(type(block) is nn.Linear for name, block in blocks if "shared" in name)
    assert {id(p) for _, b in blocks[:2] for p in b.parameters()} == {
        id(p) for p in model.shared.parameters()
    }


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask=None, scale=2.0, flag=False):
        x = self.first(x)
        if mask is not None:
            x = x * mask
        return self.second(x) * scale if not flag else x


def test_optional_inputs_have_their_defaults():
    model = Optional()
    blocks = graph_blocks(model, torch.zeros(1, 4))
    assert [name for name, _ in blocks] == ["first", "second", "mul"]
    x = torch.randn(3, 4)
    assert torch.equal(nn.Sequential(*(block for _, block in blocks))(x), model(x))


class FromStartToEnd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        early = self.first(x)
        late = self.third(self.second(torch.tanh(early)))
        return torch.cat([late, early, x], 1)


class TwoInputs(nn.Module):
    def forward(self, x, y):
        return x + y


class TwoOutputs(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class ByValue(nn.Module):
    def forward(self, x):
        return -x if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (FromStartToEnd(), r"no place has a single tensor alive: its input is used again by .*cat"),
        (TwoInputs(), r"its forward has 2 inputs, expected one"),
        (TwoOutputs(4, 4), r"its forward returns more than one tensor"),
        (ByValue(), r"torch.fx cannot trace ByValue: "),
    ],
)
def test_what_makes_splitting_impossible_is_named(model, message):
    with pytest.raises(UsageError, match=message + ".*; define blocks"):
        graph_blocks(model, torch.zeros(1, 4))


class OnlyOne(nn.Module):
    """Fails without a message."""

    def forward(self, x):
        if x.shape[0] != 1:
            raise WordlessError
        return x


class WordlessError(Exception):
    def __str__(self):
        return ""


def test_error_without_a_message_is_named_by_its_type():
    with pytest.raises(UsageError, match=r"example_input\(\) \(WordlessError\); define"):
        graph_blocks(nn.Sequential(OnlyOne(), nn.Linear(4, 2)), torch.zeros(1, 4))


class Tokens(nn.Module):
    """Integers cannot cross a split point, and neither can what has no row for each sample."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.position = nn.Parameter(torch.zeros(3, 4))
        self.head = nn.Linear(4, 7)

    def forward(self, tokens):
        tokens = tokens.clamp(0, 6)
        units = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return self.head(units.transpose(0, 1)).transpose(0, 1)


def test_only_samples_of_floating_point_cross():
    blocks = graph_blocks(Tokens(), torch.zeros(1, 3, dtype=torch.long))
    assert [name for name, _ in blocks] == ["embedding", "head"]
