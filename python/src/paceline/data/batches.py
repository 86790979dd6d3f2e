"""What a rank is fed, and a thread that prepares it ahead of the training."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from paceline.errors import TimedOut
from paceline.plan.schedule import flipped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from numpy.typing import NDArray

# How often a blocked thread looks whether it should end.
_LOOK_S = 0.2
_END_S = 30.0
_READY_S = 600.0


@dataclass(frozen=True, slots=True)
class Batch:
    """A rank's part of a global step: n samples, 0 if the last batch has fewer than ranks."""

    step: int
    epoch: int
    sample_ids: NDArray[np.int64]  # shape (n,)
    images: NDArray[np.uint8]  # shape (n, S, S, 3), RGB, already flipped; S = 0 without pixels
    labels: NDArray[np.int64]  # shape (n,)


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """Whose batches, of which size, prepared how."""

    image_size: int
    rank: int
    world_size: int
    decode_threads: int
    prefetch_batches: int
    pixels: bool = True


class Feed(Protocol):
    """A rank's batches, one for each global step, in order; to be closed."""

    def __iter__(self) -> Iterator[Batch]:
        """All batches. May be called once."""

    def close(self) -> None:
        """End the threads within a bound and free the memory; harmless when called again."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def flip(images: NDArray[np.uint8], seed: int, epoch: int, sample_ids: NDArray[np.int64]) -> None:
    """Mirror left to right, in place, the images that `plan.schedule.flipped` says."""
    for row, sample_id in enumerate(sample_ids.tolist()):
        if flipped(seed, epoch, sample_id):
            images[row] = images[row, :, ::-1].copy()


class Prefetcher:
    """Runs a generator of batches in a thread, at most `ahead` batches ahead of its consumer.

    An exception of the generator is raised where the batches are taken. The thread never outlives
    `close` by more than the batch it is at, and an abandoned Prefetcher holds up nothing: its
    thread is a daemon.
    """

    def __init__(self, make: Callable[[threading.Event], Iterator[Batch]], ahead: int) -> None:
        """make(stopped) yields the batches, and should return soon after `stopped` is set."""
        self._make = make
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(max(1, ahead))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        while (item := self._take()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Stop the thread and wait for it. Raises TimedOut if it does not end within 30 s."""
        self._stopped.set()
        while not self._ready.empty():  # so that a thread that waits for room goes on at once
            with suppress(queue.Empty):
                self._ready.get_nowait()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise TimedOut(
                f"the reading thread did not end within {_END_S:.0f} s; is the data set's disk or "
                "network storage stuck?"
            )

    def _take(self) -> Batch | BaseException | None:
        waited_s = 0.0
        while not self._stopped.is_set():
            try:
                return self._ready.get(timeout=_LOOK_S)
            except queue.Empty:
                waited_s += _LOOK_S
                if waited_s > _READY_S:
                    raise TimedOut(
                        f"no batch was ready within {_READY_S:.0f} s; is the data set's disk or "
                        "network storage stuck?"
                    ) from None
        return None

    def _run(self) -> None:
        last: BaseException | None = None
        try:
            for batch in self._make(self._stopped):
                if not self._put(batch):
                    return
        except BaseException as error:  # noqa: BLE001  (raised again in the consumer)
            last = error
        self._put(last)

    def _put(self, item: Batch | BaseException | None) -> bool:
        """Wait for room; False if the consumer has closed the feed."""
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False
