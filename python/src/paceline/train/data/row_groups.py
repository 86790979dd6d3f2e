"""Read row groups through Petastorm: exactly the requested ones, in order, verified.

Petastorm's own sharding (row groups modulo number of shards) gives ranks uneven shares, and its
shuffling has an order of its own. So it is given the files and row groups to read, in order. Given
files instead of a folder, it takes the schema from the Parquet footers and never unpickles
anything. It once dropped rows silently (uber/petastorm#477), so every row is accounted for here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from itertools import groupby
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from paceline.base.errors import DataError
from paceline.train.data.batches import Columns, Rows, Values
from paceline.train.data.dataset import Dataset
from paceline.train.data.manifest import Field, UnusableField, decode_column, delivered_dtype

# Petastorm's dummy pool holds this many row groups ready; when it has to wait for the thread that
# refills it, it sleeps 100 ms. So each reader gets no more than it can hold (opening takes 3 ms).
_READER_ROW_GROUPS = 3


class ParquetSource:
    """The fields of a data set that a task uses. Verifies each file before its first use.

    Later reads of the same file are not verified again: hashing costs about a twentieth of
    decoding, but a rank that streams reads every row group in every epoch.
    """

    def __init__(
        self,
        dataset: Dataset,
        input_field: str,
        target_field: str,
        *,
        image_size: int,
    ) -> None:
        """Raises UsageError if the data set has no such fields."""
        self._dataset = dataset
        self._input, self._target = dataset.field(input_field), dataset.field(target_field)
        self.inputs = _values(self._input, image_size, is_target=False)
        self.targets = _values(self._target, image_size, is_target=True)
        self._files: dict[str, Path] = {}  # verified
        cv2.setNumThreads(0)

    @property
    def row_group_rows(self) -> tuple[int, ...]:
        return self._dataset.row_group_rows

    def read(self, groups: Sequence[int], *, with_inputs: bool) -> Iterator[Rows]:
        """Yield these row groups in that order.

        Raises DataError if a file cannot be read or differs from the manifest.
        """
        for single, some in groupby(groups, self._is_only_one_of_its_file):
            indices = list(some)
            size = _READER_ROW_GROUPS if single else 1
            for start in range(0, len(indices), size):
                yield from self._read(indices[start : start + size], self._used(with_inputs))

    def decode(
        self,
        sample_ids: NDArray[np.int64],
        columns: Columns,
        inputs: NDArray[Any] | None,
        targets: NDArray[Any],
        pool: Executor,
    ) -> None:
        fields = self._used(inputs is not None)
        outs = [targets] if inputs is None else [inputs, targets]
        for field, stored, out in zip(fields, columns, outs, strict=True):
            try:
                decode_column(field, stored, out, pool)
            except UnusableField as error:
                low, high = sample_ids.min(initial=0), sample_ids.max(initial=0)
                raise type(error)(
                    f"{self._dataset.name}: samples {low}..{high}: {error}"
                ) from error

    def _used(self, with_inputs: bool) -> list[Field]:
        return [self._input, self._target] if with_inputs else [self._target]

    def _read(self, indices: Sequence[int], fields: Sequence[Field]) -> Iterator[Rows]:
        """Read row groups that are the only ones of their files, or a single one."""
        from petastorm import make_batch_reader  # noqa: PLC0415  (a second to import)

        quiet_petastorm()
        urls = [f"file://{self._file(index)}" for index in indices]
        group = self._dataset.manifest.row_groups[indices[0]]
        count = len(group.file.row_group_rows)
        # Petastorm's shard of a file with n row groups, of n shards, is one row group.
        shard = {} if count == 1 else {"cur_shard": group.number, "shard_count": count}
        names = {name for name in (*(f.name for f in fields), self._id_field) if name}
        try:
            # The dummy pool reads in this thread. Workers of the thread pool poll a thousand times
            # a second, which would slow down a training on the same core.
            reader = make_batch_reader(
                urls,
                schema_fields=[f"^{re.escape(name)}$" for name in sorted(names)],
                reader_pool_type="dummy",
                shuffle_row_groups=False,
                **shard,
            )
        except Exception as error:
            raise self._unreadable(indices[0], error) from error
        with reader:
            for index in indices:
                yield self._checked(index, self._next(index, reader), fields)

    def _is_only_one_of_its_file(self, index: int) -> bool:
        return len(self._dataset.manifest.row_groups[index].file.row_group_rows) == 1

    @property
    def _id_field(self) -> str | None:
        return self._dataset.manifest.id_field

    def _file(self, index: int) -> Path:
        path = self._dataset.manifest.row_groups[index].file.path
        if path not in self._files:
            self._files[path] = self._dataset.file_of(index)
        return self._files[path]

    def _next(self, index: int, reader: Any) -> Any:
        try:
            return next(reader)
        except StopIteration:
            raise self._dataset.damaged(index, "Petastorm returned no rows") from None
        except Exception as error:
            # pyarrow raises ArrowException, OSError and more for damaged pages.
            raise self._unreadable(index, error) from error

    def _checked(self, index: int, batch: Any, fields: Sequence[Field]) -> Rows:
        group = self._dataset.manifest.row_groups[index]
        first, count = group.first_sample_id, group.rows
        names = [field.name for field in fields] + ([self._id_field] if self._id_field else [])
        missing = [name for name in names if not hasattr(batch, name)]
        if missing:
            raise self._dataset.damaged(index, f"columns missing: {', '.join(missing)}")
        columns = tuple(getattr(batch, field.name) for field in fields)
        rows = len(columns[0])
        expected = np.arange(first, first + count)
        ids = expected if self._id_field is None else getattr(batch, self._id_field)
        if rows != count or not np.array_equal(ids, expected):
            raise self._dataset.damaged(
                index,
                f"expected samples {first}..{first + count - 1}, got {rows} rows that are not "
                "these",
            )
        for field, column in zip(fields, columns, strict=True):
            self._check_column(index, field, column)
        return Rows(first, count, columns)

    def _check_column(self, index: int, field: Field, column: NDArray[Any]) -> None:
        if field.is_encoded:
            return  # values are checked when they are decoded
        if column.dtype != np.dtype(field.dtype) or column.shape[1:] != field.shape:
            raise self._dataset.damaged(
                index,
                f"field {field.name}: expected {field.dtype} of shape {field.shape}, got "
                f"{column.dtype} of shape {column.shape[1:]}; is a value missing (null)?",
            )
        if field.classes is not None and (column.min() < 0 or column.max() >= field.classes):
            raise self._dataset.damaged(
                index,
                f"field {field.name}: expected labels 0..{field.classes - 1}, got {column.min()}.."
                f"{column.max()}",
            )

    def _unreadable(self, index: int, error: Exception) -> DataError:
        return self._dataset.damaged(index, f"cannot be read ({type(error).__name__}: {error})")


def quiet_petastorm() -> None:
    """Ignore FutureWarnings that Petastorm 0.12.1 causes in pyarrow 14, and only those.

    It uses pyarrow's legacy data set classes throughout; the versions are pinned because of that.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"petastorm\.")


def _values(field: Field, image_size: int, *, is_target: bool) -> Values:
    return Values(field.value_shape(image_size), delivered_dtype(field.dtype, is_target=is_target))
