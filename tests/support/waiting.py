"""Wait for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from subprocess import Popen
from typing import TypeVar

_POLL_S = 0.05
_Found = TypeVar("_Found")


def wait_for(
    condition: Callable[[], _Found | None], limit_s: float, what: str, *running: Popen[bytes]
) -> _Found:
    """Return the first true result of `condition`; fail if there is none within the limit.

    running: processes whose end before that is a failure, too.
    """
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert all(process.poll() is None for process in running), f"{what}: a process has ended"
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        time.sleep(_POLL_S)
    return found
