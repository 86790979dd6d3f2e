"""Processes of this host, from /proc: parents, command lines, and their orderly end.

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
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.base.host import cleaner, exec_guarded
from paceline.collectives.host import read_stat, wait_until

# The supervisor sets it for the launcher; everything that the launcher starts here inherits it.
TOKEN_VARIABLE = "PACELINE_TRIAL_TOKEN"  # noqa: S105  (marks processes, gives no access)
# A rank answers it with the stacks of its threads.
STACKS_SIGNAL = signal.SIGUSR2

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_KILL_S = 5.0
SIGNAL_BASE = 128  # exit status of a shell for a command that a signal ended


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


def answers(pid: int, number: signal.Signals, file: Path) -> bool:
    """Return whether a process handles the signal and has the file open, to write its answer.

    A rank that still imports does not: the signal would end it. Nor does another process that a
    status names, as nobody can take a file of it for this one: the file has no other name, and
    belongs to the user of the process.
    """
    try:
        own, user = file.lstat(), Path(f"/proc/{pid}").stat().st_uid
        if not stat.S_ISREG(own.st_mode) or own.st_nlink != 1 or own.st_uid != user:
            return False
        lines = Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
        return bool(caught >> (number - 1) & 1) and _has_open(pid, own)
    except OSError:
        return False  # it has ended, or belongs to another user


def _has_open(pid: int, file: os.stat_result) -> bool:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if os.path.samestat(entry.stat(), file):
                return True
    return False


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


# What these signals mean if Paceline has not sent them. Others are named only.
_KILLS: Mapping[int, str] = {
    signal.SIGKILL: "a person, a scheduler, or the kernel for lack of memory"
}
_CRASHES: Mapping[int, str] = {
    signal.SIGSEGV: "compiled code used memory that it does not own",
    signal.SIGBUS: "memory could not be read or written: a file was cut off, or no space was left "
    "for shared memory",
    signal.SIGABRT: "compiled code gave up",
    signal.SIGILL: "compiled code is for another processor",
    signal.SIGFPE: "compiled code divided by zero",
}


def ended_by_signal(number: int) -> str:
    """Return the words about a process that was ended by this signal."""
    if number in _KILLS:
        return f"was killed by {named_signal(number)}: by {_KILLS[number]}"
    if number in _CRASHES:
        return f"crashed with {named_signal(number)}: {_CRASHES[number]}"
    return f"was ended by {named_signal(number)}"


def named_signal(number: int) -> str:
    """Return name and number of a signal, such as "SIGKILL (signal 9)"; some have no name."""
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
