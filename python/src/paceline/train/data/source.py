"""Interface of what feeds read samples from: Parquet files, or a map-style data set of the task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Columns = tuple["NDArray[Any]", ...]


@dataclass(frozen=True, slots=True)
class Values:
    """Shape and type of a decoded input or target of one sample."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Size of one value in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Rows:
    """The stored rows of a row group, in storage order. Values may still be encoded."""

    first_sample_id: int
    count: int
    columns: Columns  # each of shape (count, ...)


class Source(Protocol):
    """The samples of a training in row groups, which are read in any order and decoded later."""

    @property
    def inputs(self) -> Values: ...

    @property
    def targets(self) -> Values: ...

    @property
    def row_group_rows(self) -> Sequence[int]: ...

    def read(self, groups: Sequence[int], *, with_inputs: bool) -> Iterator[Rows]:
        """Yield these row groups in that order, one in memory at a time. Raises DataError."""

    def decode(
        self,
        sample_ids: NDArray[np.int64],
        columns: Columns,
        inputs: NDArray[Any] | None,
        targets: NDArray[Any],
        pool: Executor,
    ) -> None:
        """Write the values of some stored rows to `inputs` and `targets`.

        inputs: None for rows that were read without inputs. pool: executes the decoding of single
        samples. Raises DataError.
        """
