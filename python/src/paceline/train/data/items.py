"""Samples of a map-style data set that a task returns (torch.utils.data.Dataset).

Only `__len__` and `__getitem__` are used, so nothing here imports torch. Consecutive indices form
virtual row groups, so the order of samples and both reading modes are those of Parquet files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.base.errors import DataError, UsageError
from paceline.train.data.batches import Columns, Rows, Values
from paceline.train.data.manifest import NUMBERS, delivered_dtype

_GROUP_ROWS = 64  # as in the row groups that ingest writes


class MapStyleDataset(Protocol):
    """Samples by index: (input, target) pairs of arrays, tensors or numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def virtual_row_groups(samples: int) -> tuple[int, ...]:
    """Return the number of samples in each virtual row group of a map-style data set."""
    whole, rest = divmod(samples, _GROUP_ROWS)
    return (_GROUP_ROWS,) * whole + ((rest,) if rest else ())


class ItemSource:
    """Reads a map-style data set; items are taken when they are decoded."""

    def __init__(self, items: MapStyleDataset, samples: int) -> None:
        """samples: the planned number. Raises UsageError if the items are not usable."""
        if len(items) != samples:
            raise UsageError(
                f"the task's dataset() has {len(items)} samples, expected {samples} as planned; "
                "return the same data set on every host, and plan the run again"
            )
        self._items = items
        first, again = _pair(items, 0), _pair(items, 0)
        if not all(np.array_equal(a, b) for a, b in zip(first, again, strict=True)):
            raise UsageError(
                "the task's dataset() returned two different items 0; expected the same item for "
                "the same index: move random transforms to the task's augment()"
            )
        self.inputs, self.targets = (
            Values(value.shape, delivered_dtype(str(value.dtype), is_target=is_target))
            for value, is_target in zip(first, (False, True), strict=True)
        )
        self.row_group_rows = virtual_row_groups(samples)

    def read(self, groups: Sequence[int], *, with_inputs: bool) -> Iterator[Rows]:  # noqa: ARG002
        """Yield these virtual row groups; they contain nothing but sample ids."""
        for index in groups:
            yield Rows(index * _GROUP_ROWS, self.row_group_rows[index], ())

    def decode(
        self,
        sample_ids: NDArray[np.int64],
        columns: Columns,  # noqa: ARG002
        inputs: NDArray[Any] | None,
        targets: NDArray[Any],
        pool: Executor,
    ) -> None:
        """Take the items. Raises DataError for one that differs in shape from item 0."""

        def place(row: int) -> None:
            index = int(sample_ids[row])
            given, target = _pair(self._items, index)
            for value, out in ((given, inputs), (target, targets)):
                if out is None:
                    continue
                if value.shape != out.shape[1:]:
                    raise DataError(
                        f"item {index} of the task's dataset(): expected an array of shape "
                        f"{out.shape[1:]}, as in item 0, got {value.shape}"
                    )
                out[row] = value

        list(pool.map(place, range(len(sample_ids))))


def _pair(items: MapStyleDataset, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
    item = items[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise UsageError(
            f"item {index} of the task's dataset(): expected a pair (input, target), got "
            f"{type(item).__name__}"
        )
    given, target = (np.asarray(value) for value in item)
    for value in (given, target):
        if value.dtype.kind not in NUMBERS:
            raise UsageError(
                f"item {index} of the task's dataset(): expected arrays, tensors or numbers, got "
                f"{value.dtype}"
            )
    return given, target
