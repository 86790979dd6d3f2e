"""A rank that hangs is named with the line at which it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.records.layout import TrialFiles
from paceline.records.pending import last_operations

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

HANGING = Path(__file__).parent / "programs/hanging.py"
COLLECTIVE_S = 6
EVIDENCE_S = 5  # from the limit to the stacks of all ranks on disk


def line_of(where):
    """Return the line of the program that has this comment."""
    lines = HANGING.read_text("utf-8").splitlines()
    return next(n for n, line in enumerate(lines, start=1) if line.endswith(f"# in {where}"))


@pytest.mark.parametrize(
    ("where", "launcher"),
    [
        ("forward", "torchrun"),
        ("forward", "spark"),
        ("loader", "mpi"),
        ("branch", "torchrun"),
    ],
)
def test_the_rank_that_hangs_is_named_with_its_line(paceline, tmp_path, where, launcher):
    spec = (
        'schema = 2\nname = "hangs"\nrepeats = 1\n[telemetry]\nenabled = false\n'
        f"[limits]\ntrial_s = 120\nrendezvous_s = 40\ncollective_s = {COLLECTIVE_S}\n"
        f'[[workloads]]\nscript = "{HANGING}"\narguments = ["{where}"]\n'
        '[[trials]]\nlauncher = "local"\nlocal_strategy = "sequential"\n'
        f'[[trials]]\nlauncher = "{launcher}"\nlocal_strategy = "processes"\n'
        'transport = "gloo"\nranks_per_node = 2\noversubscribe = true\n'
    )
    (tmp_path / "hangs.toml").write_text(spec, "utf-8")
    finished = paceline("run", "hangs.toml", "--out", "run")
    assert finished.returncode == 6, finished.stderr
    [trial] = (tmp_path / "run/trials").glob(f"*.{launcher}.*")
    message = json.loads((trial / "outcome.json").read_text("utf-8"))["message"]
    assert f"hanging.py:{line_of(where)} in " in message
    expected = "rank 0 in allreduce at " if where == "branch" else "rank 0 waits in allreduce"
    assert expected in message
    assert evidence_s(TrialFiles(trial)) <= COLLECTIVE_S + EVIDENCE_S


def evidence_s(files: TrialFiles) -> float:
    """Return the time from the begin of the operation in which rank 0 waits to its failed status.

    Both are records of the trial: rank 0 notes the begin itself, and writes its status when the
    stacks of all ranks are on disk. So neither the starts of processes nor the end of the launcher,
    which a busy machine delays most, is in it.
    """
    began_unix_s = max(each.begun_unix_s for each in last_operations(files.rank(0).operations))
    return files.rank(0).status.stat().st_mtime - began_unix_s
