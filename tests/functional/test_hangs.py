"""A rank that hangs is named with the line at which it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.functional.cli_runs import cli_in, trial
from tests.support.specs import spec_text

from paceline.measure.records.communication import last_operations
from paceline.measure.records.layout import TrialFiles

pytestmark = [pytest.mark.functional, pytest.mark.timeout(400)]

HANGING = Path(__file__).parent / "programs/hanging.py"
COLLECTIVE_S = 6
EVIDENCE_S = 5  # from the limit to the stacks of all ranks on disk
SPEC = spec_text(
    workload=f'script = "{HANGING}"',
    tables="[telemetry]; enabled = false; [limits]; trial_s = 120; rendezvous_s = 40; "
    f"collective_s = {COLLECTIVE_S}",
    repeats=1,
)
CASES = [("forward", "spark"), ("loader", "mpi"), ("branch", "torchrun")]


def line_of(where):
    """Return the line of the program that has this comment."""
    lines = HANGING.read_text("utf-8").splitlines()
    return next(n for n, line in enumerate(lines, start=1) if line.endswith(f"# in {where}"))


@pytest.fixture(scope="module")
def run_dir(cache, tmp_path_factory):
    """Return the directory of a run in which rank 1 hangs in each trial but the baseline."""
    folder = tmp_path_factory.mktemp("hangs")
    trials = [trial(launcher, "gloo", arguments=[where]) for where, launcher in CASES]
    (folder / "hangs.toml").write_text(SPEC + "".join(trials), "utf-8")
    finished = cli_in(cache, folder).main("run", "hangs.toml", "--out", "run")
    assert finished.returncode == 6, finished.stderr
    return folder / "run"


@pytest.mark.parametrize(("where", "launcher"), CASES)
def test_the_rank_that_hangs_is_named_with_its_line(run_dir, where, launcher):
    [folder] = run_dir.glob(f"trials/*.{launcher}.*.{where}.r0")
    outcome = json.loads((folder / "outcome.json").read_text("utf-8"))
    assert outcome["exit_code"] == 6
    assert f"hanging.py:{line_of(where)} in " in outcome["message"]
    expected = "rank 0 in allreduce at " if where == "branch" else "rank 0 waits in allreduce"
    assert expected in outcome["message"]
    assert evidence_s(TrialFiles(folder)) <= COLLECTIVE_S + EVIDENCE_S


def evidence_s(files: TrialFiles) -> float:
    """Return the time from the begin of the operation in which rank 0 waits to its failed status.

    Both are records of the trial: rank 0 notes the begin itself, and writes its status when the
    stacks of all ranks are on disk. So neither the starts of processes nor the end of the launcher,
    which a busy machine delays most, is in it.
    """
    began_unix_s = max(each.begun_unix_s for each in last_operations(files.rank(0).operations))
    return files.rank(0).status.stat().st_mtime - began_unix_s
