"""Scripts over back end "paceline": processes that nothing but a file has brought together."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[1] / "contract" / "programs" / "shared_backend.py"
RANKS = 3
LIMIT_S = 90


class Script:
    """The ranks of one script and what they wrote."""

    def __init__(self, python: Sequence[str], folder: Path, steps: int) -> None:
        folder.mkdir()
        self._folder = folder
        self.processes = [
            subprocess.Popen(
                [*map(str, python), PROGRAM, folder, str(rank), str(RANKS), str(steps)]
            )
            for rank in range(RANKS)
        ]

    def wait_until_running(self) -> list[int]:
        """Return the process of each rank."""
        files = [self._folder / f"{rank}.ready" for rank in range(RANKS)]
        deadline = time.monotonic() + LIMIT_S
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.02)
        return [int(file.read_text()) for file in files]

    def outcome(self, rank: int) -> dict[str, Any]:
        """Wait for a rank and return what it wrote; empty if it did not come to that."""
        self.processes[rank].wait(LIMIT_S)
        file = self._folder / f"{rank}.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
