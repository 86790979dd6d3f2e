"""Processes of this host, from /proc: identity, parents, command lines, and their orderly end.

The processes of a trial carry a token in their environment, as with Jenkins' ProcessTreeKiller.
Unlike a process group or a walk over parents, a token also finds processes that started a session
of their own (mpirun's ranks) and processes whose parent has died. A guard that adopts orphans
(PR_SET_CHILD_SUBREAPER) would find them too, but only as long as it lives itself: nothing would
find what is left after a SIGKILL of the guard.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from paceline.host import cleaner, exec_guarded

# The supervisor sets it for the launcher; everything that the launcher starts here inherits it.
TOKEN_VARIABLE = "PACELINE_TRIAL_TOKEN"  # noqa: S105  (marks processes, gives no access)
# A rank answers it with the stacks of its threads.
STACKS_SIGNAL = signal.SIGUSR2

PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TICKS_PER_S, _PAGE_BYTES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
_KILL_S = 5.0
UNKNOWN_BOOT = "unknown"
SIGNAL_BASE = 128  # exit status of a shell for a command that a signal ended


@dataclass(frozen=True, slots=True)
class Stat:
    """Figures of /proc/PID/stat (proc_pid_stat(5)), as of one moment."""

    is_running: bool  # False for a zombie: it has ended, and its parent has not collected it yet
    parent: int
    start_ticks: int  # clock ticks since boot; with the process id, it identifies the process
    cpu_s: float  # of all threads, and of the children that the process has waited for
    threads: int
    rss_bytes: int

    @property
    def started_unix_s(self) -> float:
        """Return the start time, to about 10 ms.

        psutil's is up to a second off, because it adds the ticks to a boot time in whole seconds.
        """
        since_boot_s = self.start_ticks / _TICKS_PER_S
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def read_stat(pid: int, proc: Path = PROC) -> Stat | None:
    """Read /proc/PID/stat; None if there is no such process."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:  # noqa: PTH123  (each second, each process)
            # The name in brackets may contain anything. The third field, the state, follows it.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Stat(
        is_running=fields[0] not in (b"Z", b"X"),
        parent=int(fields[1]),
        start_ticks=int(fields[19]),
        cpu_s=sum(map(int, fields[11:15])) / _TICKS_PER_S,
        threads=int(fields[17]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


@cache
def boot_id() -> str:
    """Return the identifier of the machine's current boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return UNKNOWN_BOOT


@dataclass(frozen=True, slots=True)
class Process:
    """The identity of a process on this machine.

    The start distinguishes it from a later process with its pid. It is counted from the boot, so a
    step of the wall clock changes nothing.
    """

    pid: int
    start_ticks: int  # clock ticks since boot
    boot_id: str = field(default_factory=boot_id)

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the identity of `pid`; None if there is no such process."""
        stat = read_stat(pid)
        return None if stat is None else cls(pid, stat.start_ticks)

    @classmethod
    def current(cls) -> Process:
        process = cls.of(os.getpid())
        assert process is not None, "this process exists"
        return process

    def is_alive(self) -> bool:
        stat = read_stat(self.pid)
        return (
            stat is not None
            and stat.is_running
            and (stat.start_ticks, boot_id()) == (self.start_ticks, self.boot_id)
        )


def process_started_unix_s(pid: int) -> float | None:
    """Return when `pid` was started, to about 10 ms; None if there is no such process."""
    stat = read_stat(pid)
    return None if stat is None else stat.started_unix_s


def parent_of(pid: int) -> int | None:
    """Return the parent's pid; None if there is no such process."""
    stat = read_stat(pid)
    return None if stat is None else stat.parent


def command_line_of(pid: int) -> list[str]:
    """Return the arguments that `pid` was started with; [] if there is no such process."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in raw.removesuffix(b"\0").split(b"\0")]


def is_alive(pid: int) -> bool:
    """Return whether a process with this id runs, whichever it is."""
    stat = read_stat(pid)
    return stat is not None and stat.is_running


def pids_with_token(token: str) -> set[int]:
    """Return the running processes of this user that carry `token`."""
    return pids_with_variable(TOKEN_VARIABLE, token)


def pids_with_variable(name: str, value: str) -> set[int]:
    """Return the other running processes that were started with this environment variable."""
    marked = cleaner.marked(f"{name}={value}".encode())
    return {pid for pid in marked if is_alive(pid)} - {os.getpid()}


def send(pids: Iterable[int], signal_number: signal.Signals) -> None:
    """Signal each of `pids` that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal_number)


def wait_until(condition: Callable[[], bool], limit_s: float, poll_s: float = 0.05) -> bool:
    """Poll `condition` for at most `limit_s`; return whether it became true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def kill_until_gone(find: Callable[[], set[int]], limit_s: float) -> bool:
    """Send SIGKILL to the processes that `find` returns until there are none.

    Return False if some are left after `limit_s`.
    """

    def none_left() -> bool:
        left = find()
        send(left, signal.SIGKILL)
        return not left

    return wait_until(none_left, limit_s)


def shell_status(status: int) -> int:
    """Return the exit status that a shell gives to one of subprocess, negative after a signal."""
    return status if status >= 0 else SIGNAL_BASE - status


def end_processes(processes: Sequence[subprocess.Popen[bytes]], grace_s: float) -> list[int]:
    """Send SIGTERM to every process, and SIGKILL to those that still run after `grace_s`.

    Return the exit statuses; that of SIGKILL for a process that does not end within some seconds.
    """
    for process in processes:
        process.terminate()  # does nothing if it has ended
    wait_until(lambda: all(p.poll() is not None for p in processes), grace_s)
    for process in processes:
        process.kill()
    # SIGKILL does not end a process in uninterruptible sleep, for example on a lost file server.
    wait_until(lambda: all(p.poll() is not None for p in processes), _KILL_S)
    return [-signal.SIGKILL if p.returncode is None else p.returncode for p in processes]


def guarded(argv: Sequence[str], kill_after_s: float | None = None) -> list[str]:
    """Return a command that becomes `argv` and gets SIGTERM when the calling thread ends.

    kill_after_s: send SIGKILL if it still runs that long after the end of this process.
    """
    limit = "" if kill_after_s is None else f":{kill_after_s:g}"
    # The source instead of the path: the package may be in an archive.
    guard = [sys.executable, "-I", "-S", "-c", inspect.getsource(exec_guarded)]
    return [*guard, f"{os.getpid()}{limit}", *argv]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (prctl(2)).

    parent: the expected pid of the parent; if it has died already, this process ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
