"""`paceline.runner.launchers.local` with a disturbance inside the rank, for seeded_causes.py.

usage: python seeded_rank.py DISTURBANCE VALUE ARGUMENTS…

reader: each batch takes VALUE seconds longer to read. lock: a thread of pure Python computes all
the time, and takes the interpreter lock whenever it can (VALUE is not used). none: nothing.
"""

from __future__ import annotations

import runpy
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def slow_reader(seconds: float) -> None:
    from paceline.train.data.batches import Feed  # noqa: PLC0415

    feed: Any = Feed
    construct = feed.__init__

    def constructed(self: Any, make: Any) -> None:
        def slow(stopped: threading.Event) -> Iterator[Any]:
            for batch in make(stopped):
                time.sleep(seconds)  # the disturbance: each batch comes so much later
                yield batch

        construct(self, slow)

    feed.__init__ = constructed


def hold_lock(_seconds: float) -> None:
    threading.Thread(target=_compute, daemon=True).start()


def _compute() -> None:
    number = 0
    while True:
        number += 1


DISTURBANCES = {"reader": slow_reader, "lock": hold_lock}

if __name__ == "__main__":
    disturbance, value = sys.argv[1], float(sys.argv[2])
    if disturbance != "none":
        DISTURBANCES[disturbance](value)
    sys.argv = ["paceline.runner.launchers.local", *sys.argv[3:]]
    runpy.run_module("paceline.runner.launchers.local", run_name="__main__", alter_sys=True)
