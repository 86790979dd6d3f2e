"""With MPI inside, Spark's launcher looks for the MPI that its tasks will use, where it can."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.trials import changed

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.programs import Tool
from paceline.runner.launchers.mpi import launcher as mpi
from paceline.runner.launchers.mpi.implementations import Mpich, Mpirun
from paceline.runner.launchers.spark import launcher as spark
from paceline.runner.launchers.spark.launcher import SparkLauncher
from paceline.runner.preflight import this_host


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """Everything is there, but mpi4py is of another MPI than mpirun."""
    tool = Tool(path=Path("/opt/bin/mpirun"), version="5", why="test")
    monkeypatch.setattr(mpi, "find_mpirun", lambda _asked: tool)
    monkeypatch.setattr(mpi, "mpi_mismatch", lambda _tool: "mpi4py loads MPICH")
    monkeypatch.setattr(spark, "find_java", lambda: tool)
    monkeypatch.setattr(spark, "find_java_for_spark", lambda: tool)
    monkeypatch.setattr(spark, "find_spark", lambda: tool)
    monkeypatch.setattr(this_host, "check_inputs", lambda _trial: None)
    monkeypatch.setattr(this_host, "usable_cores", lambda: 8)


def over_mpi(make_launch_trial, **changes):
    return changed(make_launch_trial("spark", **changes), transport="mpi")


def test_wrong_mpi_is_refused_before_spark_starts(make_launch_trial):
    with pytest.raises(EnvironmentLacks, match="mpi4py loads MPICH"):
        SparkLauncher().preflight(over_mpi(make_launch_trial))
    cluster = {"master": "spark://there:7077"}
    with pytest.raises(EnvironmentLacks, match="mpi4py loads MPICH"):
        SparkLauncher().preflight(over_mpi(make_launch_trial, launcher_options=cluster))


def test_implementation_without_daemons_for_tasks_is_refused(make_launch_trial, monkeypatch):
    mpich = Mpirun(path=Path("/usr/bin/mpirun"), version="4.0", why="x", implementation=Mpich())
    monkeypatch.setattr(mpi, "find_mpirun", lambda _asked: mpich)
    monkeypatch.setattr(mpi, "mpi_mismatch", lambda _tool: None)
    with pytest.raises(EnvironmentLacks, match=r"Open MPI 5, /usr/bin/mpirun belongs to MPICH"):
        SparkLauncher().preflight(over_mpi(make_launch_trial))


def test_other_transports_and_other_pythons_are_not_asked_for_mpi(make_launch_trial):
    SparkLauncher().preflight(make_launch_trial("spark"))
    conf = {"spark.pyspark.python": "./environment/bin/python"}
    cluster = {"master": "spark://there:7077", "conf": conf}
    SparkLauncher().preflight(over_mpi(make_launch_trial, launcher_options=cluster))
