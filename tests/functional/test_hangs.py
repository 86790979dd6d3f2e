"""A rank that hangs is named with the line at which it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

HANGING = Path(__file__).parent / "programs/hanging.py"


def line_of(where):
    """Return the line of the program that has this comment."""
    lines = HANGING.read_text("utf-8").splitlines()
    return next(n for n, line in enumerate(lines, start=1) if line.endswith(f"# in {where}"))


@pytest.mark.parametrize(
    ("where", "launcher"),
    [("forward", "torchrun"), ("loader", "mpi"), ("branch", "torchrun")],
)
def test_the_rank_that_hangs_is_named_with_its_line(paceline, tmp_path, where, launcher):
    spec = (
        'schema = 2\nname = "hangs"\nrepeats = 1\n[telemetry]\nenabled = false\n'
        "[limits]\ntrial_s = 120\nrendezvous_s = 40\ncollective_s = 6\n"
        f'[[workloads]]\nscript = "{HANGING}"\narguments = ["{where}"]\n'
        '[[trials]]\nlauncher = "local"\nlocal_strategy = "sequential"\n'
        f'[[trials]]\nlauncher = "{launcher}"\nlocal_strategy = "processes"\n'
        'transport = "gloo"\nranks_per_node = 2\noversubscribe = true\n'
    )
    (tmp_path / "hangs.toml").write_text(spec, "utf-8")
    finished = paceline("run", "hangs.toml", "--out", "run")
    assert finished.returncode == 6, finished.stderr
    message = next(
        json.loads(path.read_text("utf-8"))["message"]
        for path in (tmp_path / "run/trials").glob(f"*.{launcher}.*/outcome.json")
    )
    assert f"hanging.py:{line_of(where)} in " in message
    expected = "rank 0 in allreduce at " if where == "branch" else "rank 0 waits in allreduce"
    assert expected in message
