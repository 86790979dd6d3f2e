"""Batches of a rank, and a thread that prepares them ahead of the training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from paceline.base.errors import TimedOut
from paceline.plan.trials.sample_order import SampleRandom

_POLL_S = 0.2  # interval at which a blocked thread checks whether it should end
_END_S = 30.0
_READY_S = 600.0
_STUCK = "is the data set's disk or network storage stuck?"
_KEPT_READY = 2  # batches


Augment = Callable[["NDArray[Any]", SampleRandom], "NDArray[Any]"]


def is_image(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Return whether a sample is an image: uint8 of shape (height, width, 3)."""
    return dtype == np.uint8 and len(shape) == 3 and shape[-1] == 3


def mirror_at_random(image: NDArray[Any], random: SampleRandom) -> NDArray[Any]:
    """Mirror half of the images left to right."""
    return image[:, ::-1] if random.coin else image


@dataclass(frozen=True, slots=True)
class Batch:
    """A rank's part of a global step: n samples, 0 if the last batch has fewer than ranks."""

    step: int
    epoch: int
    sample_ids: NDArray[np.int64]  # shape (n,)
    inputs: NDArray[Any] | None  # shape (n, ...), augmented; None in later pipeline stages
    targets: NDArray[Any]  # shape (n, ...)


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """Rank, and preparation of the batches.

    with_inputs: False for pipeline stages after the first, whose batches have only sample ids and
    targets. augment, augment_target: random transforms of an input and of a target; None leaves
    them unchanged.
    """

    rank: int
    world_size: int
    decode_threads: int = 1
    with_inputs: bool = True
    augment: Augment | None = None
    augment_target: Augment | None = None


def augment(
    inputs: NDArray[Any] | None,
    targets: NDArray[Any],
    options: FeedOptions,
    seed: int,
    epoch: int,
    sample_ids: NDArray[np.int64],
) -> None:
    """Replace each input and target by its random transform, in place."""
    pairs = ((inputs, options.augment), (targets, options.augment_target))
    for values, transform in pairs:
        if values is None or transform is None:
            continue
        for row, sample_id in enumerate(sample_ids.tolist()):
            given = values[row]
            changed = transform(given, SampleRandom(seed, epoch, sample_id))
            if changed is not given:
                values[row] = changed.copy()


class Feed:
    """A rank's batches, one per global step, in order, prepared by a thread.

    An exception of the thread is raised where the batches are taken. The thread ends with `close`
    at the latest after the batch that it prepares, and it is a daemon, so an abandoned feed does
    not keep the process alive. A feed can be iterated once, and is a context manager.
    """

    def __init__(self, make: Callable[[threading.Event], Iterator[Batch]]) -> None:
        """Start the thread: make(stopped) yields the batches, a few of which are kept ready.

        `make` should return soon after `stopped` is set.
        """
        self._make = make
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(_KEPT_READY)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        while (item := self._take()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and wait for it. Raises TimedOut if it does not end within 30 s."""
        self._stopped.set()
        while not self._ready.empty():  # a thread that waits for room then continues at once
            with suppress(queue.Empty):
                self._ready.get_nowait()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise TimedOut(f"the reading thread did not end within {_END_S:.0f} s; {_STUCK}")

    def _take(self) -> Batch | BaseException | None:
        waited_s = 0.0
        while not self._stopped.is_set():
            try:
                return self._ready.get(timeout=_POLL_S)
            except queue.Empty:
                waited_s += _POLL_S
                if waited_s > _READY_S:
                    raise TimedOut(
                        f"no batch was ready within {_READY_S:.0f} s; {_STUCK}"
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
        """Wait for room; return False if the consumer has closed the feed."""
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False
