"""Jobs of PBS and Grid Engine: what they ask for, and what their script runs."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest
from tests.unit.launchers.schedulers.all_launchers import SPEC, planned

from paceline.cli.app import main
from paceline.errors import ExitCode
from paceline.launchers.schedulers.qsub import QsubSettings, render_pbs, render_sge

_ON_ONE_NODE = SPEC.replace('transport = "gloo"\nnodes = 2\n', "").replace("nodes = 2\n", "")


def _settings(folder: Path) -> QsubSettings:
    """The Python writes its arguments to a file, one on each line."""
    python = folder / "my python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >arguments\n')
    python.chmod(0o755)
    return QsubSettings(
        name="nodes",
        spec="my spec.toml",
        folder=str(folder),
        run_dir=str(folder / "runs" / "my run"),
        python=str(python),
        options=("A mine",),
    )


def _pbs(folder: Path, text: str = SPEC) -> str:
    [script] = render_pbs(planned(text), _settings(folder)).files.values()
    return script


def _sge(folder: Path) -> str:
    [script] = render_sge(planned(), _settings(folder), "mpi").files.values()
    return script


def _options(script: str, mark: str) -> list[str]:
    lines = script.splitlines()
    return [line.removeprefix(f"{mark} -") for line in lines if line.startswith(f"{mark} ")]


def _arguments(script: str, folder: Path, hosts: tuple[str, str]) -> list[str]:
    """Run a job's script, with the file of the scheduler that lists its hosts."""
    variable, text = hosts
    listed = folder / "hosts of the job"
    listed.write_text(text)
    subprocess.run(
        ["bash"], input=script, text=True, check=True, timeout=10,
        env={"PATH": os.environ["PATH"], variable: str(listed)},
    )  # fmt: skip
    return (folder / "arguments").read_text().splitlines()


_PBS_HOSTS = "PBS_NODEFILE", "one\n" * 6 + "two\n" * 6
_SGE_HOSTS = "PE_HOSTFILE", "one 6 all.q@one UNDEFINED\ntwo 6 all.q@two UNDEFINED\n"


def test_pbs_is_asked_for_the_largest_trial_and_the_time_of_all(tmp_path: Path) -> None:
    options = _options(_pbs(tmp_path), "#PBS")
    assert options[0] == "N paceline-nodes"
    assert "l select=2:ncpus=6:mpiprocs=6" in options
    assert "l place=scatter:excl" in options
    # four configurations, three repeats, 601 s and five minutes each
    assert "l walltime=03:01:00" in options
    assert options[-1] == "A mine"  # qsub takes the last of equal options


def test_grid_engine_is_asked_for_the_slots_of_all_nodes(tmp_path: Path) -> None:
    options = _options(_sge(tmp_path), "#$")
    assert "pe mpi 12" in options
    assert "l h_rt=03:01:00" in options


@pytest.mark.parametrize(("render", "hosts"), [(_pbs, _PBS_HOSTS), (_sge, _SGE_HOSTS)])
def test_the_script_runs_the_spec_on_the_hosts_of_the_job(render, hosts, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "my run"
    assert _arguments(render(tmp_path), tmp_path, hosts) == [
        *("-m", "paceline.cli", "run", "my spec.toml", "--out", str(run_dir)),
        *("--set", f"mpi.hostfile='{run_dir}.hosts'"),
    ]
    assert Path(f"{run_dir}.hosts").read_text() == "one slots=6\ntwo slots=6\n"


def test_a_second_job_continues_the_run_on_its_own_hosts(tmp_path: Path) -> None:
    script = _pbs(tmp_path)
    run_dir = tmp_path / "runs" / "my run"
    run_dir.mkdir(parents=True)
    (run_dir / "manifest.json").touch()
    found = _arguments(script, tmp_path, ("PBS_NODEFILE", "three\n" * 6 + "four\n" * 6))
    assert found == ["-m", "paceline.cli", "run", "--resume", str(run_dir)]
    assert Path(f"{run_dir}.hosts").read_text() == "four slots=6\nthree slots=6\n"


def test_a_job_on_one_node_needs_no_hostfile(tmp_path: Path) -> None:
    script = _pbs(tmp_path, _ON_ONE_NODE)
    assert "hostfile" not in script
    assert "l select=1:ncpus=6:mpiprocs=6" in _options(script, "#PBS")


def test_gpus_are_asked_for(tmp_path: Path) -> None:
    trials = [
        trial.model_copy(update={"device": "cuda"}) if trial.launcher == "torchrun" else trial
        for trial in planned(_ON_ONE_NODE)
    ]
    [script] = render_pbs(
        trials, dataclasses.replace(_settings(tmp_path), options=())
    ).files.values()
    assert "l select=1:ncpus=6:mpiprocs=6:ngpus=2" in _options(script, "#PBS")


@pytest.mark.parametrize("option", ["", "l walltime=1\nrm -rf", "$(rm)", "--"])
def test_an_option_that_is_none_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["render", "pbs", "quickstart", "--out", str(tmp_path / "out"), "--qsub", option]
    assert main(words) == ExitCode.USAGE
    assert "expected an option of qsub" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["pbs"], ["sge", "--pe", "mpi"]):
        out = tmp_path / words[0]
        assert main(["render", *words, "quickstart", "--out", str(out), "--cores", "2"]) == 0
        assert capsys.readouterr().out == f"{out / 'quickstart'}.{words[0]}\n"
