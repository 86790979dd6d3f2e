"""Exchange bytes through the messages of Spark's barrier tasks: strings, through the driver.

Every call goes to Spark's barrier coordinator. It is answered when a poll of the task's JVM sees
that all tasks have called (BarrierTaskContext.runBarrier sleeps 1 s between polls), so the number
of calls determines the time. The size of a message is limited because the coordinator holds the
texts of all tasks and sends all of them to each.

torch creates process groups from a registry, so a group cannot receive the task's `allGather` as an
argument, and a rank's context contains only values. So the job registers the call here, once,
before training.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks, PacelineError, RankFailed
from paceline.transports.base import PeerLost

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

AllGather = Callable[[str], list[str]]

# Total of all tasks' messages in one call: a quarter of spark.rpc.message.maxSize, 128 MiB.
TEXT_BYTES = 32 * 2**20
_ALIGNMENT = 48  # a multiple of every type's size, and of the 3 bytes that base64 encodes at once
_HEADER_ENDS = "|"

_offered: AllGather | None = None


def offer(all_gather: AllGather) -> None:
    """Make the barrier task's `allGather` available to this process's transport."""
    global _offered  # noqa: PLW0603  (see the module's first lines)
    _offered = all_gather


def offered() -> AllGather:
    """Return the registered call. Raises EnvironmentLacks outside of a barrier task."""
    if _offered is None:
        raise EnvironmentLacks(
            'transport "spark-allgather": this process is not a barrier task of Spark; start the '
            "training with spark-submit spark-jobs/train.py"
        )
    return _offered


def chunk_bytes(tasks: int) -> int:
    """Return the bytes that each of `tasks` sends in one call; base64 encodes three bytes as four
    characters."""
    return max(_ALIGNMENT, TEXT_BYTES * 3 // 4 // tasks // _ALIGNMENT * _ALIGNMENT)


def calls_for(size: int, tasks: int) -> int:
    """Return the number of calls for `size` bytes of each task; at least one."""
    return max(1, -(-size // chunk_bytes(tasks)))


class Messages:
    """Exchanges bytes with the other tasks; every task must make the same calls in the same
    order."""

    def __init__(self, all_gather: AllGather, rank: int, tasks: int) -> None:
        self.sent_bytes = 0  # of text, so far
        self.sent_messages = 0
        self._all_gather = all_gather
        self._rank = rank
        self._tasks = tasks
        self._operations = 0

    def exchange(
        self, name: str, own: memoryview, sizes: Sequence[int]
    ) -> Iterator[tuple[int, list[bytes]]]:
        """Yield (offset, bytes of each task at that offset) until all `sizes` are complete.

        own: this task's bytes. sizes: number of bytes of each task, by rank; 0 for a task that only
        receives. Raises PeerLost if Spark ends the exchange, RankFailed if the tasks are at
        different operations.
        """
        self._operations += 1
        step = chunk_bytes(self._tasks)
        for call in range(calls_for(max(sizes), self._tasks)):
            start = call * step
            header = f"{name} {self._operations}.{call}"
            texts = self._call(header, own[start : start + step])
            expected = [max(0, min(size - start, step)) for size in sizes]
            yield (
                start,
                [self._checked(text, header, n) for text, n in zip(texts, expected, strict=True)],
            )

    def _call(self, header: str, data: memoryview) -> list[str]:
        text = header + _HEADER_ENDS + base64.b64encode(data).decode("ascii")
        self.sent_bytes += len(text)
        self.sent_messages += 1
        try:
            texts = self._all_gather(text)
        except PacelineError:
            raise
        except Exception as error:
            raise PeerLost(
                f"rank {self._rank}: Spark ended the barrier tasks' messages at {header!r}: "
                f"{type(error).__name__}: {error}; another task failed, look at its log"
            ) from error
        if len(texts) != self._tasks:
            raise PeerLost(
                f"rank {self._rank}: expected the messages of {self._tasks} barrier tasks at "
                f"{header!r}, Spark gave {len(texts)}"
            )
        return texts

    def _checked(self, text: str, header: str, size: int) -> bytes:
        theirs, _, content = text.partition(_HEADER_ENDS)
        data = base64.b64decode(content, validate=True)
        if theirs != header or len(data) != size:
            raise RankFailed(
                f"rank {self._rank} is at {header!r} and expected {size} bytes, another rank sent "
                f"{len(data)} at {theirs!r}: the ranks make different calls. This is a defect of "
                "the strategy; please report it",
                self._rank,
            )
        return data
