"""Python's garbage collector, and large imports that stay until the process ends."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def permanent_objects() -> Iterator[None]:
    """Let the garbage collector ignore all that exists after the block, such as imported modules.

    It would search these objects many times while they are created, and again when the process
    ends. To import what a rank needs, and to exit, took 2.8 s of CPU time with these searches and
    1.55 s without (AMD EPYC, torch 2.13, 2026-11-22), for `paceline run` 0.78 s and 0.50 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
