"""Progress of Spark jobs: tasks count photos, a thread on the driver reports the sum."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import SparkSession

_POLL_S = 0.25
_END_S = 5.0

T = TypeVar("T")


def counted(counter: Any, items: Iterable[T]) -> Iterator[T]:
    """Pass `items` on, adding 1 to a Spark accumulator for each."""
    for item in items:
        counter.add(1)
        yield item


class Watch:
    """Reports how far `counter` (a Spark accumulator) is on the way to `total`."""

    def __init__(
        self, counter: Any, total: int, progress: Callable[[int, int], None] | None
    ) -> None:
        self.counter = counter
        self._total = total
        self._progress = progress
        self._shown = 0

    def report(self) -> None:
        """Report progress if there is any; a task run twice does not lead beyond the total."""
        self._show(min(int(self.counter.value), self._total))

    def finish(self) -> None:
        """Report that everything is done."""
        self._show(self._total)

    def _show(self, done: int) -> None:
        if done > self._shown and self._progress is not None:
            self._shown = done
            self._progress(done, self._total)


@contextmanager
def watching(
    spark: SparkSession, total: int, progress: Callable[[int, int], None] | None
) -> Iterator[Watch]:
    """A Watch that reports by itself from a thread while the block runs."""
    watch = Watch(spark.sparkContext.accumulator(0), total, progress)
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(_POLL_S):
            watch.report()

    thread = threading.Thread(target=poll, name="paceline-ingest-progress", daemon=True)
    if progress is not None:
        thread.start()
    try:
        yield watch
    finally:
        ended.set()
        if progress is not None:
            thread.join(_END_S)
