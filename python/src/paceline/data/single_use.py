"""What both feeds have in common: they are read once and closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from paceline.data.batches import Batch, Prefetcher


class SingleUseFeed:
    """A Feed over a Prefetcher."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._prefetcher)

    def close(self) -> None:
        """End the threads. Raises TimedOut if storage is stuck."""
        self._prefetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
