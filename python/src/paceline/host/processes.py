"""Processes of this host as /proc tells of them: who lives, since when, who belongs to a trial.

A trial's processes are found by a token in their environment, as Jenkins' ProcessTreeKiller does:
unlike a process group or a walk over parents it finds those that made a session of their own
(mpirun's ranks) and those whose parent has died.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Set by `supervise` for the launcher; inherited by everything it starts on this host.
TOKEN_VARIABLE = "PACELINE_TRIAL_TOKEN"  # noqa: S105  (marks processes, opens nothing)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_START_TIME_FIELD = 22  # proc_pid_stat(5), counted from 1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# A start time is computed from two clocks; a tick is 10 ms.
_SAME_START_S = 1.0


def _stat_fields(pid: int) -> list[str] | None:
    """Fields 3 and up of /proc/<pid>/stat; the name before them may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def process_started_unix_s(pid: int) -> float | None:
    """When `pid` was started, to about 10 ms; None if there is no such process."""
    fields = _stat_fields(pid)
    if fields is None:
        return None
    since_boot_s = int(fields[_START_TIME_FIELD - 3]) / _TICKS_PER_S
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def parent_of(pid: int) -> int | None:
    """The parent's pid; None if there is no such process."""
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[1])


def command_line_of(pid: int) -> list[str]:
    """The arguments `pid` was started with; [] if there is no such process."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in raw.removesuffix(b"\0").split(b"\0")]


def is_alive(pid: int, started_unix_s: float | None = None) -> bool:
    """Whether `pid` runs: a zombie does not, nor does a later process with a reused pid."""
    fields = _stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return False
    if started_unix_s is None:
        return True
    now_started = process_started_unix_s(pid)
    return now_started is not None and abs(now_started - started_unix_s) < _SAME_START_S


def pids_with_token(token: str) -> set[int]:
    """Living processes of ours that carry `token`."""
    wanted = f"{TOKEN_VARIABLE}={token}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue  # gone meanwhile, or another user's
        if wanted in environment.split(b"\0") and is_alive(int(entry.name)):
            found.add(int(entry.name))
    return found - {os.getpid()}


def send(pids: Iterable[int], signal_number: signal.Signals) -> None:
    """Signal each of `pids` that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal_number)


def wait_until(condition: Callable[[], bool], limit_s: float, poll_s: float = 0.05) -> bool:
    """Poll `condition` for at most `limit_s`; whether it came true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def die_with_parent(parent: int, signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it ends (prctl(2)).

    parent: the pid it must have; if that one died before the call, this process ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)
