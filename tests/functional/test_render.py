"""What `paceline render` writes trains for real, with stand-ins for the schedulers."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.functional.cli_runs import LIMIT_S, NO_SIDECAR, Cli, small, trial
from tests.support.commands import run_command
from tests.support.environment import AS_ROOT
from tests.support.forking import ForkServer

from paceline.runner.launchers.mpi.implementations import find_mpirun

pytestmark = pytest.mark.functional

_JOBS = Path(__file__).resolve().parents[2]
# What srun does with a job of two tasks on one node, by Open MPI's own launcher.
_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "{mpirun}" -n "$SLURM_NTASKS" --host localhost:2 --bind-to none "$@"
"""
# Runs a module in a new interpreter, and a script, which ranks are, in a forked one.
_PYTHON = """#!/bin/sh
[ "$1" = -m ] && exec "{python}" "$@"
exec {forked} "$@"
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory, tiny_dataset: Path) -> Path:
    """Holds a data set for the workload, by its name."""
    folder = tmp_path_factory.mktemp("render") / "data"
    shutil.copytree(tiny_dataset, folder / "tiny")
    return folder


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A baseline and two MPI ranks."""
    path = tmp_path / "small.toml"
    spec = small(max_steps=4).replace(*NO_SIDECAR).replace("samples = 48", "")
    mpi = trial("mpi", "mpi").replace("oversubscribe = true\n", "")
    path.write_text(spec + mpi, "utf-8")
    return path


def _run(
    argv: list[str], environment: Mapping[str, str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    return run_command(argv, LIMIT_S, env={**environment, **AS_ROOT}, cwd=cwd)


def _compared(paceline: Cli, run_dir: Path) -> dict[str, Any]:
    compared = paceline.main("compare", run_dir, "--json")
    assert compared.returncode == 0, compared.stderr
    document: dict[str, Any] = json.loads(compared.stdout)
    return document


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks of a core each")
def test_sbatch_files_train_what_the_spec_says(
    paceline: Cli, spec: Path, data_dir: Path, tmp_path: Path
) -> None:
    places = ("--data-dir", data_dir, "--run-dir", tmp_path / "run")
    rendered = paceline.main("render", "slurm", spec, "--out", tmp_path / "jobs", *places)
    assert rendered.returncode == 0, rendered.stderr
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(_SRUN.format(mpirun=find_mpirun().path), "utf-8")
    (programs / "srun").chmod(0o755)
    environment = {
        **paceline.environment,
        "PATH": f"{programs}:{paceline.environment['PATH']}",
        "SLURM_JOB_ID": "1",
        "SLURM_SUBMIT_DIR": str(tmp_path / "jobs"),
    }
    files = sorted((tmp_path / "jobs").glob("*.sbatch"))
    assert len(files) == 2
    for file in files:
        tasks = "2" if ".mpi." in file.name else "1"
        ended = _run(["bash", str(file)], {**environment, "SLURM_NTASKS": tasks}, tmp_path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = _compared(paceline, tmp_path / "run")["rows"]
    assert {row["configuration"] for row in rows} == {file.stem for file in files}
    assert all(row["equivalent"] for row in rows)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks of a core each")
def test_the_commands_of_kubernetes_objects_train_what_the_spec_says(
    paceline: Cli, spec: Path, data_dir: Path, forks: ForkServer, tmp_path: Path
) -> None:
    places = ("--data-dir", data_dir, "--run-dir", tmp_path / "run")
    rendered = paceline.main("render", "kubernetes", spec, "--out", tmp_path / "jobs", *places)
    assert rendered.returncode == 0, rendered.stderr
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=2\n", "utf-8")
    python = tmp_path / "python"
    python.write_text(_PYTHON.format(python=sys.executable, forked=shlex.join(forks.python)))
    python.chmod(0o755)
    here = {
        "mpirun": str(find_mpirun().path),
        "/opt/paceline/venv/bin/python": str(python),
        "/opt/paceline/jobs/mpi-jobs/train.py": str(_JOBS / "mpi-jobs" / "train.py"),
        "/etc/mpi/hostfile": str(hostfile),
    }
    for file in sorted((tmp_path / "jobs").glob("*.yaml")):
        trial_map, document = yaml.safe_load_all(file.read_text("utf-8"))
        trial_file = tmp_path / "trial.json"
        trial_file.write_text(trial_map["data"]["trial.json"], "utf-8")
        here["/etc/paceline/trial.json"] = str(trial_file)
        container = _container(document)
        variables = {each["name"]: each["value"] for each in container["env"]}
        command = [here.get(word, word) for word in container["command"]]
        ended = _run(command, {**paceline.environment, **variables}, tmp_path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = _compared(paceline, tmp_path / "run")["rows"]
    assert len(rows) == 2
    assert all(row["equivalent"] for row in rows)


def _container(document: Mapping[str, Any]) -> dict[str, Any]:
    """The one that starts the trial."""
    spec = document["spec"]
    if document["kind"] == "MPIJob":
        spec = spec["mpiReplicaSpecs"]["Launcher"]
    (container,) = spec["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def test_paths_of_slurm_jobs_begin_where_they_were_rendered(
    paceline: Cli, spec: Path, data_dir: Path
) -> None:
    (paceline.cwd / "sets").symlink_to(data_dir)
    rendered = paceline.main("render", "slurm", spec, "--run-dir", "run", "--data-dir", "sets")
    assert rendered.returncode == 0, rendered.stderr
    assert f"`paceline compare {paceline.cwd}/run`" in rendered.stderr
    scripts = [*paceline.cwd.glob("*-slurm/*.sbatch")]
    assert len(scripts) == 2
    for script in scripts:
        assert f"--out {paceline.cwd}/run " in script.read_text("utf-8")
        trial_map = json.loads(script.with_suffix(".json").read_text("utf-8"))
        assert trial_map["training"]["dataset"] == f"{paceline.cwd}/sets/tiny"


def test_what_cannot_be_rendered_is_told(paceline: Cli, tmp_path: Path) -> None:
    spec = tmp_path / "small.toml"
    never_made = small(samples=9)
    two_cores = trial("mpi", "mpi").replace("oversubscribe = true\n", "")
    spec.write_text(never_made + trial("mpi", "gloo") + two_cores, "utf-8")
    rendered = paceline.main("render", "slurm", spec, "--out", tmp_path / "jobs", "--cores", 1)
    assert rendered.returncode == 0, rendered.stderr
    assert "left out: tiny.mpi.mpi.processes.n1r2t1.fp32: 2 ranks" in rendered.stderr
    assert "left out tiny.mpi.gloo" in rendered.stderr
    assert "does not exist yet" in rendered.stderr
    assert f"next: `bash {tmp_path}/jobs/submit.sh` submits all trials" in rendered.stderr
    assert "then `paceline compare " in rendered.stderr
    written = [Path(line).suffix for line in rendered.stdout.splitlines()]
    assert written == [".sbatch", ".json", ".sh"]
