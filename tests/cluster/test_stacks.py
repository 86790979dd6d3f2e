"""Stacks of ranks on two hosts, asked for on the first one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.trainings import PROGRAMS, job_arguments, training
from tests.support.commands import run_command
from tests.support.environment import kept_environment

from paceline.runner.lab import Lab

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab")]

LIMIT_S = 60.0


def test_ranks_of_both_hosts_show_where_they_are(
    lab: Lab, tiny_dataset: Path, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"transport": "gloo", "telemetry": {"enabled": True}}
    words = job_arguments("mpi", LIMIT_S, tiny_dataset, tmp_path / "run", **keys)
    first = lab.hosts[0]
    program = [PROGRAMS / "supervised.py", "mpi", lab.hostfile, tmp_path / "outcome.json"]
    with training(lab, tmp_path, [first.command(sys.executable, *program, *words)]):
        ask = first.command(
            sys.executable, "-m", "paceline.cli", "stacks", tmp_path / "run", "--json"
        )
        shown = run_command(ask, LIMIT_S, env=kept_environment())
    assert shown.returncode == 0, shown.stderr
    ranks = json.loads(shown.stdout)["ranks"]
    assert [rank["host"] for rank in ranks] == [host.name for host in lab.hosts]
    assert all(rank["frames"] for rank in ranks), shown.stdout
