"""Run a program for a while."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen


@contextmanager
def running(program: str, *arguments: object, **environment: str) -> Iterator[Popen[str]]:
    """Run a program of Python, which is killed at the end of the block."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    variables = {**os.environ, **environment}
    with Popen(command, env=variables, stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
