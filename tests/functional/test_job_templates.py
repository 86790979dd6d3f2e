"""Files that users copy: the Slurm template trains for real, Gradle's tasks call real commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from tests.functional.cli_runs import LIMIT_S, Cli
from tests.support.commands import run_command
from tests.support.environment import AS_ROOT
from tests.support.forking import ForkServer

from paceline.runner.launchers.mpi.implementations import find_mpirun

pytestmark = pytest.mark.functional

ROOT = Path(__file__).resolve().parents[2]
# Stands for srun with two tasks on one node. It refuses any option but the one that the template
# must give, and makes the training small: the file's values are for a real cluster.
SRUN = """#!/bin/bash
[ "$1" = --mpi=pmix ] || {{ echo "srun: unexpected option $1" >&2; exit 9; }}
shift
exec "{mpirun}" -n "$SLURM_NTASKS" --host localhost:2 --bind-to none "$@" {settings}
"""


SETTINGS = {
    "workloads.0.name": '"tiny"',
    "network.interface": '"lo"',
    "trials.1.nodes": "1",
    "trials.1.oversubscribe": "true",
    "telemetry.enabled": "false",
    "training.max_steps": "4",
    "training.warmup_steps": "1",
    "training.epochs": "2",
    "training.global_batch": "16",
    "training.image_size": "64",
}


def test_slurm_template_trains_with_the_ranks_that_slurm_gives(
    paceline: Cli, tiny_dataset: Path, forks: ForkServer, tmp_path: Path
) -> None:
    home, programs = tmp_path / "home", tmp_path / "bin"
    python = home / "paceline" / ".venv" / "bin" / "python"
    for folder in (python.parent, programs):
        folder.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.join(forks.python)} "$@"\n')
    values = {**SETTINGS, "workloads.0.data": f'"{tiny_dataset}"'}
    changes = shlex.join(f"--set={key}={value}" for key, value in values.items())
    (programs / "srun").write_text(SRUN.format(mpirun=find_mpirun().path, settings=changes))
    for program in (python, programs / "srun"):
        program.chmod(0o755)
    (home / "paceline" / "mpi-jobs").symlink_to(ROOT / "mpi-jobs")
    template = ROOT / "mpi-jobs" / "train.sbatch"
    variables = {
        **paceline.environment,
        **AS_ROOT,
        "HOME": str(home),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "1",
    }
    ended = run_command(["bash", template], LIMIT_S, env=variables, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [trial] = (home / "runs" / "7" / "trials").iterdir()
    assert json.loads((trial / "outcome.json").read_text())["status"] == "ok"
    for rank in ("0", "1"):
        environment = json.loads((trial / "ranks" / rank / "environment.json").read_text())
        assert environment["intraop_threads"] == 1
        assert len((trial / "ranks" / rank / "steps.jsonl").read_text().splitlines()) == 4


def test_slurm_template_asks_for_the_cores_that_its_ranks_use() -> None:
    text = (ROOT / "mpi-jobs" / "train.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", text, re.MULTILINE))
    spec = tomllib.loads((ROOT / "mpi-jobs" / "two-nodes.toml").read_text())
    _, trial = spec["trials"]
    assert asked["nodes"] == str(trial["nodes"])
    assert asked["ntasks-per-node"] == str(trial["ranks_per_node"])
    assert asked["cpus-per-task"] == str(trial["threads_per_rank"])


def test_gradle_tasks_call_commands_that_exist() -> None:
    text = (ROOT / "build.gradle").read_text()
    call = re.compile(r"^calls\('(\w+)',[^\[]*\[pacelinew, '(\w+)'", re.MULTILINE)
    commands = dict(call.findall(text))
    assert commands == {name: name for name in ("setup", "test", "check", "docs")}
    wrapper = (ROOT / "pacelinew").read_text()
    for command in commands.values():
        assert re.search(rf"^    {command}\)$", wrapper, re.MULTILINE), command
    for path in re.findall(r"new File\(root, '(python/[^']+)'\)", text):
        assert (ROOT / path).is_file(), path
    deleted = text.rpartition("delete '")[2]
    assert "'.venv'" not in deleted
    assert "'runs'" not in deleted


@pytest.mark.skipif(shutil.which("gradle") is None, reason="Gradle is not installed")
def test_gradle_knows_every_task(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("build.gradle", "settings.gradle"):
        shutil.copy(ROOT / name, checkout)
    (checkout / "pacelinew").write_text('#!/bin/sh\necho "called: $*"\n')
    (checkout / "pacelinew").chmod(0o755)
    home = ["--gradle-user-home", str(tmp_path / "gradle")]
    ended = run_command(
        ["gradle", *home, "--offline", "--quiet", "setup", "test", "check", "run", "clean",
         "-Pargs=plan 'my spec.toml'"],
        LIMIT_S, cwd=checkout,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    called = [line for line in ended.stdout.splitlines() if line.startswith("called: ")]
    assert sorted(called) == [
        "called: check", "called: plan my spec.toml", "called: setup", "called: test",
    ]  # fmt: skip
