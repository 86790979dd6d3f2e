"""`python exec_guarded.py PARENT_PID[:SECONDS] COMMAND ...`: become it and end with the parent.

It is a program of its own, run without the package, instead of a `preexec_fn`: after a fork of a
process with threads, only exec is safe. The kernel sends SIGTERM when the parent ends: mpirun then
ends its ranks and daemons and removes its session directory. With SECONDS, the command is killed if
it still runs that long after the parent's end, for example an mpirun that waits for daemons on
hosts that cannot be reached any more.
"""

import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; survives exec


def start_killer(parent: int, grace_s: float) -> None:
    """Start a process that kills this one `grace_s` after the parent's end, if it still runs."""
    try:
        parent_handle, own_handle = os.pidfd_open(parent), os.pidfd_open(os.getpid())
    except OSError:
        return  # the parent has ended, or the kernel is older than 5.3
    if os.fork() > 0:
        os.close(parent_handle)
        os.close(own_handle)
        os.wait()
        return
    if os.fork() > 0:  # a second fork, so that COMMAND has no unexpected child
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # a reader of COMMAND's output waits until all writers have closed
        os.dup2(null, descriptor)
    select.select([parent_handle, own_handle], [], [])
    if not select.select([own_handle], [], [], grace_s)[0]:
        signal.pidfd_send_signal(own_handle, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    pid, _, grace_s = sys.argv[1].partition(":")
    parent, command = int(pid), sys.argv[2:]
    if grace_s:
        start_killer(parent, float(grace_s))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)  # the parent ended before the call
    try:
        os.execvp(command[0], command)  # noqa: S606  (argv, no shell)
    except OSError as error:
        print(f"paceline: cannot start {command[0]}: {error}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
