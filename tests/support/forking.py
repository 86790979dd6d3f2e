"""Start ranks by forking a Python that has imported torch, which takes them seconds to import."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
# What libraries read while they are loaded, so that it cannot change after a fork. Ranks of the
# tests get the same values.
LOADED_WITH = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Programs import tests.…; mutation testing puts a copy of the package on the path.
PYTHON_PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
_END_S = 20.0
# Takes the place of sys.executable: modules and scripts are ranks, and start as forks.
_PYTHON_OF_RANKS = """#!/bin/sh
case $1 in
  -m | /*) export FORKED_BY="$0"; exec {forked} "$@" ;;
esac
exec {python} "$@"
"""


class ForkServer:
    """Gives commands that replace `python` and `python -m mpi4py`.

    python_of_ranks: a program that replaces sys.executable where ranks are started.
    """

    def __init__(self, socket: Path) -> None:
        self._stub = [sys.executable, "-I", "-S", str(PROGRAMS / "forked.py"), str(socket)]
        self.python_of_ranks = socket.with_name("python")
        words = {"forked": shlex.join(self.python), "python": shlex.quote(sys.executable)}
        self.python_of_ranks.write_text(_PYTHON_OF_RANKS.format(**words), "utf-8")
        self.python_of_ranks.chmod(0o700)

    @property
    def python(self) -> list[str]:
        """Return the words in front of a program's path and its arguments."""
        return [*self._stub, "python"]

    @property
    def python_m_mpi4py(self) -> list[str]:
        return [*self._stub, "mpi4py"]


@contextmanager
def fork_server(enter: Sequence[str] = ()) -> Iterator[ForkServer]:
    """Run a fork server; the end of the block ends it and all ranks.

    enter: words in front of its command, such as those that enter a host of a lab. Ranks run where
    the server runs.
    """
    # mpi4py finds its MPI library by this variable, as mpirun sets it
    libraries = Path(sys.executable).parents[1] / "lib"
    environment = {
        **os.environ,
        **LOADED_WITH,
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": PYTHON_PATH,
    }
    with tempfile.TemporaryDirectory(prefix="forks-") as folder:  # a socket's path must be short
        socket = Path(folder, "socket")
        with subprocess.Popen(
            [*enter, sys.executable, PROGRAMS / "fork_server.py", socket],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                yield ForkServer(socket)
            finally:
                assert process.stdin is not None
                process.stdin.close()
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
