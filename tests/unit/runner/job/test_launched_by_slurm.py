"""A command that srun started several times is refused; one in a shell under srun is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_CHECK = "from paceline.runner.job import check_started_once; check_started_once()"
# A shell whose command line is that of Slurm's daemon for a step. Not Python: an interpreter looks
# for its own library by the name under which it was started. `exit` keeps the shell as the parent.
_STEP = '"$@"; exit $?'


@pytest.mark.parametrize(
    ("parent", "tasks", "refused"),
    [("slurmstepd: [7.0]", "2", True), ("slurmstepd: [7.0]", "1", False), ("bash", "2", False)],
)
def test_copies_of_a_command_are_refused(parent: str, tasks: str, refused: bool) -> None:
    ended = subprocess.run(
        [parent, "-c", _STEP, "sh", sys.executable, "-c", _CHECK],
        executable="/bin/sh",
        env={**os.environ, "SLURM_STEP_NUM_TASKS": tasks},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert (ended.returncode != 0) is refused, ended.stderr
    assert ("srun started 2 copies" in ended.stderr) is refused
