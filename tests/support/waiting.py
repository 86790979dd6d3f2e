"""Wait for what another process or thread does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
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


def pid_after_steps(rank: Path, steps: int = 1) -> int | None:
    """Return the process id of a rank, by its folder, once it has recorded so many steps."""
    rows, status = rank / "steps.jsonl", rank / "status.json"
    if not rows.exists() or not status.exists() or rows.read_bytes().count(b"\n") < steps:
        return None
    return int(json.loads(status.read_text())["pid"])
