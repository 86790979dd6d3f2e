"""A command whose processes and temporary files can be found, whoever started them."""

from __future__ import annotations

import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.commands import start_command

from paceline.base.host.processes import command_line_of, pids_with_variable, send

# Sidecars get no variable whose name begins with PACELINE_.
VARIABLE = "SOAK_COMMAND"
_SHARED_MEMORY = Path("/dev/shm")
_FOLDERS = (f"{_SHARED_MEMORY}/", f"{tempfile.gettempdir()}/")
# The project or its environment can be in the temporary folder, and processes map libraries.
_NOT_TEMPORARY = (Path(sys.prefix).resolve(), Path(__file__).resolve().parents[2])


@dataclass
class MarkedCommand:
    """A command started with a variable that all its descendants inherit.

    The variable also finds processes that started a session of their own or lost their parent, and
    no process of another command on the same machine.
    """

    argv: Sequence[str]
    environment: dict[str, str]
    folder: Path
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    files: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._started_unix_s = time.time()
        self.temporary = self.folder / f"tmp-{self.token}"
        self.temporary.mkdir()
        self.log = self.folder / f"log-{self.token}.txt"
        variables = {VARIABLE: self.token, "TMPDIR": str(self.temporary)}
        self.process = start_command(
            self.argv, self.log, env={**self.environment, **variables}, cwd=self.folder
        )

    def pids(self) -> set[int]:
        """Return the running processes of the command, itself included."""
        return pids_with_variable(VARIABLE, self.token)

    def look(self) -> set[int]:
        """Note which temporary files the processes use; return the processes."""
        pids = self.pids()
        for pid in pids:
            self.files |= {file for file in _temporary_files(pid) if self._is_new(file)}
        return pids

    def _is_new(self, file: Path) -> bool:
        """Return whether the command made a file outside of its folder."""
        if any(file.is_relative_to(known) for known in (self.folder, *_NOT_TEMPORARY)):
            return False
        try:
            return file.stat().st_ctime > self._started_unix_s
        except OSError:
            return False

    def wait(self, limit_s: float, until: Callable[[], bool] = lambda: False) -> int | None:
        """Wait for the end or for a condition; return the exit status, None without an end.

        Raises TimeoutError after `limit_s`.
        """
        deadline_s = time.monotonic() + limit_s
        while (code := self.process.poll()) is None and not until():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.argv[-1]}: expected an end within {limit_s:g} s")
            self.look()
            time.sleep(0.1)
        return code

    def left(self) -> list[str]:
        """Return what of the command is still there: processes and temporary files."""
        processes = [f"{pid} {' '.join(command_line_of(pid))}" for pid in sorted(self.pids())]
        files = [*self.files, *self.temporary.rglob("*")]
        return [
            *processes,
            *sorted(str(file) for file in files if file.is_file() or file.is_socket()),
        ]

    def end(self) -> None:
        """Kill what is left and free its shared memory, so that the next test starts clean."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=30)
        send(self.pids(), signal.SIGKILL)
        for file in self.files:
            if file.is_relative_to(_SHARED_MEMORY):
                file.unlink(missing_ok=True)


def _temporary_files(pid: int) -> set[Path]:
    """Return the files in shared memory and in the system's temporary folder that a process maps
    or has open."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()  # it has ended meanwhile
    mapped = (words[5] for line in maps.splitlines() if len(words := line.split(maxsplit=5)) == 6)
    return {Path(name) for name in (*mapped, *links) if name.startswith(_FOLDERS)}
