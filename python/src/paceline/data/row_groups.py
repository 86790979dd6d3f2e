"""Reads row groups through Petastorm: exactly the wanted ones, in the wanted order, counted.

Petastorm's own sharding (row groups modulo shard count) gives ranks uneven shares and its
shuffling is its own; so it is given the very files to read, one row group each, in order. Given
files instead of a folder it takes the schema from the Parquet footers and never unpickles
anything. It once dropped rows silently (uber/petastorm#477): every row is accounted for here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data.petastorm_quiet import quiet_petastorm
from paceline.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from paceline.data.dataset import Dataset

# Petastorm's dummy pool holds this many row groups ready; when it has to wait for the thread that
# refills it, it sleeps 100 ms. So each reader gets no more than it can hold (opening takes 3 ms).
_READER_ROW_GROUPS = 3
_FIELDS = ["sample_id", "label", "image", "sha256"]


@dataclass(frozen=True, slots=True)
class RowGroupRows:
    """The rows of a row group, in storage order; all of length `rows`."""

    index: int
    first_sample_id: int
    labels: NDArray[np.int32]
    images: Sequence[bytes]  # encoded photos
    sha256: Sequence[str]

    def photo(self, sample_id: int) -> bytes:
        """The encoded photo of a sample, compared with its checksum.

        Raises DataError naming the sample if it is damaged.
        """
        row = sample_id - self.first_sample_id
        data = self.images[row]
        if hashlib.sha256(data).hexdigest() != self.sha256[row]:
            raise DataError(
                f"sample {sample_id} (row {row} of row group {self.index}): its photo does not "
                "have the checksum it was stored with; make the data set anew with "
                "`paceline data ingest`"
            )
        return data

    def label(self, sample_id: int) -> int:
        return int(self.labels[sample_id - self.first_sample_id])


def read_row_groups(dataset: Dataset, indices: Sequence[int]) -> Iterator[RowGroupRows]:
    """Yield the row groups `indices` of `dataset` in that order, one in memory at a time.

    Raises DataError if a file cannot be read or does not hold the samples it should.
    """
    for start in range(0, len(indices), _READER_ROW_GROUPS):
        yield from _read(dataset, indices[start : start + _READER_ROW_GROUPS])


def _read(dataset: Dataset, indices: Sequence[int]) -> Iterator[RowGroupRows]:
    from petastorm import make_batch_reader  # noqa: PLC0415  (a second to import)

    quiet_petastorm()
    urls = [f"file://{dataset.row_group_path(index)}" for index in indices]
    try:
        # The dummy pool reads in this thread; the thread pool's workers poll a thousand times a
        # second, which a training on the same core would pay for.
        reader = make_batch_reader(
            urls, schema_fields=_FIELDS, reader_pool_type="dummy", shuffle_row_groups=False
        )
    except Exception as error:
        raise _unreadable(dataset, f"row groups {list(indices)}", error) from error
    with reader:
        for index in indices:
            yield _checked(dataset, index, _next(dataset, index, reader))


def _next(dataset: Dataset, index: int, reader: Any) -> Any:
    try:
        return next(reader)
    except StopIteration:
        raise DataError(
            f"{dataset.row_group_path(index)}: Petastorm gave no rows of this row group"
        ) from None
    except Exception as error:
        # pyarrow raises ArrowException, OSError and more for damaged pages.
        raise _unreadable(dataset, f"row group {index}", error) from error


def _checked(dataset: Dataset, index: int, batch: Any) -> RowGroupRows:
    group = dataset.manifest.row_groups[index]
    expected = np.arange(group.first_sample_id, group.first_sample_id + group.rows)
    if not np.array_equal(batch.sample_id, expected):
        raise DataError(
            f"{dataset.path / group.file}: expected samples {expected[0]}..{expected[-1]}, got "
            f"{len(batch.sample_id)} rows that are not these; make the data set anew with "
            "`paceline data ingest`"
        )
    return RowGroupRows(
        index=index,
        first_sample_id=group.first_sample_id,
        labels=np.asarray(batch.label, dtype=np.int32),
        images=batch.image,
        sha256=batch.sha256,
    )


def _unreadable(dataset: Dataset, what: str, error: Exception) -> DataError:
    return DataError(
        f"{dataset.path}: {what} cannot be read ({type(error).__name__}: {error}); verify the "
        "data set or make it anew with `paceline data ingest`"
    )
