"""Rendered files on a real Slurm with two nodes; tests/functional/test_render.py has a stand-in.

The nodes are the hosts of a lab and share the cores of this machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.lab.labs import checked_lab
from tests.cluster.slurm.cluster import Slurm, slurm_on
from tests.functional.cli_runs import NO_SIDECAR, small

from paceline.cli import main
from paceline.collectives.host import wait_until
from paceline.runner.lab import LabSettings
from paceline.runner.lab.network import processes_in
from paceline.runner.launchers.mpi.implementations import find_mpirun

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab", "slurm"), pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ROOT / "mpi-jobs" / "train.py"
ON_TWO_NODES = """
[[trials]]
launcher = "{launcher}"
transport = "{transport}"
local_strategy = "sequential"
nodes = 2
"""
# A cancelled job: Slurm ends its processes within KillWait, 5 s here.
_CANCELLED_S = 20.0
_STARTED_S = 90.0
_SINGLETON_S = 60.0


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with checked_lab(LabSettings(hosts=2, slots=2)) as lab, slurm_on(lab) as started:
        yield started


def _rendered(folder: Path, data: Path, *trials: tuple[str, str], steps: int = 4) -> list[Path]:
    """Render a baseline and trials on two nodes; return the sbatch files in the spec's order."""
    spec = folder / "spec.toml"
    limits = {"rendezvous_s": 60, "collective_s": 30}
    text = small(data, max_steps=steps, epochs=100_000, image_size=64, dropout=True, **limits)
    text = text.replace(*NO_SIDECAR) + '[network]\ninterface = "eth0"\n'
    text += "".join(ON_TWO_NODES.format(launcher=x, transport=y) for x, y in trials)
    spec.write_text(text, "utf-8")
    jobs, run = str(folder / "jobs"), str(folder / "run")
    assert main(["render", "slurm", str(spec), "--out", jobs, "--run-dir", run]) == 0
    files = {file.name.split(".")[1]: file for file in Path(jobs).glob("*.sbatch")}
    return [files["local"], *(files[launcher] for launcher, _ in trials)]


def _rows(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert main(["compare", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    return {row["configuration"]: row for row in rows}


def test_rendered_jobs_train_equivalently_on_two_nodes(
    slurm: Slurm, tiny_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _processes(slurm)
    files = _rendered(tmp_path, tiny_dataset, ("mpi", "mpi"), ("spark", "gloo"))
    jobs = [slurm.submit(file) for file in files]
    assert slurm.wait_for_end(*jobs) == ["COMPLETED"] * 3, _logs(files)
    rows = _rows(tmp_path / "run", capsys)
    assert sorted(rows) == sorted(file.stem for file in files)
    assert all(row["equivalent"] for row in rows.values())
    for file in files[1:]:
        assert _hosts(tmp_path / "run", file) == [host.name for host in slurm.lab.hosts]
    assert wait_until(lambda: _processes(slurm) <= before, _CANCELLED_S)
    assert _temporary(slurm) == []


def test_mpirun_uses_the_nodes_of_an_allocation(
    slurm: Slurm, tiny_dataset: Path, tmp_path: Path
) -> None:
    _, file = _rendered(tmp_path, tiny_dataset, ("mpi", "mpi"))
    command = [
        find_mpirun().path, "--allow-run-as-root", "-n", 2, "--map-by", "ppr:1:node",
        "--bind-to", "none", "--mca", "btl_tcp_if_include", "eth0",
        sys.executable, TRAIN, "--trial", file.with_suffix(".json"), "--out", tmp_path / "run",
    ]  # fmt: skip
    slurm.output("salloc", "--nodes=2", "--ntasks-per-node=1", "--exclusive", *command)
    assert _hosts(tmp_path / "run", file) == [host.name for host in slurm.lab.hosts]
    outcome = tmp_path / "run" / "trials" / f"{file.stem}.r0" / "outcome.json"
    assert json.loads(outcome.read_text())["status"] == "ok"


def test_cancelled_job_leaves_nothing(slurm: Slurm, tiny_dataset: Path, tmp_path: Path) -> None:
    before, segments = _processes(slurm), _segments(slurm)
    file = _rendered(tmp_path, tiny_dataset, ("mpi", "mpi"), steps=100000)[1]
    job = slurm.submit(file)
    steps = tmp_path / "run" / "trials" / f"{file.stem}.r0" / "ranks" / "1" / "steps.jsonl"
    assert wait_until(lambda: steps.exists() and steps.stat().st_size > 0, _STARTED_S), _logs(
        [file]
    )
    slurm.output("scancel", job)
    assert slurm.wait_for_end(job, limit_s=_CANCELLED_S) == ["CANCELLED"]
    assert wait_until(lambda: _processes(slurm) <= before, _CANCELLED_S)
    assert _segments(slurm) == segments
    assert _temporary(slurm) == []
    assert not (tmp_path / "run" / "trials" / f"{file.stem}.r0" / "outcome.json").exists()


@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_ranks_that_srun_starts_one_by_one_are_refused(
    slurm: Slurm, launcher: str, tiny_dataset: Path, tmp_path: Path
) -> None:
    files = _rendered(tmp_path, tiny_dataset, ("mpi", "mpi"))
    program = [TRAIN] if launcher == "mpi" else ["-m", "paceline.runner.launchers.local"]
    trial = next(f for f in files if f".{launcher}." in f.name).with_suffix(".json")
    job = [sys.executable, *program, "--trial", trial, "--out", tmp_path / "run"]
    ended = slurm.call("srun", "--nodes=2", "--mpi=none", *job, limit_s=_SINGLETON_S)
    assert ended.returncode == 3, ended.stderr
    assert "2 jobs of one rank each" in ended.stderr or "2 copies of this command" in ended.stderr
    assert not (tmp_path / "run").exists()


def _logs(files: list[Path]) -> str:
    return "\n".join(log.read_text() for file in files for log in file.parent.glob("*.log"))


def _hosts(run: Path, file: Path) -> list[str]:
    """Return the host of every rank of a rendered trial."""
    ranks = sorted((run / "trials" / f"{file.stem}.r0" / "ranks").iterdir())
    return sorted(json.loads((rank / "status.json").read_text())["host"] for rank in ranks)


def _processes(slurm: Slurm) -> set[int]:
    return {pid for host in slurm.lab.hosts for pid in processes_in(host.namespace)}


def _temporary(slurm: Slurm) -> list[str]:
    """List temporary files on the nodes, without the cache that torch keeps."""
    names = [file.name for file in (slurm.folder / "tmp").iterdir()]
    return [name for name in names if not name.startswith("torchinductor_")]


def _segments(slurm: Slurm) -> list[str]:
    """List Open MPI's shared memory of processes on the nodes."""
    names = [file.name for file in Path("/dev/shm").iterdir()]
    return [name for name in names if any(host.name in name for host in slurm.lab.hosts)]
