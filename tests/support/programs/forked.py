"""Runs a program in a child of fork_server.py, and ends as it does.

usage: python -I -S forked.py SOCKET python|mpi4py PROGRAM ARGUMENTS…
"""

import json
import os
import signal
import socket
import sys

_STATUS_BYTES = 16


def main() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(sys.argv[1])
        request = {
            "words": sys.argv[2:],
            "environment": dict(os.environ),
            "folder": os.getcwd(),  # noqa: PTH109  (this program must start quickly)
        }
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        status = int(server.recv(_STATUS_BYTES) or -signal.SIGKILL)
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


main()
