"""The mpi4py backend in anybody's script, started by mpirun alone, on two hosts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.support.commands import run_command
from tests.support.environment import AS_ROOT

from paceline.runner.lab import INTERFACE

pytestmark = [pytest.mark.cluster, pytest.mark.needs("lab")]

PROGRAM = Path(__file__).parents[1] / "contract/programs/mpi_operations.py"
LIMIT_S = 120


def start(lab, tmp_path, **variables):
    """What mpirun says of the program with a rank on each host."""
    command = lab.hosts[0].command(
        Path(sys.executable).with_name("mpirun"), "-n", 2,
        "--host", ",".join(f"{host.address}:1" for host in lab.hosts),
        "--prtemca", "plm_ssh_agent", lab.agent, "--mca", "btl", "tcp,self",
        "--mca", "btl_tcp_if_include", INTERFACE, *_exported(variables),
        sys.executable, PROGRAM, "plain", tmp_path,
    )  # fmt: skip
    environment = {**os.environ, **AS_ROOT, "OMP_NUM_THREADS": "1", **variables}
    return run_command(command, LIMIT_S, env=environment)


def _exported(variables):
    return [word for name in variables for word in ("-x", name)]


def test_ranks_of_two_hosts_meet_at_the_interface_that_is_named(lab, tmp_path):
    said = start(lab, tmp_path, PACELINE_INTERFACE=INTERFACE)
    assert said.returncode == 0, said.stdout[-3000:] + said.stderr[-3000:]
    for rank in range(2):
        report = json.loads((tmp_path / f"report.{rank}.json").read_text())
        assert (report["rank"], report["local_rank"]) == (rank, 0)
        assert report["store"] == lab.hosts[0].address


def test_hosts_that_do_not_know_their_way_are_told_to_name_an_interface(lab, tmp_path):
    """Their names lead nowhere here."""
    said = start(lab, tmp_path)
    assert said.returncode != 0
    assert "PACELINE_INTERFACE=eth0" in said.stderr
