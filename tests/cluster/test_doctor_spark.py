"""`paceline doctor --master` counts the free slots of a real Spark cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import run_command
from tests.support.environment import kept_environment

from paceline.collectives.host import wait_until
from paceline.runner.lab import Lab

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab"), pytest.mark.timeout(400)]

LIMIT_S = 100.0
OTHERS_END_S = 90.0


def test_free_slots_of_spark_are_counted(spark_lab: Lab, tmp_path: Path) -> None:
    """Each host offers two. Too few, for which doctor waits: unit/launchers/spark.

    The cluster is shared: an application of an earlier test may still be ending, or a worker that
    it has lost starting again, so the slots are all free only after a while.
    """
    hosts = ",".join(f"{host.address}:2" for host in spark_lab.hosts)
    command = [sys.executable, "-m", "paceline.cli", "doctor", "--hosts", hosts, "--json"]
    environment = kept_environment(PACELINE_CACHE=str(tmp_path / "cache"))
    on_first = spark_lab.hosts[0].command(*command, "--master", spark_lab.spark_master)
    found: dict[str, Any] = {}

    def are_all_free() -> bool:
        done = run_command(on_first, LIMIT_S, env=environment, cwd=tmp_path)
        assert done.stdout, done.stderr
        findings = json.loads(done.stdout)["findings"]
        found.update(*(each for each in findings if each["what"] == "Spark slots"))
        return bool(found["ok"])

    assert wait_until(are_all_free, OTHERS_END_S), found["why"]
    assert found["found"] == "4 of 4"
    assert spark_lab.spark_master in found["why"]
