"""Swin transformers: published sizes and names, and attention by its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.base.errors import UsageError
from paceline.train.training.dropout import set_sample_keys, use_sample_dropout
from paceline.train.workloads.swin import map_sides, swin_layers

WINDOW, SHIFT = 7, 3


def features_of(stochastic_depth: float = 0.0) -> nn.Sequential:
    """The layers of a small network: eight channels, two blocks in each stage."""
    features = swin_layers(8, 2, stochastic_depth)["features"]
    assert isinstance(features, nn.Sequential)
    return features


# torchvision's numbers without the classifier
@pytest.mark.parametrize(
    ("width", "third_blocks", "parameters"),
    [
        (96, 6, 28_288_354 - 769 * 1000),
        (96, 18, 49_606_258 - 769 * 1000),
        (128, 18, 87_768_224 - 1025 * 1000),
    ],
)
def test_sizes_are_the_published_ones(width, third_blocks, parameters):
    with torch.device("meta"):
        layers = swin_layers(width, third_blocks, 0.2)
    assert sum(p.numel() for layer in layers.values() for p in layer.parameters()) == parameters


def test_names_are_those_of_torchvision():
    model = nn.ModuleDict(swin_layers(8, 2, 0.0))
    block = {
        "norm1.weight", "norm1.bias", "attn.relative_position_bias_table",
        "attn.relative_position_index", "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight",
        "attn.proj.bias", "norm2.weight", "norm2.bias", "mlp.0.weight", "mlp.0.bias",
        "mlp.3.weight", "mlp.3.bias",
    }  # fmt: skip
    expected = {f"features.{s}.{b}.{name}" for s in (1, 3, 5, 7) for b in (0, 1) for name in block}
    expected |= {f"features.0.{n}.{name}" for n in (0, 2) for name in ("weight", "bias")}
    merging = ("reduction.weight", "norm.weight", "norm.bias")
    expected |= {f"features.{s}.{name}" for s in (2, 4, 6) for name in merging}
    assert set(model.state_dict()) == {*expected, "norm.weight", "norm.bias"}


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize(("rows", "columns"), [(14, 14), (9, 14), (6, 20)])
def test_positions_attend_to_those_of_their_own_window(block, rows, columns):
    """Each position attends to all positions with the same number of a displaced window."""
    torch.manual_seed(1)
    attention: Any = features_of().get_submodule(f"3.{block}.attn")
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    units = torch.randn(2, rows, columns, 16)
    height, width = (-(-side // WINDOW) * WINDOW for side in (rows, columns))
    padded = torch.zeros(2, height, width, 16)
    padded[:, :rows, :columns] = units
    shifts = [SHIFT if block and side > WINDOW else 0 for side in (height, width)]
    places = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    number = (places - torch.tensor(shifts)).div(WINDOW, rounding_mode="floor")
    together = (number[:, None] == number[None, :]).all(-1)
    between = (places[:, None] - places[None, :] + WINDOW - 1) * together[..., None]
    table = attention.relative_position_bias_table
    bias = table[between[..., 0] * (2 * WINDOW - 1) + between[..., 1]]
    query, key, value = (
        part.unflatten(-1, (attention.heads, -1))
        for part in attention.qkv(padded).flatten(1, 2).chunk(3, -1)
    )
    scores = torch.einsum("npha,nqha->npqh", query, key) * query.shape[-1] ** -0.5 + bias
    scores = scores.masked_fill(~together[..., None], -torch.inf)
    attended = torch.einsum("npqh,nqha->npha", scores.softmax(2), value).flatten(2)
    expected = attention.proj(attended).unflatten(1, (height, width))[:, :rows, :columns]
    torch.testing.assert_close(attention(units), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", [32, 64, 75, 256])
def test_maps_have_the_stated_sides(side):
    with torch.device("meta"):
        features = features_of()
        units = features[:2](torch.zeros(1, 3, side, side))
        last = features[2:](units)
    assert (units.shape[-1], last.shape[-1]) == map_sides(side)
    assert last.shape[1] == 64


def test_branches_are_left_out_by_sample():
    block = nn.Sequential(*features_of(0.5)[7].children())
    use_sample_dropout(block, enabled=True)
    units = torch.randn(32, 2, 2, 64)
    set_sample_keys(block, 1, 0, range(32))
    whole = block.train()(units)
    set_sample_keys(block, 1, 0, range(5, 32))
    torch.testing.assert_close(block(units[5:]), whole[5:], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(block.eval()(units), whole)
    alone = block[1].train()
    set_sample_keys(block, 1, 0, range(32))
    unchanged = [torch.equal(out, given) for out, given in zip(alone(units), units, strict=True)]
    assert 0 < sum(unchanged) < 32  # both branches of these samples are left out


def test_channels_that_heads_cannot_share_are_refused():
    with pytest.raises(UsageError, match="needs a multiple of 32, got 100"):
        swin_layers(100, 6, 0.0)
