"""Runs a program in a child of fork_server.py, and ends as it does.

usage: python -I -S forked.py SOCKET python|mpi4py PROGRAM ARGUMENTS…
       python -I -S forked.py SOCKET python -m MODULE ARGUMENTS…
"""

import json
import os
import signal
import socket
import sys

_STATUS_BYTES = 16


def inherited() -> list[int]:
    """Return the numbers of the files that the parent has passed on."""
    found = sorted(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208  (as below)
    return [number for number in found if os.path.exists(f"/proc/self/fd/{number}")]  # noqa: PTH110


def main() -> None:
    files = inherited() if sys.argv[3] == "-m" else [0, 1, 2]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(sys.argv[1])
        request = {
            "words": sys.argv[2:],
            "environment": dict(os.environ),
            "folder": os.getcwd(),  # noqa: PTH109  (this program must start quickly)
            "files": files,
        }
        socket.send_fds(server, [json.dumps(request).encode()], files)
        for number in files[3:]:  # sockets of the child end with it
            os.close(number)
        status = int(server.recv(_STATUS_BYTES) or -signal.SIGKILL)
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


main()
