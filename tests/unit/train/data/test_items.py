"""Map-style data sets: every item is fed once, and wrong items are reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.base.errors import DataError, UsageError
from paceline.plan.trials.sample_order import SampleOrder
from paceline.train.data.batches import FeedOptions, open_feed
from paceline.train.data.items import ItemSource, virtual_row_groups

SAMPLES = 150


class Items(torch.utils.data.Dataset):
    """Tensors of float64 and numbers, computed from the index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2, 3), index, dtype=torch.float64), index % 7


def feed_all(items: Any, mode: Any, world: int = 1) -> list[Any]:
    source = ItemSource(items, SAMPLES)
    order = SampleOrder(source.row_group_rows, seed=2, global_batch=16, epochs=1)
    fed = []
    for rank in range(world):
        with open_feed(source, order, FeedOptions(rank, world), mode=mode) as feed:
            fed += list(feed)
    return fed


def test_virtual_row_groups_contain_every_sample() -> None:
    assert virtual_row_groups(SAMPLES) == (64, 64, 22)
    assert virtual_row_groups(128) == (64, 64)


@pytest.mark.parametrize("mode", ["memory", "stream"])
@pytest.mark.parametrize("world", [1, 3])
def test_every_item_is_fed_once(mode: Any, world: int) -> None:
    batches = feed_all(Items(), mode, world)
    ids = np.concatenate([batch.sample_ids for batch in batches])
    assert sorted(ids.tolist()) == list(range(SAMPLES))
    for batch in batches:
        assert batch.inputs.dtype == np.float32
        assert batch.targets.dtype == np.int64
        assert np.array_equal(batch.inputs[:, 0, 0], batch.sample_ids)
        assert batch.inputs.shape[1:] == (2, 3)
        assert np.array_equal(batch.targets, batch.sample_ids % 7)


class Drawn(Items):
    """Draws its items at random."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2), 0


class Ragged(Items):
    """Item 9 is longer."""

    def __getitem__(self, index: int) -> Any:
        return np.zeros(3 + (index == 9)), 0.0


class Text(Items):
    def __getitem__(self, index: int) -> Any:
        return "words", 0


class Single(Items):
    def __getitem__(self, index: int) -> Any:
        return np.zeros(3)


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        (Drawn(), UsageError, "two different items 0.*augment"),
        (Ragged(), DataError, r"item 9 .*shape \(3,\), as in item 0, got \(4,\)"),
        (Text(), UsageError, "expected arrays, tensors or numbers, got <U5"),
        (Single(), UsageError, r"expected a pair \(input, target\), got ndarray"),
    ],
)
@pytest.mark.parametrize("mode", ["memory", "stream"])
def test_wrong_items_are_reported(items: Any, error: Any, message: str, mode: Any) -> None:
    with pytest.raises(error, match=message):
        feed_all(items, mode)


def test_another_number_of_samples_than_planned_is_refused() -> None:
    with pytest.raises(UsageError, match="has 150 samples, expected 149 as planned"):
        ItemSource(Items(), 149)
