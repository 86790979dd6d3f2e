"""Specs of runs that last until a test ends them, and the processes of such a run."""

from __future__ import annotations

from pathlib import Path

from tests.functional.cli_runs import small
from tests.support.waiting import pid_after_steps

from paceline.base.host.processes import command_line_of, is_alive

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
    folders = run_dir.glob(f"trials/tiny.{launcher}.*/ranks/{rank}")
    return next(filter(None, map(pid_after_steps, folders)), None)


def alive(run_dir: Path) -> dict[int, str]:
    """Return the command lines of living processes that belong to the run, by process id."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    commands = {pid: " ".join(command_line_of(pid)) for pid in pids if is_alive(pid)}
    return {pid: line for pid, line in commands.items() if str(run_dir) in line}
