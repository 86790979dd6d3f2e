from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.base.errors import UsageError
from paceline.train.strategies.reduction.flat_layout import FlatLayout, ParameterShard, touch

FLAT = torch.arange(112.0)  # of the layout below, each element its own place


def parameters():
    convolution = torch.arange(4 * 3 * 2 * 2.0).view(4, 3, 2, 2)
    return {
        "convolution": nn.Parameter(convolution.contiguous(memory_format=torch.channels_last)),
        "bias": nn.Parameter(torch.arange(100.0, 104.0)),
        "linear": nn.Parameter(torch.arange(200.0, 235.0).view(5, 7)),
    }


def test_each_parameter_begins_at_a_cache_line():
    layout = FlatLayout.of(parameters().items())
    # 48 elements are 3 lines, 4 elements 1 line, 35 elements 3 lines.
    assert [p.offset for p in layout.shards(1)[0]] == [0, 48, 64]
    assert layout.elements == 48 + 16 + 48
    assert layout.names == ("convolution", "bias", "linear")


def test_bound_parameters_keep_values_shape_and_memory_format():
    found, wanted = parameters(), parameters()
    flat = torch.full((112,), -1.0)
    FlatLayout.of(found.items()).bind(found, flat, copy=True)
    for name, parameter in found.items():
        assert torch.equal(parameter, wanted[name])
        assert parameter.stride() == wanted[name].stride()
    assert found["convolution"].is_contiguous(memory_format=torch.channels_last)
    flat.zero_()
    assert not any(parameter.any() for parameter in found.values())


def test_touching_writes_zeros_to_the_shards_only():
    flat = torch.ones(112)
    shards = FlatLayout.of(parameters().items()).shards(3)
    touch(shards[1], flat)
    assert flat.nonzero().flatten().tolist() == [
        place for place in range(112) if all(not is_in(place, shard) for shard in shards[1])
    ]


def is_in(place, shard):
    return shard.offset <= place < shard.offset + shard.elements


def test_binding_without_copy_takes_what_is_there():
    found = parameters()
    FlatLayout.of(found.items()).bind(found, torch.full((112,), 5.0), copy=False)
    assert all((parameter == 5).all() for parameter in found.values())


@pytest.mark.parametrize("rows", [None, {"linear": 5}], ids=["lines", "rows"])
@pytest.mark.parametrize("workers", [1, 2, 3, 7, 9])
def test_workers_own_every_element_once(workers, rows):
    layout = FlatLayout.of(parameters().items())
    owned = {name: [] for name in layout.names}
    for pieces in layout.shards(workers, rows):
        for piece in pieces:
            assert piece.offset - piece.start == layout.view(FLAT, piece.name).flatten()[0]
            owned[piece.name] += range(piece.start, piece.stop)
    assert owned == {name: list(range(p.numel())) for name, p in parameters().items()}


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 9])
def test_shares_are_whole_lines_and_equal_but_for_one(workers):
    shares = FlatLayout.of(parameters().items()).shards(workers)
    lines = [sum(-(-(p.stop - p.start) // 16) for p in pieces) for pieces in shares]
    assert max(lines) - min(lines) <= 1
    assert all(piece.offset % 16 == 0 for pieces in shares for piece in pieces)


def test_a_slice_may_begin_and_end_within_parameters():
    first, second = FlatLayout.of(parameters().items()).shards(2)
    assert first == [ParameterShard("convolution", 0, 48, 0), ParameterShard("bias", 0, 4, 48)]
    assert second == [ParameterShard("linear", 0, 35, 64)]
    assert FlatLayout.of(parameters().items()).shards(3)[1] == [
        ParameterShard("bias", 0, 4, 48), ParameterShard("linear", 0, 16, 64),
    ]  # fmt: skip


def test_part_of_a_layout_keeps_the_places():
    whole = FlatLayout.of(parameters().items())
    part = whole.only(["bias", "linear"])
    assert part.elements == whole.elements
    assert (part.begin, part.end) == (48, 112)
    assert part.shards(2)[0] == [
        ParameterShard("bias", 0, 4, 48), ParameterShard("linear", 0, 16, 64),
    ]  # fmt: skip
    flat = torch.arange(112.0)
    assert torch.equal(part.view(flat, "linear"), whole.view(flat, "linear"))
    assert whole.only([]).shards(2) == [[], []]


def test_shards_of_whole_rows_are_matrices():
    layout = FlatLayout.of(parameters().items())
    # of 4 lines without the linear layer, each worker has 2: 32 elements; rows have 12, 1, 7
    found = [[layout.shape_of(s) for s in own] for own in layout.shards(2, {"linear": 5})]
    assert found == [[(32,), (3, 7)], [(16,), (4,), (2, 7)]]
    assert [layout.shape_of(s) for s in layout.shards(1)[0]] == [(4, 12), (4,), (5, 7)]


def test_view_of_part_of_a_larger_array_counts_from_its_start():
    layout = FlatLayout.of(parameters().items())
    flat = torch.arange(200.0)[50:162]
    assert layout.view(flat, "bias").tolist() == [98, 99, 100, 101]


def test_storage_order_is_a_view_where_strides_agree():
    found = parameters()
    layout = FlatLayout.of(found.items())
    gradient = torch.zeros_like(found["convolution"])
    layout.in_storage_order("convolution", gradient)[5] = 1
    assert gradient.sum() == 1


def test_storage_order_reorders_other_strides():
    found = parameters()
    layout, convolution = FlatLayout.of(found.items()), found["convolution"].detach()
    other = convolution.contiguous()
    assert other.stride() != convolution.stride()
    wanted = layout.in_storage_order("convolution", convolution)
    assert torch.equal(layout.in_storage_order("convolution", other), wanted)
    assert wanted.tolist()[:4] == [0, 4, 8, 1]  # channels come first


def test_strides_of_dimensions_of_one_do_not_count():
    weight = nn.Parameter(torch.zeros(4, 3, 1, 1))
    layout = FlatLayout.of([("weight", weight)])
    gradient = torch.zeros(12).as_strided((4, 3, 1, 1), (3, 1, 3, 3))
    layout.in_storage_order("weight", gradient)[:] = 1
    assert gradient.sum() == 12


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3, dtype=torch.float64), torch.zeros(1).expand(3), torch.zeros(6)[::2]]
)
def test_parameter_that_cannot_lie_flat_is_refused(tensor):
    with pytest.raises(UsageError, match="parameter odd: expected float32 elements without gaps"):
        FlatLayout.of([("odd", nn.Parameter(tensor))])
