"""`python exec_guarded.py PARENT_PID COMMAND …`: become COMMAND, which ends when the parent does.

A program of its own, run without the package, instead of a `preexec_fn`: after a fork of a process
with threads only exec is safe. SIGTERM, since mpirun then ends its ranks and daemons and removes
its session directory.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; survives exec


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
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
