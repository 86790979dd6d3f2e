"""sbatch files ask Slurm for the planned ranks and cores, and bash accepts them."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.unit.runner.launchers.schedulers.all_launchers import SPEC, planned

from paceline.base.errors import UsageError
from paceline.plan.trials.trial import Trial
from paceline.runner.launchers.schedulers.files import Places, task_files
from paceline.runner.launchers.schedulers.slurm import SlurmSettings, render_slurm

_SETTINGS = SlurmSettings(
    places=Places(run_dir="/scratch/my runs", data_dir="/data"),
    python="/opt/my python/bin/python",
)


def _rendered(text: str = SPEC):
    rendered = render_slurm(planned(text), _SETTINGS)
    return rendered.files, rendered.left_out


def _trial(launcher: str, text: str = SPEC) -> Trial:
    """The trial that is shipped beside the sbatch file."""
    files = _rendered(text)[0]
    (found,) = [t for name, t in files.items() if f".{launcher}." in name and ".json" in name]
    return Trial.model_validate_json(found)


def _one(launcher: str, text: str = SPEC) -> str:
    files = _rendered(text)[0]
    (found,) = [t for name, t in files.items() if f".{launcher}." in name and ".sbatch" in name]
    return found


def _options(text: str) -> dict[str, str]:
    lines = [x.removeprefix("#SBATCH --") for x in text.splitlines() if x.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_bash_accepts_every_file() -> None:
    scripts = [text for name, text in _rendered()[0].items() if name.endswith(".sbatch")]
    assert len(scripts) == 4
    for text in scripts:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=10)


def test_an_mpi_trial_asks_for_its_nodes_ranks_and_threads() -> None:
    text = _one("mpi")
    asked = _options(text)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["cpus-per-task"]) == ("2", "3", "2")
    assert asked["time"] == "16"  # minutes: 601 s and five minutes, rounded up
    assert "exclusive" in asked
    assert "\nexport OMP_NUM_THREADS=2\n" in text
    assert "\nexport OMPI_MCA_btl_tcp_if_include=ib0\n" in text
    words = _command(text)
    assert words[:2] == ["srun", "--mpi=pmix"]
    assert "/opt/my python/bin/python" in words
    assert words[words.index("--out") + 1] == "/scratch/my runs"
    trial = _trial("mpi")
    assert words[words.index("--trial") + 1] == f"$SLURM_SUBMIT_DIR/{trial.configuration}.json"
    assert (trial.placement.ranks, trial.interface) == (6, "ib0")
    assert trial.training.dataset == "/data/tiny"


def test_options_of_a_site_follow_ours() -> None:
    settings = dataclasses.replace(
        _SETTINGS,
        sbatch_options=("account=mine", "qos=short"),
        srun_options=("mpi=pmi2", "container-mounts=/shared:/shared"),
    )
    files = render_slurm(planned(SPEC), settings).files
    for name, text in files.items():
        if name.endswith(".sbatch"):
            assert (_options(text)["account"], _options(text)["qos"]) == ("mine", "short")
    [text] = [text for name, text in files.items() if ".mpi." in name and ".sbatch" in name]
    words = _command(text)
    assert words.index("--mpi=pmix") < words.index("--mpi=pmi2")  # srun takes the last one
    assert "--container-mounts=/shared:/shared" in words[: words.index(_SETTINGS.python)]


def test_repeats_are_an_array_of_which_one_runs_at_a_time() -> None:
    text = _one("mpi")
    assert _options(text)["array"] == "0,1,2%1"
    assert text.endswith('--repeat "$SLURM_ARRAY_TASK_ID"\n')
    once = _one("mpi", SPEC.replace("repeats = 3", "repeats = 1"))
    assert "array" not in _options(once)
    assert once.endswith("--repeat 0\n")


def test_one_process_starts_the_ranks_of_a_single_node() -> None:
    text = _one("torchrun")
    asked = _options(text)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["cpus-per-task"]) == ("1", "1", "2")
    words = _command(text)
    assert words[1:3] == ["-m", "torch.distributed.run"]
    assert "--nproc-per-node=2" in words
    assert _command(_one("local"))[1:3] == ["-m", "paceline.runner.launchers.local"]


def test_no_other_user_can_make_the_file_of_torchruns_rendezvous() -> None:
    text = _one("torchrun")
    assert "/tmp" not in text
    made, removed = "\nrendezvous=$(mktemp -d)\n", """\ntrap 'rm -rf "$rendezvous"' EXIT\n"""
    assert made in text
    assert removed in text
    assert "--rdzv-endpoint=$rendezvous/store" in _command(text)


def test_a_spark_trial_starts_its_own_cluster() -> None:
    text = _one("spark")
    asked = _options(text)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["cpus-per-task"]) == ("2", "1", "2")
    assert _command(text)[1:3] == ["-m", "paceline.runner.launchers.spark.slurm_job"]


def test_what_slurm_cannot_start_is_left_out_with_its_reason() -> None:
    assert _rendered()[1] == {}
    shared = SPEC.replace("ranks_per_node = 3", "ranks_per_node = 3\noversubscribe = true")
    left_out = _rendered(shared)[1]
    assert [configuration.split(".")[1] for configuration in left_out] == ["mpi"]
    assert any("share cores" in reason for reason in left_out.values())


def _command(text: str) -> list[str]:
    return shlex.split(text.rpartition("\n\n")[2].replace("\\\n", " "))


def test_trial_has_the_settings_of_the_sidecar(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = """
[telemetry]
listen_host = "0.0.0.0"
listen_port = 9464
tls_certificate = "/etc/my certificates/host.pem"
tls_key = "/etc/my certificates/host.key"
textfile_dir = "text"
"""
    for launcher in ("local", "mpi", "torchrun"):
        telemetry = _trial(launcher, SPEC + settings).telemetry
        assert (telemetry.listen_host, telemetry.listen_port) == ("0.0.0.0", 9464)
        assert telemetry.tls_key == "/etc/my certificates/host.key"
        assert telemetry.textfile_dir == str(tmp_path / "text")  # a job may start anywhere


def test_mca_parameters_reach_srun_as_variables() -> None:
    text = SPEC.replace("ranks_per_node = 3", 'ranks_per_node = 3\nmpi_parameters = {pml = "^x"}')
    assert "\nexport OMPI_MCA_pml='^x'\n" in _one("mpi", text)


def test_users_file_is_rendered_beside_the_trial(make_trial, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("number = 1\n")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    trial = make_trial(task=f"{file}:Mine", task_sha256=sha256)
    assert task_files(trial) == {"mine.py": "number = 1\n"}
    file.unlink()
    with pytest.raises(UsageError, match=r"expected the file .*mine.py, got: No such"):
        task_files(trial)


def test_task_of_a_package_needs_no_file(make_trial):
    assert task_files(make_trial()) == {}


_SBATCH = """#!/bin/bash
echo "$*" >> "$CALLS"
echo "$(wc -l < "$CALLS");cluster"
"""


def test_script_submits_all_trials_in_the_order_of_the_plan(tmp_path: Path) -> None:
    trials = planned(SPEC)
    (tmp_path / "submit.sh").write_text(_rendered()[0]["submit.sh"])
    (tmp_path / "sbatch").write_text(_SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    calls = tmp_path / "calls"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls)}
    script = ["bash", str(tmp_path / "submit.sh")]
    subprocess.run(script, env=environment, cwd="/", check=True, timeout=60)
    expected = []
    for number, trial in enumerate(trials):
        after = f"--dependency=afterany:{number} " if number else ""
        expected.append(f"--parsable {after}--array={trial.repeat} {trial.configuration}.sbatch")
    assert calls.read_text().splitlines() == expected
    once = _rendered(SPEC.replace("repeats = 3", "repeats = 1"))[0]["submit.sh"]
    assert "--array" not in once
