"""`python exec_guarded.py PARENT_PID[:SECONDS] COMMAND …`: become COMMAND, which ends when the
parent does.

A program of its own, run without the package, instead of a `preexec_fn`: after a fork of a process
with threads only exec is safe. SIGTERM, since mpirun then ends its ranks and daemons and removes
its session directory. SECONDS: after which it is killed, should it not have ended by then (an
mpirun waits for daemons on hosts that cannot be reached any more); without, it is not.
"""

import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; survives exec


def see_off(parent: int, grace_s: float) -> None:
    """Leave a process behind that kills this one `grace_s` after the parent, if it still lives."""
    try:
        watched, itself = os.pidfd_open(parent), os.pidfd_open(os.getpid())
    except OSError:
        return  # the parent is gone, or the kernel is older than 5.3
    if os.fork() > 0:
        os.close(watched)
        os.close(itself)
        os.wait()
        return
    if os.fork() > 0:  # COMMAND is to have no child that it does not know
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # whoever reads what COMMAND says waits until nobody can write
        os.dup2(nothing, descriptor)
    select.select([watched, itself], [], [])
    if not select.select([itself], [], [], grace_s)[0]:
        signal.pidfd_send_signal(itself, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    pid, _, grace_s = sys.argv[1].partition(":")
    parent, command = int(pid), sys.argv[2:]
    if grace_s:
        see_off(parent, float(grace_s))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)  # the parent died before the call
    try:
        os.execvp(command[0], command)  # noqa: S606  (argv, no shell)
    except OSError as error:
        print(f"paceline: cannot start {command[0]}: {error}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
