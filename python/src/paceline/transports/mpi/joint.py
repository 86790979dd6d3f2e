"""Several operations as one, for torch's coalescing."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work

from paceline.transports.mpi.buffers import joined
from paceline.transports.mpi.reductions import Carried

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.transports.work import PendingWork

# Untyped here, as in paceline.transports.work.
_Work: Any = Work


class JointWork(_Work):  # type: ignore[misc]  # subclasses Any, see above
    """Ends when all its works have; its future holds the list of their futures."""

    def __init__(self, works: Sequence[PendingWork]) -> None:
        super().__init__()
        self._works = list(works)
        self._future: torch.futures.Future[Any] = torch.futures.collect_all(
            [work.get_future() for work in self._works]
        )

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all, together no longer than `timeout` (None: each as long as its group says).

        Raises what went wrong with the first that failed.
        """
        asked_s = timeout.total_seconds() if timeout is not None else 0.0
        deadline = time.monotonic() + asked_s
        for work in self._works:
            left_s = max(deadline - time.monotonic(), 1e-3) if asked_s else 0.0
            work.wait(timedelta(seconds=left_s))
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


def of_one_type(tensors: list[Tensor]) -> list[Tensor]:
    """A flat copy of several tensors of one type, which costs one exchange; else `tensors`."""
    if len(tensors) > 1 and len({(t.dtype, t.device) for t in tensors}) == 1:
        return [joined(tensors)]
    return tensors


def carried_in_all(carried: Sequence[Carried]) -> Carried | None:
    """Several all-reduces as one operation."""
    if len(carried) <= 1:
        return carried[0] if carried else None
    return Carried(
        algorithm=", ".join(dict.fromkeys(each.algorithm for each in carried)),
        sent_bytes=_total([each.sent_bytes for each in carried]),
        sent_messages=_total([each.sent_messages for each in carried]),
    )


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
