"""The shell lines of examples/ci/speed-gate.yml, on a script of main and a slower one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from tests.functional.cli_runs import LIMIT_S
from tests.support.commands import run_command

pytestmark = [pytest.mark.functional, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"SCRIPT": "ddp.py", "ARGUMENTS": "--width 32", "MAX_STEPS": "12", "REPEATS": "3"}
SLOWER = ("optimizer.step()", "optimizer.step(); __import__('time').sleep(0.2)")
LIMIT = "60%"  # of the machine of the tests, which is shared
# Nothing here looks at what sidecars record. The command is a fork, and so are the ranks that it
# starts with `local`. The second measurement of main is a copy of the first: how much this machine
# varies is not the question.
PROGRAM = """#!/bin/sh
case "$*" in *" --out ../runs/again "*) exec cp -r ../runs/main ../runs/again ;; esac
if [ "$1" = run ]; then shift; set -- run --set telemetry.enabled=false --launcher local "$@"; fi
exec "{python}" -m paceline.cli "$@"
"""


@pytest.fixture(scope="module")
def lines():
    """Return the shell lines of the workflow by the names of their steps."""
    workflow = yaml.safe_load((EXAMPLES / "ci/speed-gate.yml").read_text("utf-8"))
    steps = workflow["jobs"]["gate"]["steps"]
    assert set(SIZES) < set(workflow["env"])
    environment = {**workflow["env"], **SIZES, "LIMIT": LIMIT}
    return {step["name"]: step["run"] for step in steps if "name" in step}, environment


def test_a_slower_branch_fails_and_main_does_not(lines, cache, forks, tmp_path):
    steps, environment = lines
    script = (EXAMPLES / "scripts/ddp.py").read_text("utf-8")
    for part, text in (("main", script), ("branch", script.replace(*SLOWER))):
        (tmp_path / part).mkdir()
        (tmp_path / part / "ddp.py").write_text(text, "utf-8")
    program = tmp_path / "bin/paceline"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=forks.python_of_ranks), "utf-8")
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"

    def run(step):
        variables = {**os.environ, **environment, "PATH": path, "PACELINE_CACHE": str(cache)}
        command = ["bash", "-eo", "pipefail", "-c", steps[step]]
        return run_command(command, 2 * LIMIT_S, env=variables, cwd=tmp_path)

    measured = run("Measure main, the branch, and main again")
    assert measured.returncode == 0, measured.stderr
    assert run("Compare main with itself").returncode == 0
    judged = run("Compare the branch with main")
    assert judged.returncode == 8, judged.stdout + judged.stderr
    assert (tmp_path / "gate.xml").exists()
