"""A Python that has imported torch and forks for each request: a rank starts in milliseconds.

usage: fork_server.py SOCKET

Writes "ready" to standard output, and ends with its standard input. A request comes from
forked.py; its connection carries the exit status back. When the client has gone, its child is
killed. The child has the client's environment, directory and open files, and runs the program as
`python PROGRAM …`, `python -m MODULE …` or `python -m mpi4py PROGRAM …` would. Only variables that
libraries read while they are loaded (OMP_NUM_THREADS, LD_LIBRARY_PATH) must be those of the server.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# What ranks import, except what depends on their environment (mpi4py, paceline.mpi) and what starts
# threads (pyarrow): a child has only the thread that forks.
import numpy as np  # noqa: F401
import torch._dynamo
import torch.distributed
import torch.nn.parallel  # noqa: F401

import paceline.train.rank.peers
import paceline.train.workloads.build  # noqa: F401
from paceline.plan.spec.extensions import STRATEGIES

_REQUEST_BYTES, _MOST_FILES = 1 << 20, 16


class Server:
    """Forks a child for each client, and watches both."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, tuple[int, int, socket.socket]] = {}  # by either descriptor

    def next_program(self) -> dict[str, Any] | None:
        """Serve until the end. Returns a request in each child, None in the server."""
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    self._kill_all()
                    return None
                if key.fileobj is self._listener:
                    request = self._fork()
                    if request is not None:
                        return request
                elif key.fd in self._clients:
                    self._end_of(key.fd)

    def _fork(self) -> dict[str, Any] | None:
        client, _ = self._listener.accept()
        content, received, _, _ = socket.recv_fds(client, _REQUEST_BYTES, _MOST_FILES)
        pid = os.fork()
        if pid == 0:
            client.close()
            self._close()
            request: dict[str, Any] = json.loads(content)
            renumber(dict(zip(request["files"], received, strict=True)))
            return request
        for file in received:
            os.close(file)
        process = os.pidfd_open(pid)
        for watched in (process, client.fileno()):
            self._selector.register(watched, selectors.EVENT_READ)
            self._clients[watched] = (pid, process, client)
        return None

    def _end_of(self, descriptor: int) -> None:
        """Reap a child that has ended, or whose client has."""
        pid, process, client = self._clients[descriptor]
        if descriptor == client.fileno():
            signal.pidfd_send_signal(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):  # the client has gone
            client.send(str(status).encode())
        for watched in (process, client.fileno()):
            self._selector.unregister(watched)
            del self._clients[watched]
        os.close(process)
        client.close()

    def _kill_all(self) -> None:
        for _, process, _ in self._clients.values():
            signal.pidfd_send_signal(process, signal.SIGKILL)

    def _close(self) -> None:
        """Keep the server's descriptors from a child."""
        self._selector.close()
        self._listener.close()
        for descriptor, (_, process, client) in self._clients.items():
            if descriptor == process:
                os.close(process)
                client.close()


def renumber(files: Mapping[int, int]) -> None:
    """Give open files the numbers that they have in the client. files: their own, by these."""
    free = 1 + max(*files, *files.values())
    copies = {number: fcntl.fcntl(own, fcntl.F_DUPFD, free) for number, own in files.items()}
    for own in files.values():
        os.close(own)
    for number, copy in copies.items():
        os.dup2(copy, number)
        os.close(copy)


def run(request: dict[str, Any]) -> None:
    """Run the program of a request, as a new interpreter would."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    # Ranks that this one starts are forks, too.
    sys.executable = os.environ.pop("FORKED_BY", sys.executable)
    module, *words = request["words"]
    if module == "python" and words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif module == "mpi4py":
        sys.argv = ["-m", *words]
        runpy.run_module("mpi4py", run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def end() -> NoReturn:
    """End as an interpreter does, except that what was imported before the fork is not destroyed.

    Destroying it takes 0.2 s of CPU time, because it copies shared pages. With MPI the
    interpreter must do it: then mpi4py ends MPI.
    """
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    STRATEGIES.all()  # keeps what packages declare
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "expected no other threads"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        gc.freeze()  # children share these pages
        print("ready", flush=True)
        request = Server(listener).next_program()
    if request is not None:
        try:
            run(request)
        except SystemExit as ended:
            if ended.code:
                raise
        if "mpi4py" not in sys.modules:
            end()


main()
