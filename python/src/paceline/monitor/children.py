"""Child programs that end with this process, however it ends."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks
from paceline.host.processes import end_processes, guarded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_END_S = 10.0
_LOG_LINES = 5


@dataclass(frozen=True, slots=True)
class Child:
    """A running program and the file of its output."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise EnvironmentLacks if it has ended."""
        status = self.process.poll()
        if status is None:
            return
        lines = self.log.read_text("utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        raise EnvironmentLacks(
            f"{self.name} ended by itself with exit status {status}; its output is in {self.log}:\n"
            + "\n".join(lines)
        )


@contextmanager
def running(
    name: str, argv: list[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[Child]:
    """Run a program within the block, then end it; the kernel ends it if this process dies."""
    log_path = folder / f"{name.lower()}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            guarded(argv),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must reach only this process
            env={**os.environ, **environment},
        )
    try:
        yield Child(name, process, log_path)
    finally:
        end_processes([process], _END_S)
