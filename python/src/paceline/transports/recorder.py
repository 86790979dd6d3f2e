"""Who communicated what, when: each operation of each process group, as it goes.

Process groups are made by torch, from a registry, so they find the recorder of this process here
rather than being handed one. Without one in use, recording costs a function call.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.records.files import JsonlWriter
from paceline.records.rows import CommunicationRow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Gradients summed in memory that the ranks of a node share, or the threads of a rank.
SHARED_REDUCE = "shared_reduce"
_KEPT_ROWS = 4096  # until somebody flushes; an operation beyond that writes them itself


@dataclass(slots=True)
class Operation:
    """One operation of this rank under way; times are of this host's clock."""

    group: str
    ranks: int
    sequence: int
    name: str
    payload_bytes: int
    arrived_unix_s: float
    started_unix_s: float | None = None
    algorithm: str | None = None
    sent_bytes: int | None = None
    sent_messages: int | None = None

    def start(self) -> None:
        """Its turn has come: what was queued before it in its group is done."""
        self.started_unix_s = time.time()

    def end(self) -> None:
        """Record it as done now. An operation that fails is not recorded."""
        recorder = _in_use
        if recorder is not None:
            recorder.add(self, time.time())


class Recorder:
    """Keeps the rows of ended operations until `flush`, so that no operation waits for a disk."""

    def __init__(self, file: Path) -> None:
        self._writer = JsonlWriter(file)
        self._lock = threading.Lock()
        self._rows: list[CommunicationRow] = []
        self._sequences: dict[str, int] = {}

    def next_sequence(self, group: str) -> int:
        with self._lock:
            sequence = self._sequences.get(group, 0)
            self._sequences[group] = sequence + 1
        return sequence

    def add(self, operation: Operation, ended_unix_s: float) -> None:
        row = CommunicationRow(
            group=operation.group,
            ranks=operation.ranks,
            sequence=operation.sequence,
            operation=operation.name,
            algorithm=operation.algorithm,
            payload_bytes=operation.payload_bytes,
            arrived_unix_s=operation.arrived_unix_s,
            started_unix_s=operation.started_unix_s,
            ended_unix_s=ended_unix_s,
            sent_bytes=operation.sent_bytes,
            sent_messages=operation.sent_messages,
        )
        with self._lock:
            self._rows.append(row)
            full = len(self._rows) >= _KEPT_ROWS
        if full:
            self.flush()

    def flush(self) -> None:
        """Write what has ended so far."""
        with self._lock:
            rows, self._rows = self._rows, []
            for row in rows:
                self._writer.write(row)

    def close(self) -> None:
        self.flush()
        self._writer.close()


_in_use: Recorder | None = None


@contextmanager
def recording(file: Path) -> Iterator[Recorder]:
    """Record every operation of this process into `file` meanwhile."""
    global _in_use  # noqa: PLW0603  (see the module's first lines)
    recorder = _in_use = Recorder(file)
    try:
        yield recorder
    finally:
        _in_use = None
        recorder.close()


def is_recording() -> bool:
    """Whether an operation would be recorded now."""
    return _in_use is not None


def begin_operation(
    group: str, ranks: int, name: str, payload_bytes: int, arrived_unix_s: float | None = None
) -> Operation:
    """This rank comes to an operation, now unless another time is given.

    group: the same name on all its ranks, which come to its operations in the same order.
    payload_bytes: of this rank's tensors, uncompressed as they are handed over.
    """
    recorder = _in_use
    sequence = recorder.next_sequence(group) if recorder is not None else 0
    now_s = time.time() if arrived_unix_s is None else arrived_unix_s
    return Operation(group, ranks, sequence, name, payload_bytes, now_s)


def payload_bytes(tensors: Any) -> int:
    """Of a tensor, or of a list of them, of lists of them."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(payload_bytes(part) for part in tensors)
