"""Specs of runs that last until a test ends them, and the processes of such a run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.functional.cli_runs import small

# Never ends by itself; the test ends it.
ENDLESS = small(max_steps=100_000, epochs=100_000)
# If it is slowed: long enough for a kill after its first step, and short enough to be run to its
# end.
LONG = small(epochs=20, image_size=64).replace(
    "max_steps = 20", 'max_steps = 60\nreading = "stream"'
)
STARTED_WITHIN_S = 90.0


def running_rank(run_dir: Path, launcher: str, rank: int) -> int | None:
    """Return the process id of a rank that has taken a step."""
    for folder in run_dir.glob(f"trials/tiny.{launcher}.*/ranks/{rank}"):
        steps, status = folder / "steps.jsonl", folder / "status.json"
        if steps.exists() and steps.stat().st_size > 0 and status.exists():
            return int(json.loads(status.read_text())["pid"])
    return None


def alive(run_dir: Path) -> dict[int, str]:
    """Return the command lines of living processes that belong to the run, by process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            stat = (path.parent / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ended = stat.rpartition(")")[2].split()[0] == "Z"
        if not ended and any(str(run_dir).encode() in word for word in words):
            found[int(path.parent.name)] = b" ".join(words).decode(errors="replace")
    return found
