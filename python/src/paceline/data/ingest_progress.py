"""Progress of Spark jobs: tasks count images, a thread on the driver reports the sum."""

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
    """Pass `items` on and add 1 to a Spark accumulator for each."""
    for item in items:
        counter.add(1)
        yield item


@contextmanager
def reported(
    spark: SparkSession, total: int, progress: Callable[[int, int], None] | None
) -> Iterator[Any]:
    """Yield a Spark accumulator whose growth a thread reports while the block runs.

    The last report is (total, total) if the block ends without an exception.
    """
    counter = spark.sparkContext.accumulator(0)
    if progress is None:
        yield counter
        return
    ended = threading.Event()

    def poll() -> None:
        shown = 0
        while not ended.wait(_POLL_S):
            # A task that ran twice counts twice, so the sum may exceed the total.
            done = min(int(counter.value), total - 1)
            if done > shown:
                progress(done, total)
                shown = done

    thread = threading.Thread(target=poll, name="paceline-ingest-progress", daemon=True)
    thread.start()
    try:
        yield counter
    finally:
        ended.set()
        thread.join(_END_S)
    progress(total, total)
