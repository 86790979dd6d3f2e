"""`paceline watch` beside a real run: it sees steps and hosts, and ends with the run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.functional.cli_runs import LIMIT_S, SMALL, Cli, slowed
from tests.support.waiting import wait_for

pytestmark = pytest.mark.functional


def test_a_run_is_followed_from_before_its_beginning_to_its_end(
    paceline: Cli, tmp_path: Path
) -> None:
    spec, run_dir = tmp_path / "small.toml", tmp_path / "run"
    spec.write_text(SMALL, "utf-8")
    run = slowed(paceline).start("run", spec, "--out", run_dir, log=tmp_path / "run.log")
    try:
        wait_for(run_dir.exists, LIMIT_S, "the run directory")
        watched = paceline("watch", run_dir, "--interval", "0.2")
        assert run.wait(timeout=LIMIT_S) == 0, (tmp_path / "run.log").read_text("utf-8")
    finally:
        run.kill()
        run.wait()
    assert watched.returncode == 0, watched.stderr
    lines = watched.stdout.splitlines()
    assert lines[-1].startswith("the run has ended: 1 trial done")
    assert "\x1b" not in watched.stdout
    steps = [int(found[1]) for line in lines if (found := re.search(r"step (\d+)/20", line))]
    assert max(steps) > 0
    assert any("samples/s, loss" in line and "IOWait" in line for line in lines)
