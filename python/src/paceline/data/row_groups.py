"""Read row groups through Petastorm: exactly the requested ones, in order, verified.

Petastorm's own sharding (row groups modulo number of shards) gives ranks uneven shares, and its
shuffling has an order of its own. So it is given the files to read, one row group each, in order.
Given files instead of a folder, it takes the schema from the Parquet footers and never unpickles
anything. It once dropped rows silently (uber/petastorm#477), so every row is accounted for here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from paceline.data.dataset import Dataset
    from paceline.errors import DataError

# Petastorm's dummy pool holds this many row groups ready; when it has to wait for the thread that
# refills it, it sleeps 100 ms. So each reader gets no more than it can hold (opening takes 3 ms).
_READER_ROW_GROUPS = 3
_FIELDS = ["sample_id", "label", "image"]


@dataclass(frozen=True, slots=True)
class RowGroupRows:
    """The rows of one row group, in storage order."""

    index: int
    first_sample_id: int
    labels: NDArray[np.int32]
    images: Sequence[bytes]  # encoded

    def image(self, sample_id: int) -> bytes:
        """Return the encoded image of a sample."""
        return self.images[sample_id - self.first_sample_id]

    def label(self, sample_id: int) -> int:
        return int(self.labels[sample_id - self.first_sample_id])


class RowGroupReader:
    """Reads row groups, and verifies the checksum of each file before its first use.

    Later reads of the same file are not verified again: hashing costs about a twentieth of
    decoding, but a rank that streams reads every row group in every epoch.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._verified: set[int] = set()

    def read(self, indices: Sequence[int]) -> Iterator[RowGroupRows]:
        """Yield the row groups `indices` in that order, one in memory at a time.

        Raises DataError if a file cannot be read or differs from the manifest.
        """
        for start in range(0, len(indices), _READER_ROW_GROUPS):
            some = indices[start : start + _READER_ROW_GROUPS]
            for index in set(some) - self._verified:
                self._dataset.verify_row_group(index)
                self._verified.add(index)
            yield from _read(self._dataset, some)


def quiet_petastorm() -> None:
    """Ignore FutureWarnings that Petastorm 0.12.1 causes in pyarrow 14, and only those.

    It uses pyarrow's legacy data set classes throughout; the versions are pinned because of that.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"petastorm\.")


def _read(dataset: Dataset, indices: Sequence[int]) -> Iterator[RowGroupRows]:
    from petastorm import make_batch_reader  # noqa: PLC0415  (a second to import)

    quiet_petastorm()
    urls = [f"file://{dataset.row_group_path(index)}" for index in indices]
    try:
        # The dummy pool reads in this thread. Workers of the thread pool poll a thousand times a
        # second, which would slow down a training on the same core.
        reader = make_batch_reader(
            urls, schema_fields=_FIELDS, reader_pool_type="dummy", shuffle_row_groups=False
        )
    except Exception as error:
        raise _unreadable(dataset, indices[0], error) from error
    with reader:
        for index in indices:
            yield _checked(dataset, index, _next(dataset, index, reader))


def _next(dataset: Dataset, index: int, reader: Any) -> Any:
    try:
        return next(reader)
    except StopIteration:
        raise dataset.damaged(index, "Petastorm returned no rows") from None
    except Exception as error:
        # pyarrow raises ArrowException, OSError and more for damaged pages.
        raise _unreadable(dataset, index, error) from error


def _checked(dataset: Dataset, index: int, batch: Any) -> RowGroupRows:
    group, classes = dataset.manifest.row_groups[index], len(dataset.classes)
    expected = np.arange(group.first_sample_id, group.first_sample_id + group.rows)
    if not np.array_equal(batch.sample_id, expected):
        raise dataset.damaged(
            index,
            f"expected samples {expected[0]}..{expected[-1]}, got {len(batch.sample_id)} rows "
            "that are not these",
        )
    labels = np.asarray(batch.label, dtype=np.int32)
    if labels.min() < 0 or labels.max() >= classes:
        raise dataset.damaged(
            index, f"expected labels 0..{classes - 1}, got {labels.min()}..{labels.max()}"
        )
    return RowGroupRows(index, group.first_sample_id, labels, batch.image)


def _unreadable(dataset: Dataset, index: int, error: Exception) -> DataError:
    return dataset.damaged(index, f"cannot be read ({type(error).__name__}: {error})")
