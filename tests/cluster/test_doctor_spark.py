"""`paceline doctor --master` counts the free slots of a real Spark cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.support.commands import run_command
from tests.support.environment import kept_environment

from paceline.runner.lab import Lab

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab"), pytest.mark.timeout(400)]

LIMIT_S = 280.0


def test_free_slots_of_spark_are_counted(spark_lab: Lab, tmp_path: Path) -> None:
    """Each host offers two. Too few, for which doctor waits: unit/launchers/spark."""
    hosts = ",".join(f"{host.address}:2" for host in spark_lab.hosts)
    command = [sys.executable, "-m", "paceline.cli", "doctor", "--hosts", hosts, "--json"]
    environment = kept_environment(PACELINE_CACHE=str(tmp_path / "cache"))
    on_first = spark_lab.hosts[0].command(*command, "--master", spark_lab.spark_master)
    done = run_command(on_first, LIMIT_S, env=environment, cwd=tmp_path)
    assert done.stdout, done.stderr
    [found] = [f for f in json.loads(done.stdout)["findings"] if f["what"] == "Spark slots"]
    assert (found["ok"], found["found"]) == (True, "4 of 4"), found["why"]
    assert spark_lab.spark_master in found["why"]
