"""`python cleaner.py PARENT_PID NAME=VALUE FOLDER ...`: clean up if the parent dies.

The processes with the environment variable NAME=VALUE get some seconds to end by themselves, then
SIGKILL. Afterwards the folders are removed. A parent that cleans up itself kills this program.

It runs without the package and imports little, so that it starts quickly and needs little memory.
"""

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

GRACE_S = 8.0  # Spark's shutdown hooks take some seconds
KILL_S = 5.0
POLL_S = 0.2


def wait_for_end(pid: int) -> None:
    """Wait until the parent has ended. Raises OSError on kernels before 5.3."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    if os.getppid() == pid:
        select.select([handle], [], [])


def marked(variable: bytes) -> list[int]:
    """Return the running processes with this variable."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue  # it has ended, or belongs to another user
        if variable in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


def end_marked(variable: bytes) -> None:
    """Wait for the end of the marked processes, and kill those that do not end."""
    kill_at_s = time.monotonic() + GRACE_S
    while (left := marked(variable)) and time.monotonic() < kill_at_s + KILL_S:
        if time.monotonic() > kill_at_s:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue  # it has ended meanwhile
        time.sleep(POLL_S)


def main() -> None:
    pid, variable, *folders = sys.argv[1:]
    try:
        wait_for_end(int(pid))
    except OSError:
        return
    end_marked(os.fsencode(variable))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
